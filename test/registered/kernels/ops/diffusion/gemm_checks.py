"""Operands and stand-ins for the tests of a GEMM with an epilogue of its own.

Eager's GEMM is the standard at the models' shapes only: elsewhere cuBLAS may cut K, and then sums
in another order. There, operands whose sums are exact in float32 in any order take its place.
"""

import torch
import torch.nn.functional as F

from sglang.kernels.ops.diffusion import persistent_gemm

SPECIAL = (float("inf"), float("-inf"), float("nan"))


def show_h200(monkeypatch, op_module):
    """Predicates of `op_module` see an H200 as device 0 and no other."""
    monkeypatch.setattr(op_module, "is_hopper", lambda device: device == 0)
    monkeypatch.setattr(persistent_gemm, "multiprocessors", lambda device: 132)


def generator_of(device, seed):
    return torch.Generator(device=device).manual_seed(seed)


def normal(*shape, dtype=torch.bfloat16, device="cuda", seed=0):
    return torch.randn(shape, generator=generator_of(device, seed), device=device, dtype=dtype)


def weights(width, depth, **options):
    """[width, depth], such that products with normal rows have variance 1."""
    return normal(width, depth, **options) * depth**-0.5


def integers(*shape, dtype, unit, seed):
    """Of -3 .. 3 units: a sum of up to 2^14 products of them is exact in float32."""
    generator = generator_of("cuda", seed)
    return torch.randint(-3, 4, shape, generator=generator, device="cuda").to(dtype) * unit


def exact_linear(x, weight, bias=None):
    """F.linear of `integers`, rounded once to x's dtype."""
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(
        x.dtype
    )


def one_hot_rows(dtype):
    """x [1, 1024, 1024], with which a product is a weight's transpose."""
    return torch.eye(1024, dtype=dtype, device="cuda")[None]


def every_value_as_weight(width, dtype):
    """[width, 1024]: the 65536 values in the first 64 rows, infinities and NaN alone in others.

    A product with `one_hot_rows` has each finite value, and 0 times the others is NaN.
    """
    bits = torch.arange(-(2**15), 2**15, device="cuda", dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype)
    weight = weights(width, 1024, dtype=dtype)
    weight[:64] = values.where(values.isfinite(), torch.zeros_like(values)).view(64, 1024)
    weight[64 : 64 + len(SPECIAL)] = 0
    for row, value in enumerate(SPECIAL, start=64):
        weight[row, row] = value
    return weight
