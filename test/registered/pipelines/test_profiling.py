"""`profile=True`: a trace file and a table of kernel families."""

import json
import logging
import re
from pathlib import Path

import pytest

import sglang.kernels
from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.profiling import family_of
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.tiny_checkpoints import write_tiny_flux

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

FUSED = "fused (this package)"
PICTURE = dict(prompt="x", width=64, height=64, num_inference_steps=3)


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flux")
    write_tiny_flux(folder, guidance_embeds=True)
    with DiffGenerator.from_pretrained(folder, device="cpu") as generator:
        yield generator


def test_profile_writes_a_trace_and_a_table_and_changes_no_pixel(generator, tmp_path, caplog):
    plain = generator.generate(**PICTURE)
    with caplog.at_level(logging.INFO, logger="sglang"):
        profiled = generator.generate(
            **PICTURE, profile=True, num_profiled_timesteps=1, output_path=str(tmp_path)
        )
    assert profiled.report["sha256"] == plain.report["sha256"]
    (trace,) = tmp_path.glob("profile-*.json")
    assert json.loads(trace.read_text())["traceEvents"]
    table = next(r.message for r in caplog.records if "Profile written" in r.message)
    assert "gemm" in table and "%" in table


def test_stage_times_are_logged_as_the_protocol_reads_them(generator, caplog):
    with caplog.at_level(logging.INFO, logger="sglang"):
        result = generator.generate(**PICTURE)
    (line,) = [r.message for r in caplog.records if r.message.startswith("[DenoisingStage]")]
    seconds = float(line.removeprefix("[DenoisingStage] finished in ").removesuffix(" seconds"))
    assert abs(seconds - result.report["stage_seconds"]["DenoisingStage"]) < 1e-3
    assert len(result.report["step_seconds"]) == 3


@pytest.mark.parametrize(
    ("kernel", "family"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_bias_TNT", "gemm"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob", "attention"),
        ("residual_gate_add_row_bf16", FUSED),
        ("void cublas gemvNSP_kernel", "gemm"),
        ("aten::gelu", "activation"),
        ("void at::native::vectorized_elementwise_kernel<8, ...>", "elementwise"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel", "norm"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy", "copy and cat"),
        ("something_else", "other"),
    ],
)
def test_kernel_families(kernel, family):
    assert family_of(kernel) == family


def kernels_of_the_package():
    """Names in the sources: `def x_kernel(` in Triton, `X_KERNEL(x_dtype, ...)` in CUDA."""
    (root,) = sglang.kernels.__path__
    triton, cuda = (sorted(Path(root).rglob(f"*{end}")) for end in ("_kernels.py", ".cuh"))
    for path in triton:
        yield from re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    for path in cuda:
        yield from re.findall(r"^[A-Z_]+_KERNEL\((\w+),", path.read_text(), re.MULTILINE)


def test_every_kernel_of_the_package_counts_as_one_of_its_own():
    names = list(kernels_of_the_package())
    assert {"gemv_kernel", "qk_rotate_half_kernel", "gelu_mul_bfloat16"} <= set(names)
    assert {name: family_of(name) for name in names} == dict.fromkeys(names, FUSED)
