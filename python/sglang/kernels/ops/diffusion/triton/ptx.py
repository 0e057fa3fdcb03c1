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
    """`x` (bf16 or fp16) in fp32. bf16 pairs take one instruction an element: half of Triton's own."""
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
    it to a bf16 operation (which would round subnormal results once instead of twice). bf16 values
    are converted in pairs: the conversion of a single one runs at a quarter of the rate.
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
