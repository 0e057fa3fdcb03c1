"""The reduction orders that the bit-exact kernels repeat, checked by hand."""

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.reduction_models import (
    Moments,
    aten_sum_of_squares,
    flashinfer_sum_of_squares,
    fma32,
    layer_norm_moments,
    merge_moments,
    welford_step,
)

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

TINY = 2.0**-149  # the smallest fp32 number


def float32(value: Fraction) -> np.float32:
    """The nearest fp32 number, ties to even."""
    if value == 0:
        return np.float32(0)
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    return np.float32(float(round(value / quantum) * quantum))


def row(length, values):
    """One row of zeros but for {first element of a vector of four: value of the whole vector}."""
    out = np.zeros((1, length), np.float32)
    for start, value in values.items():
        out[0, start : start + 4] = value
    return out


def state(mean, m2, count):
    return Moments(*(np.array([x], np.float32) for x in (mean, m2, count)))


def test_fma_rounds_once():
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24: the last term is half an ulp, and the addend decides.
    a = np.float32(1 + 2.0**-12)
    tie, above = fma32([a], [a], [0]), fma32([a], [a], np.float32([2.0**-60]))
    assert tie[0] == np.float32(1 + 2.0**-11)
    assert above[0] == np.float32(1 + 2.0**-11 + 2.0**-23)


def test_fma_against_exact_arithmetic():
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 2**32, (3, 3000), dtype=np.uint32).view(np.float32)
    close = generator.standard_normal((3, 3000)).astype(np.float32)
    close[2] = -close[0] * close[1]  # cancellation leaves the product's error
    for a, b, c in (bits, close):
        with np.errstate(all="ignore"):
            fine = np.isfinite(np.abs(a.astype(float) * b) * 2 + np.abs(c)) & np.isfinite(a + b + c)
            fine &= np.abs(a.astype(float) * b + c) < 2.0**127
        got = fma32(a, b, c)
        want = [float32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
                for x, y, z in zip(a[fine], b[fine], c[fine], strict=True)]  # fmt: skip
        assert fine.sum() > 1000
        assert np.array_equal(got[fine], np.array(want))


def test_fma_keeps_infinities_and_nans():
    inf, nan = float("inf"), float("nan")
    got = fma32(
        np.float32([inf, 0, 1, 3e38]), np.float32([1, inf, 2, 3e38]), np.float32([1, 1, nan, 0])
    )
    assert got[0] == inf and np.isnan(got[1]) and np.isnan(got[2]) and got[3] == inf


def test_one_thread_counts_one_two_three_four():
    # mean 1, 1.5, 2, 2.5 (1.5 / 3 rounds to 0.5); m2 0, 0.5, 2, 5.
    mean, m2, count = layer_norm_moments(np.float32([[1, 2, 3, 4]]))
    assert (mean[0], m2[0], count[0]) == (2.5, 5, 4)


def test_welford_step_fuses_both_products():
    third = np.float32(1) / np.float32(3)
    before = state(1, 0, 2)
    after = welford_step(np.float32([1 + 2.0**-22]), before)
    assert after.mean[0] == float32(1 + Fraction(2) ** -22 * Fraction(float(third)))
    deviation = np.float32(1 + 2.0**-22) - after.mean[0]
    assert after.m2[0] == np.float32(2.0**-22 * float(deviation)) and after.count[0] == 3


def test_two_threads_merge():
    # means 1 and 3, four values each: mean 2, m2 = 4 * 2^2 * 0.5 = 8.
    mean, m2, count = layer_norm_moments(row(8, {0: 1, 4: 3}))
    assert (mean[0], m2[0], count[0]) == (2, 8, 8)


def test_merge_rounds_the_own_mean_first():
    # The exact mean is 1.5 TINY. Own 1: 0.5 -> 0, then 0 + 1. Own 2: 1, then 1 + 0.5 -> 2.
    low, high = state(TINY, 0, 4), state(2 * TINY, 0, 4)
    assert merge_moments(low, high).mean[0] == TINY
    assert merge_moments(high, low).mean[0] == 2 * TINY


def test_empty_threads():
    empty, four = state(0, 0, 0), state(3, 5, 4)
    assert [x[0] for x in merge_moments(empty, empty)] == [0, 0, 0]
    assert [x[0] for x in merge_moments(four, empty)] == [3, 5, 4]
    assert [x[0] for x in merge_moments(empty, four)] == [3, 5, 4]
    huge = merge_moments(state(1e30, 0, 4), empty)  # 0 * overflow: NaN, as on the GPU
    assert huge.mean[0] == np.float32(1e30) and np.isnan(huge.m2[0])


@pytest.mark.parametrize("first,second", [(4 * 16, 4 * 8), (4 * 64, 4 * 32)])
def test_layer_norm_merges_the_far_half_first(first, second):
    """512 values; 2^24 in thread 0 swallows a 1 that it meets alone: (2^24 + 1) / 2 = 2^23."""
    mean, _, _ = layer_norm_moments(row(512, {0: 2**24, first: 1, second: 1}))
    assert mean[0] == 2**17
    other = second + first  # its partner in the first merge is `second`
    mean, _, _ = layer_norm_moments(row(512, {0: 2**24, second: 1, other: 1}))
    assert mean[0] == 2**17 + 2.0**-6


def test_ragged_rows_give_threads_unequal_counts():
    # 129 vectors: thread 0 has 8 values, the others 4. Means 2 (of 1 and 3) and 1: sum 520.
    mean, m2, count = layer_norm_moments(row(516, {**dict.fromkeys(range(0, 512, 4), 1), 512: 3}))
    assert count[0] == 516
    assert mean[0] == pytest.approx(524 / 516, rel=1e-6)
    assert m2[0] == pytest.approx(4 * (3 - 524 / 516) ** 2 + 512 * (1 - 524 / 516) ** 2, rel=1e-5)


@pytest.mark.parametrize("hidden", (64, 128, 2048, 2240, 3072, 4096))
def test_layer_norm_model_is_a_variance(hidden):
    rows = np.random.default_rng(hidden).standard_normal((3, hidden)).astype(np.float32)
    mean, m2, count = layer_norm_moments(rows)
    assert np.all(count == hidden)
    assert np.allclose(mean, rows.astype(float).mean(1), atol=1e-6)
    assert np.allclose(m2 / hidden, rows.astype(float).var(1), rtol=1e-5)


def test_aten_sum_of_squares_by_hand():
    # 4096^2 = 2^24 swallows a 1 that it meets alone; two ones added first survive.
    def place(*threads):
        out = np.zeros((1, 512), np.float32)
        out[0, 0], out[0, [4 * t for t in threads]] = 4096, 1
        return aten_sum_of_squares(out)[0]

    assert place(16, 8) == place(64, 32) == 2**24
    assert place(8, 24) == place(32, 96) == 2**24 + 2
    assert aten_sum_of_squares(np.float32([[4096, 1, 1, 0]]))[0] == 2**24  # serial in a thread
    assert aten_sum_of_squares(np.float32([[1, 1, 4096, 0]]))[0] == 2**24 + 2


def test_flashinfer_sum_of_squares_by_hand():
    def place(*threads):
        out = np.zeros((1, 4096), np.float32)
        out[0, 0], out[0, [8 * t for t in threads]] = 4096, 1
        return flashinfer_sum_of_squares(out, 64)[0]

    assert place(1, 2) == place(16, 32) == 2**24  # neighbours first, warps last
    assert place(2, 3) == place(33, 34) == 2**24 + 2
    second_vector = np.zeros((1, 4096), np.float32)
    second_vector[0, [0, 512, 513]] = 1, 1, 4096  # thread 0 owns vectors 0, 64, ...
    assert flashinfer_sum_of_squares(second_vector, 64)[0] == 2**24 + 2


def test_even_merges_have_weight_one_half():
    """What the LayerNorm kernel assumes where every thread has seen the same number of values."""
    for hidden in range(512, 8192 + 1, 512):
        counts = np.float32(hidden / 128) * np.float32(2) ** np.arange(7, dtype=np.float32)
        assert np.all(counts * (np.float32(1) / (counts + counts)) == 0.5), hidden


def test_reciprocals_survive_double_rounding():
    """1 / n as a Python constant, rounded to fp64 and then to fp32, is the fp32 quotient."""
    n = np.arange(1, 8193)
    assert np.array_equal((1.0 / n).astype(np.float32), np.float32(1) / n.astype(np.float32))


def test_merges_with_empty_threads_keep_a_head():
    """What the per-head kernel assumes: count * (1 / count) is exactly 1 up to 128 values."""
    n = np.arange(4, 129, 4).astype(np.float32)
    assert np.all(n * (np.float32(1) / n) == 1)


def test_bf16_products_survive_rounding_to_fp32():
    """What the bf16 arithmetic assumes: fp32 in between changes no product, subnormals included."""
    mantissas = torch.arange(128, 256, dtype=torch.float64)
    products = (mantissas[:, None] * mantissas).unique()  # of 14 to 16 bits, at every exponent:
    for exponent in range(-165, -110):  # around bf16's least number, 2^-133, and fp32's, 2^-149
        exact = products * 2.0**exponent
        assert torch.equal(exact.float().bfloat16(), _bf16_from_exact(exact)), exponent


def _bf16_from_exact(exact):
    """fp64 -> bf16 with one rounding to nearest even."""
    unit = 2.0 ** (torch.frexp(exact).exponent.double() - 8).clamp(min=-133)
    return (torch.round(exact / unit) * unit).bfloat16()  # torch.round takes ties to even


@pytest.mark.parametrize(
    "name, cases", [("layernorm", 18), ("rmsnorm", 15), ("rotate_half", 8), ("decode", 22)]
)
def test_triton_kernels_follow_the_models(name, cases):
    """Triton's interpreter runs the kernels against the models, on the CPU."""
    script = Path(__file__).parent / f"interpret_{name}.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{cases} cases agree" in done.stdout
