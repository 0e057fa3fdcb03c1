"""RMSNorm of q and k per head, then rotary embedding, for one stream or two joined streams.

Equals, bit for bit, the eager chain of an attention block (16-bit x, weight `[D]`, fp32 tables):

    y   = F.rms_norm(x, (D,), weight, eps)                       aten's fused CUDA kernel
    real, imag = y.unflatten(-1, (-1, 2)).unbind(-1);  y_rot = stack([-imag, real], -1).flatten(-2)
    out = (y.float() * cos + y_rot.float() * sin).to(x.dtype)

Numerical contract (x and weight are widened to fp32, everything until `round` is fp32):
- sum of squares: vector i = elements 4i..4i+3, summed serially `s = fma(v, v, s)` from 0 (the
  product of two 16-bit floats is exact, so the FMA rounds as a separate multiply and add would);
  the D/4 <= 32 vector sums are folded as SHFL.DOWN 16, 8, 4, 2, 1: `s[i] += s[i + offset]`, absent
  vectors being 0. (aten's block is 32 x 4 threads; with D <= 128 only its first warp has data.)
- `rstd = rsqrt.approx(sum / D (div.rn) + eps)`, eps fp32; FTZ off.
- `y = round(weight * (rstd * x))`: two multiplications, each rounded in fp32, then to the dtype.
- `out[2i] = round(y[2i] * cos[2i] - y[2i+1] * sin[2i])` and
  `out[2i+1] = round(y[2i+1] * cos[2i+1] + y[2i] * sin[2i+1])`: both products and the sum are
  rounded in fp32, no FMA; then one rounding to the dtype.
All roundings are to nearest even. Made after torch 2.11's `_fused_rms_norm` (sm_90, CUDA 13).

Shapes: q, k `[B, S, H, D]` with H <= 128, cos, sin `[S, D]` of the joint sequence. Inputs may be
strided views (of a packed q|k|v GEMM output, say) with contiguous heads; outputs are contiguous and
new.
"""

from typing import Any

import torch
import torch.nn.functional as F

from sglang.kernels.ops.diffusion.triton.head_streams import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    VECTOR,
    HeadTile,
    head_strides,
    head_tile,
    new_heads,
    stream_fits,
    table_fits,
)
from sglang.kernels.registration import register_op

TILE = HeadTile(elements=512)  # 4 heads; 28.2 us at (1, 4096, 24, 128) on an H200, 1024: 29.1
QK = tuple[torch.Tensor, torch.Tensor]


def _rope_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    real, imag = x.unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack([-imag, real], dim=-1).flatten(-2)
    cos, sin = cos[None, :, None, :], sin[None, :, None, :]
    return (x.float() * cos + rotated.float() * sin).to(x.dtype)


def qk_rmsnorm_rope_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> QK:
    """The eager chain of one stream: q, k `[B, S, H, D]` -> the same shapes, normed and rotated."""
    q = F.rms_norm(q, q.shape[-1:], q_weight, eps)
    k = F.rms_norm(k, k.shape[-1:], k_weight, eps)
    return _rope_reference(q, cos, sin), _rope_reference(k, cos, sin)


def joint_qk_rmsnorm_rope_reference(
    txt_q: torch.Tensor,
    txt_k: torch.Tensor,
    img_q: torch.Tensor,
    img_k: torch.Tensor,
    txt_q_weight: torch.Tensor,
    txt_k_weight: torch.Tensor,
    img_q_weight: torch.Tensor,
    img_k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> QK:
    """The eager chain of two streams: norm each, text first in one sequence, rotate."""
    head_dim = img_q.shape[-1:]
    txt_q = F.rms_norm(txt_q, head_dim, txt_q_weight, eps)
    txt_k = F.rms_norm(txt_k, head_dim, txt_k_weight, eps)
    img_q = F.rms_norm(img_q, head_dim, img_q_weight, eps)
    img_k = F.rms_norm(img_k, head_dim, img_k_weight, eps)
    q, k = torch.cat([txt_q, img_q], dim=1), torch.cat([txt_k, img_k], dim=1)
    return _rope_reference(q, cos, sin), _rope_reference(k, cos, sin)


def can_use_fused_qk_rmsnorm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> bool:
    """Whether the fused kernel takes these inputs; otherwise run the eager chain."""
    return stream_fits(q, k, q_weight, k_weight) and _tables_fit(q, cos, sin, q.shape[1])


def can_use_fused_joint_qk_rmsnorm_rope(
    txt_q: torch.Tensor,
    txt_k: torch.Tensor,
    img_q: torch.Tensor,
    img_k: torch.Tensor,
    txt_q_weight: torch.Tensor,
    txt_k_weight: torch.Tensor,
    img_q_weight: torch.Tensor,
    img_k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> bool:
    """Whether the fused kernel takes these two streams; otherwise run the eager chain."""
    if not stream_fits(txt_q, txt_k, txt_q_weight, txt_k_weight):
        return False
    if not stream_fits(img_q, img_k, img_q_weight, img_k_weight):
        return False
    same = (txt_q.device, txt_q.dtype) == (img_q.device, img_q.dtype)
    same = same and txt_q.shape[0] == img_q.shape[0] and txt_q.shape[2:] == img_q.shape[2:]
    return same and _tables_fit(img_q, cos, sin, txt_q.shape[1] + img_q.shape[1])


def _tables_fit(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, tokens: int) -> bool:
    shape = (tokens, q.shape[3])
    return all(table_fits(table, shape, q, torch.float32) for table in (cos, sin))


def launch(
    txt: tuple[torch.Tensor, ...] | None,
    img: tuple[torch.Tensor, ...],
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    tile: HeadTile = TILE,
) -> QK:
    """`txt`, `img`: (q, k, q_weight, k_weight) of a stream."""
    from sglang.kernels.ops.diffusion.triton.qk_rmsnorm_rope_kernels import qk_rmsnorm_rope_kernel

    joint = txt is not None
    first = txt if txt is not None else img
    batch, _, heads, head_dim = img[0].shape
    tokens = cos.shape[0]
    out_q = img[0].new_empty(batch, tokens, heads, head_dim)
    out_k = torch.empty_like(out_q)
    strides = [stride // VECTOR for stream in (first, img) for stride in head_strides(stream[0])]
    with torch.cuda.device(out_q.device):
        qk_rmsnorm_rope_kernel[(tokens, batch)](
            *first[:2], *img[:2], *first[2:], *img[2:], cos, sin, out_q, out_k, *strides,
            tokens - img[0].shape[1], eps,
            JOINT=joint, H=heads, D=head_dim, **head_tile(heads, head_dim, tile),
        )  # fmt: skip
    return out_q, out_k


def _qk_rmsnorm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not can_use_fused_qk_rmsnorm_rope(q, k, q_weight, k_weight, cos, sin):
        raise ValueError(_rejection("fused_qk_rmsnorm_rope", q=q, k=k, q_weight=q_weight,
                                    k_weight=k_weight, cos=cos, sin=sin))  # fmt: skip
    return launch(None, (q, k, q_weight, k_weight), cos, sin, eps)


def _joint_qk_rmsnorm_rope(
    txt_q: torch.Tensor,
    txt_k: torch.Tensor,
    img_q: torch.Tensor,
    img_k: torch.Tensor,
    txt_q_weight: torch.Tensor,
    txt_k_weight: torch.Tensor,
    img_q_weight: torch.Tensor,
    img_k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    txt = (txt_q, txt_k, txt_q_weight, txt_k_weight)
    img = (img_q, img_k, img_q_weight, img_k_weight)
    if not can_use_fused_joint_qk_rmsnorm_rope(*txt[:2], *img[:2], *txt[2:], *img[2:], cos, sin):
        raise ValueError(_rejection("fused_joint_qk_rmsnorm_rope", txt_q=txt_q, txt_k=txt_k,
                                    img_q=img_q, img_k=img_k, img_q_weight=img_q_weight,
                                    cos=cos, sin=sin))  # fmt: skip
    return launch(txt, img, cos, sin, eps)


def _joint_qk_rmsnorm_rope_fake(
    txt_q: torch.Tensor,
    txt_k: torch.Tensor,
    img_q: torch.Tensor,
    img_k: torch.Tensor,
    txt_q_weight: torch.Tensor,
    txt_k_weight: torch.Tensor,
    img_q_weight: torch.Tensor,
    img_k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, txt_tokens, heads, head_dim = txt_q.shape
    shape = (batch, txt_tokens + img_q.shape[1], heads, head_dim)
    return img_q.new_empty(shape), img_k.new_empty(shape)


def _rejection(op: str, **tensors: torch.Tensor) -> str:
    got = ", ".join(
        f"{name} {str(t.dtype)[6:]} {tuple(t.shape)} strides {t.stride()} on {t.device}"
        for name, t in tensors.items()
    )
    return (
        f"{op} got {got}; expected CUDA (sm_80 or newer) bf16 or fp16 q, k [B, S, H, D] of one "
        f"shape and stride with D a multiple of {VECTOR} up to {MAX_HEAD_DIM}, H of {MAX_HEADS} "
        "at most, contiguous heads "
        "and 16-byte aligned rows, weights [D] of the same dtype, contiguous fp32 cos, sin [S, D] "
        f"and no gradient; ask can_use_{op} first and run the eager chain where it says no"
    )


_op = register_op("qk_rmsnorm_rope", _qk_rmsnorm_rope, new_heads)
_joint_op = register_op(
    "joint_qk_rmsnorm_rope", _joint_qk_rmsnorm_rope, _joint_qk_rmsnorm_rope_fake
)


def fused_qk_rmsnorm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> QK:
    """`qk_rmsnorm_rope_reference` in one kernel, bit-exact; outputs are contiguous.

    Raises ValueError where `can_use_fused_qk_rmsnorm_rope` says no.
    """
    return _op(q, k, q_weight, k_weight, cos, sin, eps)


def fused_joint_qk_rmsnorm_rope(
    txt_q: torch.Tensor,
    txt_k: torch.Tensor,
    img_q: torch.Tensor,
    img_k: torch.Tensor,
    txt_q_weight: torch.Tensor,
    txt_k_weight: torch.Tensor,
    img_q_weight: torch.Tensor,
    img_k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> QK:
    """`joint_qk_rmsnorm_rope_reference` in one kernel, bit-exact: q, k `[B, S_txt + S_img, H, D]`.

    cos, sin cover the joint sequence, text first. Raises ValueError where
    `can_use_fused_joint_qk_rmsnorm_rope` says no.
    """
    return _joint_op(
        txt_q, txt_k, img_q, img_k, txt_q_weight, txt_k_weight, img_q_weight, img_k_weight,
        cos, sin, eps,
    )  # fmt: skip


def aot_signatures() -> list[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """(kernel, signature, constexprs, options) of the FLUX.1 launches, to compile without a GPU."""
    from sglang.kernels.ops.diffusion.triton.qk_rmsnorm_rope_kernels import qk_rmsnorm_rope_kernel

    signature = {}
    for name in qk_rmsnorm_rope_kernel.arg_names:
        if name.isupper():
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = "*fp32" if name in ("cos_ptr", "sin_ptr") else "*bf16"
        else:
            signature[name] = "fp32" if name == "eps" else "i32"
    tile = head_tile(24, 128, TILE)
    warps = {"num_warps": tile.pop("num_warps")}
    constants = {"H": 24, "D": 128, **tile}
    return [
        (qk_rmsnorm_rope_kernel, signature, {"JOINT": joint, **constants}, warps)
        for joint in (False, True)
    ]
