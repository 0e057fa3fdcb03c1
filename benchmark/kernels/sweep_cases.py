"""What `bandwidth_sweep.py` times: each memory-bound op at its big shapes, in several launches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sglang.kernels.jit import CudaKernel
from sglang.kernels.ops.diffusion import gelu_mul, gelu_tanh_concat, modulate_scale_shift
from sglang.kernels.ops.diffusion import residual_gate_add as gate_add
from sglang.kernels.ops.diffusion.triton import gated_layernorm_modulate as gated_layernorm
from sglang.kernels.ops.diffusion.triton import layernorm_modulate as layernorm
from sglang.kernels.ops.diffusion.triton import qk_layernorm_rope, qk_rmsnorm_rope, qk_rotate_half
from sglang.kernels.ops.diffusion.triton import qk_rmsnorm_rotate_half as rotate
from sglang.kernels.ops.diffusion.triton import rmsnorm_scale_shift_bitexact as rmsnorm
from sglang.kernels.ops.diffusion.triton.head_streams import HeadTile
from sglang.kernels.ops.diffusion.triton.row_launch import RowLaunch
from sglang.kernels.ops.diffusion.vector_tile import VectorTile

EPS = 1e-6
Launch = RowLaunch | HeadTile | VectorTile
TILES = (VectorTile(128, 2), VectorTile(256, 2), VectorTile(128, 4), VectorTile(256, 4))
MODULATE_TILES = (*TILES, VectorTile(512, 4), VectorTile(128, 8))
ROPE_TILES = (HeadTile(1024), HeadTile(1024, 16), HeadTile(512), HeadTile(512, 16))
HALF_TILES = (HeadTile(4096, 16), HeadTile(4096, 8), HeadTile(4096, 32),
              HeadTile(2048, 16), HeadTile(2048, 8), HeadTile(1024, 8))  # fmt: skip
PLAIN, HELD = RowLaunch(), RowLaunch(hold=True)
LAYERNORM_LAUNCHES = (
    PLAIN, HELD, RowLaunch(rows=2),
    *(RowLaunch(per_sm=count, ahead=True, hold=True) for count in (4, 5, 6)),
    *(RowLaunch(per_sm=count, ahead=True) for count in (5, 7)),
)  # fmt: skip
GATED_LAYERNORM_LAUNCHES = (
    PLAIN, HELD, RowLaunch(rows=2), RowLaunch(rows=2, warps=8), RowLaunch(warps=2),
    RowLaunch(per_sm=5), RowLaunch(per_sm=10),
    *(RowLaunch(per_sm=count, hold=True) for count in (4, 8)),
    *(RowLaunch(per_sm=count, ahead=True) for count in (2, 3, 4)),
    *(RowLaunch(per_sm=count, ahead=True, hold=True) for count in (2, 3)),
    *(RowLaunch(rows=2, warps=8, per_sm=count, ahead=True) for count in (1, 2)),
)  # fmt: skip
RMSNORM_LAUNCHES = (
    RowLaunch(warps=2), PLAIN, HELD, RowLaunch(per_sm=4, hold=True),
    *(RowLaunch(per_sm=count, ahead=True, hold=True) for count in (2, 3)),
    *(RowLaunch(per_sm=count, ahead=True) for count in (3, 4)),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One op at one shape; `launch(how)` gives what `reference()` gives."""

    op: str
    shape: tuple[int, ...]
    moved: int  # bytes: each read or written once
    current: Launch
    launches: Sequence[Launch]
    reference: Callable[[], Any]
    launch: Callable[[Any], Any]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def ready(kernel: CudaKernel) -> CudaKernel:
    assert kernel.ready(0), kernel.failure
    return kernel


def packed_heads(tokens: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k as views of a packed q|k|v projection."""
    q, k, _ = normal(1, tokens, 3 * heads * 128).unflatten(-1, (3, heads, 128)).unbind(2)
    return q, k


def modulate_case(rows: int, width: int) -> Case:
    x, (shift, scale) = normal(1, rows, width), normal(1, 6 * width).chunk(6, 1)[:2]

    def launch(tile: VectorTile) -> torch.Tensor:
        kernels = modulate_kernels[tile]
        ready(kernels.by_dtype[x.dtype])
        return kernels.launch(x, scale, shift)

    modulate_kernels = {
        tile: modulate_scale_shift.ModulateScaleShiftKernels(tile) for tile in MODULATE_TILES
    }
    reference = partial(modulate_scale_shift.modulate_scale_shift_reference, x, scale, shift)
    return Case("modulate_scale_shift", tuple(x.shape), 4 * x.numel() + 4 * width,
                modulate_scale_shift.TILE, MODULATE_TILES, reference, launch)  # fmt: skip


def gate_case(rows: int, width: int) -> Case:
    residual, update, gate = normal(1, rows, width), normal(1, rows, width), normal(1, 1, width)
    kernels = {tile: gate_add.ResidualGateAddKernels(tile) for tile in TILES}

    def launch(tile: VectorTile) -> torch.Tensor:
        kernel = ready(kernels[tile].select(residual, gate))
        return kernels[tile].launch(kernel, residual, update, gate)

    reference = partial(gate_add.residual_gate_add_reference, residual, update, gate)
    return Case("residual_gate_add", tuple(residual.shape), 6 * residual.numel() + 2 * width,
                VectorTile(), TILES, reference, launch)  # fmt: skip


def gelu_concat_case(rows: int, width: int) -> Case:
    attn, mlp = normal(1, rows, width), normal(1, rows, 4 * width)
    kernels = {tile: gelu_tanh_concat.GeluTanhConcatKernels(tile) for tile in TILES}

    def launch(tile: VectorTile) -> torch.Tensor:
        ready(kernels[tile].by_dtype[attn.dtype])
        return kernels[tile].launch(attn, mlp)

    reference = partial(gelu_tanh_concat.gelu_tanh_concat_reference, attn, mlp)
    return Case("gelu_tanh_concat", tuple(attn.shape), 20 * attn.numel(),
                VectorTile(), TILES, reference, launch)  # fmt: skip


def gelu_mul_case(rows: int, width: int) -> Case:
    up, gate = normal(1, rows, 2 * width).chunk(2, -1)
    kernels = {tile: gelu_mul.GeluMulKernels(tile) for tile in TILES}

    def launch(tile: VectorTile) -> torch.Tensor:
        ready(kernels[tile].by_dtype[up.dtype])
        return kernels[tile].launch(up, gate)

    reference = partial(gelu_mul.gelu_mul_reference, up, gate)
    return Case("gelu_mul", tuple(up.shape), 6 * up.numel(),
                VectorTile(), TILES, reference, launch)  # fmt: skip


def layernorm_case(rows: int, width: int) -> Case:
    x, (shift, scale) = normal(1, rows, width), normal(1, 12 * width).chunk(12, 1)[:2]
    return Case(
        "layernorm_modulate", tuple(x.shape), 4 * x.numel() + 4 * width,
        layernorm.LAUNCH, LAYERNORM_LAUNCHES,
        partial(layernorm.layernorm_modulate_reference, x, scale, shift, EPS),
        partial(layernorm.launch_modulate, x, scale, shift, EPS),
    )  # fmt: skip


def gated_layernorm_case(rows: int, width: int) -> Case:
    residual, update = normal(1, rows, width), normal(1, rows, width)
    gate, scale, shift = normal(1, 12 * width).chunk(12, 1)[:3]
    args = (residual, update, gate, scale, shift, EPS)
    return Case(
        "gated_layernorm_modulate", tuple(residual.shape), 8 * residual.numel() + 6 * width,
        gated_layernorm.LAUNCH, GATED_LAYERNORM_LAUNCHES,
        partial(gated_layernorm.gated_layernorm_modulate_reference, *args),
        partial(gated_layernorm.launch, *args),
    )  # fmt: skip


def rmsnorm_case(rows: int, width: int) -> Case:
    x, weight = normal(1, rows, width), normal(width)
    scale, shift = normal(1, 6 * width).chunk(6, 1)[:2]
    args = (weight, scale, shift, EPS, "aten")
    return Case(
        "rmsnorm_scale_shift", tuple(x.shape), 4 * x.numel() + 6 * width,
        rmsnorm.LAUNCH_AHEAD, RMSNORM_LAUNCHES,
        partial(rmsnorm.rmsnorm_scale_shift_reference, x, *args),
        lambda how: rmsnorm.launch(x, None, None, *args, how)[0],
    )  # fmt: skip


def residual_rmsnorm_case(rows: int, width: int) -> Case:
    x, update, weight = normal(1, rows, width), normal(1, rows, width), normal(width)
    gate, scale, shift = normal(1, 6 * width).chunk(6, 1)[:3]
    args = (x, update, gate, weight, scale, shift, EPS, "aten")
    return Case(
        "scale_residual_rmsnorm_scale_shift", tuple(x.shape), 8 * x.numel() + 8 * width,
        rmsnorm.LAUNCH, RMSNORM_LAUNCHES,
        partial(rmsnorm.scale_residual_rmsnorm_scale_shift_reference, *args),
        partial(rmsnorm.launch, *args),
    )  # fmt: skip


def rope_case(tokens: int, text: int, heads: int) -> Case:
    """FLUX.1's rotation of one stream, or of `text` tokens joined with the rest."""
    streams = [(*packed_heads(count, heads), normal(128), normal(128))
               for count in (text, tokens - text) if count]  # fmt: skip
    angles = torch.rand(tokens, 64, device="cuda").mul(700).repeat_interleave(2, dim=1)
    tables = angles.cos(), angles.sin()
    txt, img = streams[0] if text else None, streams[-1]
    if txt is None:
        reference = partial(qk_rmsnorm_rope.qk_rmsnorm_rope_reference, *img, *tables, EPS)
    else:
        pairs = (*txt[:2], *img[:2], *txt[2:], *img[2:])
        reference = partial(qk_rmsnorm_rope.joint_qk_rmsnorm_rope_reference, *pairs, *tables, EPS)
    return Case(
        "joint_qk_rmsnorm_rope" if text else "qk_rmsnorm_rope", (1, tokens, heads, 128),
        8 * tokens * heads * 128 + 8 * tokens * 128, qk_rmsnorm_rope.TILE, ROPE_TILES,
        reference, partial(qk_rmsnorm_rope.launch, txt, img, *tables, EPS),
    )  # fmt: skip


def halves_case(op: str, tokens: int, text: int, heads: int = 32) -> Case:
    """The norms of q and k with the rotation by halves, or without."""
    q, k = packed_heads(tokens, heads)
    weights = normal(128), normal(128)
    angles = torch.rand(tokens - text, 1, 64, device="cuda").mul(700)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    half = cos.bfloat16(), sin.bfloat16()
    single = cos[:, 0].contiguous(), sin[:, 0].contiguous()
    launch = partial(qk_rotate_half.launch, q, k)
    reference, launch, table_bytes = {
        "qk_head_layernorm": (
            partial(layernorm.qk_head_layernorm_reference, q, k, EPS),
            partial(launch, None, None, 0, EPS), 0,
        ),
        "qk_layernorm_rope": (
            partial(qk_layernorm_rope.qk_layernorm_rope_reference, q, k, *single, text, EPS),
            partial(launch, None, single, text, EPS), 4 * cos.numel(),
        ),
        "qk_rmsnorm_rotate_half": (
            partial(rotate.qk_rmsnorm_rotate_half_reference, q, k, *weights, *half, EPS),
            partial(launch, weights, half, 0, EPS), 4 * cos.numel(),
        ),
    }[op]  # fmt: skip
    return Case(op, tuple(q.shape), 8 * q.numel() + table_bytes, qk_rotate_half.TILE,
                HALF_TILES, reference, launch)  # fmt: skip


def cases() -> Iterator[Callable[[], Case]]:
    """FLUX.1 (24 heads, hidden 3072), GLM-Image and ERNIE-Image (32, 4096) at 1024x1024."""
    for make in (modulate_case, layernorm_case, gate_case):
        yield from (partial(make, rows, 3072) for rows in (4096, 4608))
        yield partial(make, 4096, 4096)
    yield from (partial(gated_layernorm_case, 4096, width) for width in (3072, 4096))
    yield partial(rmsnorm_case, 4216, 4096)
    yield partial(residual_rmsnorm_case, 4216, 4096)
    yield partial(rope_case, 4096, 0, 24)
    yield partial(rope_case, 4608, 0, 24)
    yield partial(rope_case, 4608, 512, 24)
    yield partial(halves_case, "qk_head_layernorm", 4360, 0)
    yield partial(halves_case, "qk_layernorm_rope", 4360, 264)
    yield partial(halves_case, "qk_rmsnorm_rotate_half", 4216, 0)
    yield partial(gelu_concat_case, 4608, 3072)
    yield partial(gelu_mul_case, 4216, 12288)
