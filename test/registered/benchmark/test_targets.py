"""The table of targets, from hand-made result rows."""

import pytest
from targets import TARGETS, Target, target_table

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


def cells_of(files, what):
    """Cells of the rows of the table that begin with `what`."""
    rows = [line.strip("| ").split(" | ") for line in target_table(files).splitlines()]
    return [row for row in rows if row[0].startswith(what)]


def denoise_row(model, arm, ms, **changes):
    size = {"width": 1024, "height": 1024, "num_gpus": 1}
    return {"model": model, "arm": arm, **size, "ms_per_step": ms, "ratio_to_floor": 1.07} | changes


@pytest.mark.parametrize(
    ("value", "met"), [(118, "stretch"), (118.1, "yes"), (122, "yes"), (122.1, "no")]
)
def test_an_upper_bound(value, met):
    assert Target("a", "ms", 122, 118, lambda files: None, "c").met(value) == met


@pytest.mark.parametrize(("value", "met"), [(34.0, "yes"), (33.9, "no")])
def test_a_lower_bound(value, met):
    assert Target("a", "dB", 34, None, lambda files: None, "c", at_least=True).met(value) == met


def test_what_no_file_says_is_not_measured():
    lines = target_table({}).splitlines()[2:]
    assert len(lines) == len(TARGETS)
    assert all(
        "not measured" in line and "bench" in line or "run_kernels" in line for line in lines
    )


def test_two_forwards_make_a_step_of_glm_image():
    row = denoise_row("glm-image", "lossless", 196.0)
    first, floor = cells_of({"denoise": [row]}, "GLM-Image DiT")
    assert first[1:5] == ["<= 99 ms/forward", "95", "98.0", "yes"]
    assert floor[3:5] == ["1.070", "no"]


def test_only_the_published_size_on_one_gpu_counts():
    rows = [
        denoise_row("flux1-dev", "lossless", 20.0, width=256, height=256),
        denoise_row("flux1-dev", "lossless", 40.0, num_gpus=4),
        denoise_row("flux1-dev", "lossless", 120.0),
    ]
    assert cells_of({"denoise": rows}, "FLUX.1-dev lossless")[0][3:5] == ["120.0", "yes"]


def test_the_worst_kernel_is_named():
    names = ("op", "shape", "eager_us", "fused_us", "gbps", "pct_copy")
    rows = [
        ("a", [1, 4096, 4096], 100, 20, 3600, 85.0),
        ("b", [1, 64, 64], 3, 2, 8, 10.0),
        ("c", [2, 4096, 3072], 90, 30, 3350, 81.0),
        ("d", [1, 4000, 3072], 90, 30, 1640, 40.0),  # 49 MB: a launch that short is no copy
    ]
    kernels = [dict(zip(names, row, strict=True)) for row in rows]
    of_copy, over_eager = cells_of({"kernels": kernels}, "every fused op")
    assert of_copy[3:5] == ["81.0 (c 2x4096x3072)", "yes"]
    assert over_eager[3:5] == ["1.500 (b 1x64x64)", "yes"]


def test_busy_and_overhead():
    families = {"families": {"gemm": 99.5, "gaps": 0.5}}
    files = {
        "denoise": [denoise_row("flux1-dev", "lossless", 100.0, **families)],
        "generate": [
            {"model": "flux1-dev", "arm": "lossless", "denoise_s": 9.5, "wall_s": 10.0},
        ],
    }
    assert cells_of(files, "FLUX.1-dev denoising")[0][3:5] == ["99.5", "yes"]
    assert cells_of(files, "FLUX.1-dev wall")[0][3:5] == ["5.000", "no"]


def test_busy_is_not_told_without_gaps():
    families = {"families": {"gemm": 99.5}}
    files = {"denoise": [denoise_row("flux1-dev", "lossless", 100.0, **families)]}
    assert cells_of(files, "FLUX.1-dev denoising")[0][4] == "not measured"
