"""Exactly rounded device arithmetic for Triton kernels that must repeat another kernel's bits.

Triton and LLVM may contract `a * b + c` into one FMA, narrow an fp32 product that is rounded to
bf16, and pick an approximate division. Inline PTX with an explicit rounding mode is never
rewritten, so each helper means one operation (`.rn`: round to nearest even, subnormals kept):

    mul_rn, add_rn, sub_rn    one rounding          fma_rn      a * b + c with one rounding
    div_rn, rcp_rn            IEEE quotient         rsqrt_approx, rcp_approx   the hardware's MUFU

`rsqrt_approx` equals CUDA's `rsqrtf`: ptxas rescales a subnormal argument by 2^24 and the result
by 2^12. Arguments are fp32 tensors (or scalars) and broadcast against each other. Importing this
module imports triton: import it from kernel modules only, never from one that must load without.
"""

import triton
import triton.language as tl


@triton.jit
def mul_rn(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def add_rn(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise(
        "add.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def sub_rn(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise(
        "sub.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def fma_rn(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def div_rn(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise(
        "div.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def rcp_rn(a: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise(
        "rcp.rn.f32 $0, $1;", "=f,f", [a], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def rcp_approx(a: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise(
        "rcp.approx.f32 $0, $1;", "=f,f", [a], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def rsqrt_approx(a: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise(
        "rsqrt.approx.f32 $0, $1;", "=f,f", [a], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def widen(x: tl.tensor) -> tl.tensor:
    """`x` (bf16 or fp16) in fp32. A bf16 pair takes two instructions, half of Triton's own."""
    if x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(tl.float32)


@triton.jit
def round_to(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """fp32 `x` rounded to nearest even in `dtype` (bf16 or fp16) and widened back to fp32.

    The arithmetic around it is opaque inline PTX, so LLVM cannot narrow the product or sum before
    it to a half-precision operation. bf16 values are converted in pairs: a single one takes an
    instruction of a quarter of the rate.
    """
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 pair;
            cvt.rn.bf16x2.f32 pair, $3, $2;
            shl.b32 $0, pair, 16;
            and.b32 $1, pair, 0xffff0000;
            }""",
            "=r,=r,r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(dtype).to(tl.float32)


@triton.jit
def one_plus(scale: tl.tensor) -> tl.tensor:
    """round(1 + scale) in the dtype of `scale`, as eager's `1 + scale` rounds it.

    Eager adds in fp32 and rounds the sum again. For a sum of two bf16 numbers both roundings are
    one (24 bits >= 2 * 8 + 2), so a bf16 FMA gives the same bits at half the instructions.
    """
    if scale.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 ones;
            mov.b32 ones, 0x3f803f80;
            fma.rn.bf16x2 $0, $1, ones, ones;
            }""",
            "=r,r",
            [scale],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return add_rn(scale.to(tl.float32), 1.0).to(scale.dtype)


@triton.jit
def modulate(value: tl.tensor, factor: tl.tensor, shift: tl.tensor) -> tl.tensor:
    """round(round(round(value) * factor) + shift): fp32 `value`, the rest in one half dtype.

    `factor` comes from `one_plus`. As bf16 it is then a multiple of 2^-8, so its product with a
    bf16 number (a multiple of 2^-133) is exact in fp32 even where it is subnormal: eager's fp32
    product rounded to bf16 is the bf16 product. The sum is the one of `one_plus`. The addend -0
    and the factor 1 make the two FMAs a product and a sum that keep the signs of zeros.
    """
    dtype: tl.constexpr = factor.dtype
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 y, ones, zeros;
            mov.b32 ones, 0x3f803f80;
            mov.b32 zeros, 0x80008000;
            cvt.rn.bf16x2.f32 y, $2, $1;
            fma.rn.bf16x2 y, y, $3, zeros;
            fma.rn.bf16x2 $0, y, ones, $4;
            }""",
            "=r,r,r,r,r",
            [value, factor, shift],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        product = mul_rn(round_to(value, dtype), factor.to(tl.float32))
        return add_rn(round_to(product, dtype), shift.to(tl.float32)).to(dtype)


@triton.jit
def affine(value: tl.tensor, factor: tl.tensor, addend: tl.tensor) -> tl.tensor:
    """round(factor * value + addend), rounded once: fp32 `value`, the rest in one half dtype."""
    dtype: tl.constexpr = factor.dtype
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 factor0, factor1, addend0, addend1;
            shl.b32 factor0, $3, 16;
            and.b32 factor1, $3, 0xffff0000;
            shl.b32 addend0, $4, 16;
            and.b32 addend1, $4, 0xffff0000;
            fma.rn.f32 addend0, factor0, $1, addend0;
            fma.rn.f32 addend1, factor1, $2, addend1;
            cvt.rn.bf16x2.f32 $0, addend1, addend0;
            }""",
            "=r,r,r,r,r",
            [value, factor, addend],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return fma_rn(factor.to(tl.float32), value, addend.to(tl.float32)).to(dtype)


@triton.jit
def add_gated(residual: tl.tensor, gate: tl.tensor, update: tl.tensor) -> tl.tensor:
    """round(residual + round(gate * update)) of one half dtype.

    bf16 arithmetic gives eager's bits: see `modulate` and `rotate_rounded`.
    """
    dtype: tl.constexpr = residual.dtype
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 gated, ones, zeros;
            mov.b32 ones, 0x3f803f80;
            mov.b32 zeros, 0x80008000;
            fma.rn.bf16x2 gated, $2, $3, zeros;
            fma.rn.bf16x2 $0, $1, ones, gated;
            }""",
            "=r,r,r,r",
            [residual, gate, update],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        gated = round_to(mul_rn(gate.to(tl.float32), update.to(tl.float32)), dtype)
        return add_rn(residual.to(tl.float32), gated).to(dtype)


@triton.jit
def rotate_rounded(
    first: tl.tensor,
    second: tl.tensor,
    cos_first: tl.tensor,
    sin_first: tl.tensor,
    cos_second: tl.tensor,
    sin_second: tl.tensor,
) -> tl.tensor:
    """Round a pair of channels and rotate it, every product and sum rounded to the tables' dtype.

    fp32 `first`, `second` -> (round(round(a * cos_first) - round(b * sin_first)),
    round(round(b * cos_second) + round(a * sin_second))), a and b being the rounded pair. As in
    `modulate` bf16 arithmetic gives eager's bits: a product of two bf16 numbers has 16 bits, so
    fp32 holds it exactly but below half of bf16's least number, where both round to zero.
    """
    dtype: tl.constexpr = cos_first.dtype
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, ones, minus, zeros, left, right;
            mov.b32 ones, 0x3f803f80;
            mov.b32 minus, 0xbf80bf80;
            mov.b32 zeros, 0x80008000;
            cvt.rn.bf16x2.f32 a, $3, $2;
            cvt.rn.bf16x2.f32 b, $5, $4;
            fma.rn.bf16x2 left, a, $6, zeros;
            fma.rn.bf16x2 right, b, $7, zeros;
            fma.rn.bf16x2 $0, right, minus, left;
            fma.rn.bf16x2 left, b, $8, zeros;
            fma.rn.bf16x2 right, a, $9, zeros;
            fma.rn.bf16x2 $1, right, ones, left;
            }""",
            "=&r,=&r,r,r,r,r,r,r,r,r",
            [first, second, cos_first, sin_first, cos_second, sin_second],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        a = round_to(first, dtype)
        b = round_to(second, dtype)
        left = round_to(mul_rn(a, cos_first.to(tl.float32)), dtype)
        right = round_to(mul_rn(b, sin_first.to(tl.float32)), dtype)
        out_first = sub_rn(left, right).to(dtype)
        left = round_to(mul_rn(b, cos_second.to(tl.float32)), dtype)
        right = round_to(mul_rn(a, sin_second.to(tl.float32)), dtype)
        return out_first, add_rn(left, right).to(dtype)
