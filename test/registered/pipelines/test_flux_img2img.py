"""FLUX.1 image to image against diffusers' FluxImg2ImgPipeline, float32 on the CPU, stage by stage.

Of a batch, diffusers draws the posterior sample once, from the first generator, so that picture i
is not that of its own seed; here it is. Batches are therefore compared with single calls.
"""

import numpy as np
import pytest
import torch
from diffusers import FluxImg2ImgPipeline
from parity import Pair
from PIL import Image
from test_flux_parity import (
    MAX_RELATIVE,
    FluxTrace,
    assert_same_conditioning,
    assert_same_denoising,
    assert_same_pixels,
    relative_difference,
)

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.entrypoints import generate_command
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.tiny_checkpoints import write_tiny_flux

register_cpu_ci(est_time=40, suite="base-a-test-cpu")
register_cuda_ci(est_time=40, stage="base-b-kernel-unit", runner_config="1-gpu-large")

SMALL = {"width": 64, "height": 64, "max_sequence_length": 32}
# (steps, strength) -> steps that run
RUNS = {(2, 0.6): 2, (4, 0.5): 2, (25, 0.28): 7, (3, 1.0): 3, (5, 0.001): 1, (1, 0.4): 1}
CFG = {"negative_prompt": "blurry", "true_cfg_scale": 3.0}


def picture(width=80, height=48, seed=3):
    """Smooth and coloured, so that encoding and resizing have something to get wrong."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 10, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


class EditTrace(FluxTrace):
    def watch(self, clip, t5, transformer, vae):
        super().watch(clip, t5, transformer, vae)
        encode = vae.encode

        def recording_encode(pixels, **options):
            encoded = encode(pixels, **options)
            self.seen["encoded from"].append(pixels)
            self.seen["posterior"] += [encoded.latent_dist.mean, encoded.latent_dist.std]
            return encoded

        vae.encode = recording_encode
        return self


class EditPair(Pair):
    def __init__(self, folder):
        self.engine = DiffGenerator.from_pretrained(folder, log_level="error", device="cpu")
        stages = {stage.name: stage for stage in self.engine._worker.pipeline.stages}
        text = stages["TextEncodingStage"]
        self.ours = EditTrace().watch(
            text.text_encoder,
            text.text_encoder_2,
            stages["DenoisingStage"].transformer,
            stages["DecodingStage"].vae,
        )
        self.reference = ref = FluxImg2ImgPipeline.from_pretrained(folder, local_files_only=True)
        ref.set_progress_bar_config(disable=True)
        self.theirs = EditTrace().watch(
            ref.text_encoder, ref.text_encoder_2, ref.transformer, ref.vae
        )


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return {
        name: EditPair(write_tiny_flux(folder / name, guidance_embeds=name == "dev"))
        for name in ("dev", "schnell")
    }


@pytest.fixture
def engine(pairs):
    """The generator of the parity tests, its records thrown away."""
    yield pairs["dev"].engine
    pairs["dev"].ours.take()


def check(pair, image, seed=7, **request):
    request = SMALL | {"guidance_scale": 3.5} | request
    ours, our_trace = pair.run_ours("a red apple", 1, seed, image=image, **request)
    theirs, their_trace = pair.run_reference("a red apple", 1, seed, image=image, **request)
    for name in ("encoded from", "posterior"):
        for got, expected in zip(our_trace[name], their_trace[name], strict=True):
            assert relative_difference(got, expected) <= MAX_RELATIVE, name
    runs = RUNS[request["num_inference_steps"], request["strength"]]
    assert_same_conditioning(our_trace, their_trace)
    calls = runs * (2 if "true_cfg_scale" in request else 1)
    assert_same_denoising(our_trace, their_trace, 1, calls)
    assert_same_pixels(ours, theirs, 1)


@pytest.mark.parametrize("steps,strength", RUNS)
@pytest.mark.parametrize("model", ["dev", "schnell"])
def test_steps_and_strengths(pairs, model, steps, strength):
    check(pairs[model], picture(), num_inference_steps=steps, strength=strength)


@pytest.mark.parametrize("cfg", [{}, CFG], ids=["plain", "cfg"])
@pytest.mark.parametrize("source", [(64, 64), (80, 48), (700, 31), (1, 1)], ids=str)
@pytest.mark.parametrize("size", [(64, 64), (64, 96), (128, 64)], ids=str)
def test_sizes(pairs, size, source, cfg):
    sizes = {"width": size[0], "height": size[1]}
    check(pairs["dev"], picture(*source), num_inference_steps=4, strength=0.5, **sizes, **cfg)


def sha(engine, **changes):
    request = {"prompt": "a", "num_inference_steps": 4, "image": picture(), **SMALL, **changes}
    return engine.generate(**request).report["sha256"]


def test_image_i_of_a_batch_is_the_single_image_with_seed_plus_i(engine):
    request = {"prompt": "a", "num_inference_steps": 4, "image": picture(), **SMALL}
    batch = engine.generate(**request, seed=7, num_outputs_per_prompt=3)
    hashes = [result.report["sha256"] for result in batch]
    assert hashes == [sha(engine, seed=7 + i) for i in range(3)] and len(set(hashes)) == 3


def test_what_changes_the_picture_changes_the_hash(engine):
    changes = (
        {},
        {"image": picture(seed=4)},
        {"image": None},
        {"strength": 1.0},
        {"strength": 0.3},
        {"seed": 43},
        {"prompt": "b"},
    )
    assert len({sha(engine, **change) for change in changes}) == len(changes)


def test_edits_and_texts_do_not_touch_each_other(engine):
    edited, drawn = sha(engine), sha(engine, image=None)
    assert [sha(engine), sha(engine, image=None), sha(engine)] == [edited, drawn, edited]
    torch.manual_seed(5)
    assert sha(engine) == edited


def test_the_report_says_what_it_started_from(engine):
    request = {"prompt": "a", "num_inference_steps": 4, "image": picture(), **SMALL}
    report = engine.generate(**request).report
    assert report["strength"] == 0.6 and len(report["step_seconds"]) == 3
    (source,) = report["condition_images"]
    assert source["size"] == [80, 48] and len(source["sha256"]) == 64
    report = engine.generate(**request | {"image": None}).report
    assert report["strength"] is None and report["condition_images"] == []


def test_a_stretched_picture_is_said_once(engine, caplog):
    caplog.set_level("WARNING", logger="sglang")
    for source, count in (((80, 48), 1), ((640, 640), 0), ((100, 96), 0)):
        caplog.clear()
        engine.generate("a", image=picture(*source), num_inference_steps=1, seed=[1], **SMALL)
        assert (
            [r.message for r in caplog.records].count(
                "image is stretched from 80x48 to 64x64; ask for a width and height of its shape"
            )
            == len(caplog.records)
            == count
        )


def test_progress_counts_the_steps_that_run(engine, capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "sglang.multimodal_gen.runtime.entrypoints.progress.SilentDisplay.__call__",
        lambda self, progress: seen.append((progress.label, progress.done, progress.total)),
    )
    monkeypatch.setenv("SGLANG_DIFFUSION_PROGRESS", "off")
    sha(engine, num_inference_steps=4, strength=0.5)
    assert [s for s in seen if s[0].startswith("denoise")] == [
        ("denoise 1/1", 1, 2),
        ("denoise 1/1", 2, 2),
    ]


def test_a_checkpoint_may_have_a_strength_of_its_own(pairs):
    spec = pairs["dev"].engine._worker.spec
    assert spec.with_overrides({"strength": 0.25}).strength == 0.25
    with pytest.raises(ValueError, match="strength: got 2"):
        spec.with_overrides({"strength": 2})


def test_the_command_line_edits(pairs, tmp_path, capsys):
    folder = pairs["dev"].engine.server_args.model_path
    source = tmp_path / "in.png"
    picture().save(source)
    words = ["--model-path", folder, "--prompt", "a", "--device", "cpu", "--image", str(source)]
    words += ["--width=64", "--height=64", "--num-inference-steps=4", "--strength=0.5"]
    assert generate_command.run([*words, "--output-path", str(tmp_path / "out")]) == 0
    (made,) = (tmp_path / "out").glob("*.png")
    assert str(made) in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        generate_command.run([*words, "--image", str(source)])
    assert caught.value.code == 2
    assert "image: got 2 pictures, expected at most 1" in capsys.readouterr().err


def test_a_lower_strength_stays_closer_to_the_picture():
    with DiffGenerator.from_pretrained(device="cpu", log_level="error") as bundled:
        start = bundled.generate("a green apple", seed=1, return_frames=True)
        request = {"prompt": "a red apple", "image": start.image, "return_frames": True}
        frames = [bundled.generate(**request, strength=s).frames for s in (0.15, 0.6, 1.0)]
    distances = [np.abs(f.astype(float) - start.frames).mean() for f in frames]
    assert distances == sorted(distances) and distances[0] < 0.2 * distances[-1]
    red, green, _ = frames[-1][44:84, 44:84].reshape(-1, 3).mean(0)
    assert red > 2 * green, "the picture did not become what the prompt says"


# On the GPU, bfloat16, tiny sizes.


@pytest.mark.cuda
def test_fast_paths_on_and_off_give_one_hash_on_cuda(tmp_path):
    folder = write_tiny_flux(tmp_path / "dev", guidance_embeds=True)
    hashes = []
    for fast in (True, False, True):
        options = {"attention_backend": "efficient", "log_level": "error", "fast_paths": fast}
        with DiffGenerator.from_pretrained(folder, **options) as made:
            hashes += [sha(made), sha(made), sha(made, seed=41, num_outputs_per_prompt=1)]
    assert hashes[:3] == hashes[3:6] == hashes[6:] and len(set(hashes)) == 2
