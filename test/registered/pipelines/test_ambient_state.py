"""What the caller has set around `generate` changes no pixel, and is there again afterwards."""

import os
import threading
from operator import attrgetter

import pytest
import torch

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.entrypoints.image_files import OutputError, write_file
from sglang.multimodal_gen.runtime.managers.numeric_switches import SWITCHES, numeric_switches
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.tiny_checkpoints import write_tiny_flux

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

PICTURE = dict(prompt="a fox", width=64, height=64, num_inference_steps=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_flux(tmp_path_factory.mktemp("tiny") / "flux", guidance_embeds=True)


@pytest.fixture(scope="module")
def generator(folder):
    with DiffGenerator.from_pretrained(folder, device="cpu") as generator:
        yield generator


@pytest.fixture
def plain(generator):
    return generator.generate(**PICTURE).report["sha256"]


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_float32_matmul_precision(generator, plain, precision):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        assert generator.generate(**PICTURE).report["sha256"] == plain
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("holder", [torch.backends.mkldnn.matmul, torch.backends.cuda.matmul])
def test_the_newer_precision_switches(generator, plain, holder):
    before = holder.fp32_precision
    changed = "bf16" if holder is torch.backends.mkldnn.matmul else "tf32"
    try:
        holder.fp32_precision = changed
        assert generator.generate(**PICTURE).report["sha256"] == plain
        assert holder.fp32_precision == changed
    finally:
        holder.fp32_precision = before


@pytest.mark.parametrize("path", SWITCHES)
def test_every_switch_is_set_inside_restored_after_and_reported(path):
    name, value = path.rpartition(".")[2], SWITCHES[path]
    holder = attrgetter(path.rpartition(".")[0])(torch.backends)
    before = getattr(holder, name)
    changed = not value if isinstance(value, bool) else "bf16" if "mkldnn" in path else "tf32"
    try:
        setattr(holder, name, changed)
        with numeric_switches(torch.device("cpu")):
            assert getattr(holder, name) == value
        assert getattr(holder, name) == changed
    finally:
        setattr(holder, name, before)


def test_what_changes_the_bits_of_a_half_gemm_or_a_convolution_is_reported(generator):
    reported = generator.generate(**PICTURE).report["numeric_switches"]
    assert reported["cuda.matmul.fp32_precision"] == reported["cudnn.conv.fp32_precision"] == "ieee"
    off = ("cuda.matmul.allow_fp16_accumulation", "cudnn.benchmark", "cudnn.deterministic")
    assert [reported[name] for name in off] == [False] * 3


def test_default_device(generator, plain):
    with torch.device("meta"):
        assert generator.generate(**PICTURE).report["sha256"] == plain
        assert torch.empty(1).is_meta


def test_two_generators_in_two_threads(folder, generator, plain):
    dtype = torch.get_default_dtype()
    hashes = []

    def work(engine):
        hashes.extend(engine.generate(**PICTURE).report for _ in range(4))

    with DiffGenerator.from_pretrained(folder, device="cpu") as other:
        threads = [threading.Thread(target=work, args=(g,)) for g in (generator, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {report["sha256"] for report in hashes} == {plain}
    assert len({str(report["sites"]) for report in hashes}) == 1
    assert len(hashes) == 8 and torch.get_default_dtype() == dtype


def test_profiling_into_an_unwritable_folder_is_refused_before_the_work(generator, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="output_path"):
        generator.generate(**PICTURE, profile=True, output_path=str(tmp_path / "file" / "x"))


class TestReportTargets:
    def test_a_pipe_is_written_through(self, tmp_path):
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        read = []
        reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
        reader.start()
        write_file(pipe, b"{}")
        reader.join(timeout=10)
        assert read == [b"{}"] and pipe.is_fifo()

    def test_a_link_keeps_pointing(self, tmp_path):
        (tmp_path / "target").write_text("old")
        (tmp_path / "link").symlink_to(tmp_path / "target")
        write_file(tmp_path / "link", b"new")
        assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_bytes() == b"new"

    def test_a_folder_is_an_error(self, tmp_path):
        with pytest.raises(OutputError):
            write_file(tmp_path, b"x")
