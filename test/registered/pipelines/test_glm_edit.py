"""GLM-Image's editing against diffusers' GlmImagePipeline, float32 on the CPU, stage by stage.

Diffusers 0.42.1 hands the vision features of all images to transformers in one tensor, where 5.24
wants a list; the reference here gets the list. It also reads the prior and the VAE's latents at
sizes that agree only for sides that are multiples of 32 and at least as large as its processor
wants (56 in the tiny checkpoint), so parity is shown there.
"""

import shutil
from inspect import signature

import numpy as np
import pytest
import torch
from diffusers import GlmImagePipeline
from PIL import Image
from test_glm_parity import (
    OurTrace,
    Pair,
    TheirTrace,
    assert_same,
    assert_same_pixels,
    recording,
)

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.configs import model_specs
from sglang.multimodal_gen.configs.validation import InvalidParameter
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.tiny_glm import SPECIAL, write_tiny_glm

register_cpu_ci(est_time=60, suite="base-a-test-cpu")
register_cuda_ci(est_time=40, stage="base-b-kernel-unit", runner_config="1-gpu-large")

EXACT = ("prompt_ids", "prior_tokens", "prior_ids", "glyph_ids", "mask", "timestep", "size")
CLOSE = ("latents", "velocity", "decoded_from", "decoded", "encoded_from", "encoded", "memory")
REQUEST = {"width": 64, "height": 32, "num_inference_steps": 2}
PROMPT = "make the sign say 'OPEN'"


def picture(width=64, height=96, seed=3):
    noise = np.random.default_rng(seed).integers(0, 256, (6, 10, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def watch_encode(trace, vae):
    def record(args, kwargs, output):
        trace.note(encoded_from=args[0], encoded=output.latent_dist.mode())

    vae.encode = recording(vae.encode, record)


class OurEditTrace(OurTrace):
    def __init__(self, stages):
        super().__init__(stages)
        watch_encode(self, stages[-1].vae)
        transformer = stages[-2].transformer
        transformer.remember = recording(transformer.remember, self._remember)

    def _remember(self, args, kwargs, output):
        self.note(memory=output)


class TheirEditTrace(TheirTrace):
    def __init__(self, pipeline):
        super().__init__(pipeline)
        self.vision = pipeline.vision_language_encoder
        watch_encode(self, pipeline.vae)

    def _prior(self, args, kwargs, output):
        ids = kwargs["input_ids"].clone()
        place = ids == self.vision.config.image_token_id
        grids = kwargs["image_grid_thw"][:-1]
        features = self.vision.get_image_features(kwargs["pixel_values"], grids).pooler_output
        ids[place] = self.vision.model.get_image_tokens(torch.cat(list(features)), grids)
        self.note(prompt_ids=ids, prior_tokens=output[0, ids.shape[1] : -1])

    def _transformer(self, module, args, kwargs, output):
        super()._transformer(module, args, kwargs, output)
        caches = kwargs["kv_caches"].caches
        if caches[0].mode == "write":
            kept = [(cache.k_caches[0], cache.v_caches[0]) for cache in caches]
            self.note(memory=torch.stack([torch.stack(layer) for layer in kept]))


class EditPair(Pair):
    def __init__(self, folder):
        self.engine = DiffGenerator.from_pretrained(folder, log_level="error", device="cpu")
        self.ours = OurEditTrace(self.engine._worker.pipeline.stages)
        self.reference = GlmImagePipeline.from_pretrained(folder, local_files_only=True)
        self.reference.set_progress_bar_config(disable=True)
        self.theirs = TheirEditTrace(self.reference)
        model = self.reference.vision_language_encoder.model
        if signature(model.get_image_tokens).parameters["image_grid_thw"].default is None:
            take_one_tensor(model)


def take_one_tensor(model):
    """transformers 5.24 wants the images' features apart, where diffusers 0.42.1 joins them."""
    original = model.get_image_tokens
    channels = model.config.vq_config.latent_channels

    def tokens_of_one_tensor(features, grids=None):
        apart = features if isinstance(features, list | tuple) else features.split(channels)
        return original(list(apart), grids)

    model.get_image_tokens = tokens_of_one_tensor


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return EditPair(write_tiny_glm(tmp_path_factory.mktemp("tiny") / "glm"))


@pytest.fixture
def engine(pair):
    yield pair.engine
    pair.ours.take()


def flat(ids):
    """Priors without the axis of one that only ours has for a condition image."""
    return [tensor.flatten() for tensor in ids]


def check(pair, pictures, seed=7, **request):
    """Run both sides and compare everything that both have."""
    request = REQUEST | request
    (result,), ours = pair.run_ours(PROMPT, 1, seed, image=pictures, **request)
    image, theirs = pair.run_reference(PROMPT, seed, image=pictures, **request)
    calls_a_step = 2 if request.get("guidance_scale", 1.5) > 1 else 1
    first = len(pictures) + calls_a_step  # condition images, then the first step
    for trace in (ours, theirs):
        trace["prior_ids"] = flat(trace["prior_ids"])[:first]
    memories = theirs.pop("memory")
    assert torch.equal(torch.cat(ours.pop("memory"), dim=3), memories[-1])
    for name in (*EXACT, *CLOSE[:-1]):
        assert_same(name, ours[name], theirs[name], exact=name in EXACT)
    assert_same_pixels(result.frames, image)


@pytest.mark.parametrize(
    "guidance", [{}, {"guidance_scale": 1.0}, {"guidance_scale": 4.0}], ids=str
)
@pytest.mark.parametrize("size", [(64, 64), (96, 64), (64, 224)], ids=str)
def test_one_condition_image(pair, size, guidance):
    check(pair, [picture(*size)], **guidance)


@pytest.mark.parametrize("size", [(32, 32), (96, 128)], ids=str)
def test_other_sizes_of_the_result(pair, size):
    check(pair, [picture()], width=size[0], height=size[1])


@pytest.mark.parametrize("count", [2, 3])
def test_several_condition_images(pair, count):
    check(pair, [picture(seed=seed) for seed in range(count)])


def test_a_negative_prompt_does_not_see_the_images(pair):
    check(pair, [picture()], negative_prompt="no 'SALE'", guidance_scale=3.0)


def sha(engine, **changes):
    request = {"prompt": PROMPT, "seed": 42, "image": picture(), **REQUEST, **changes}
    return engine.generate(**request).report["sha256"]


def test_image_i_of_a_batch_is_the_single_image_with_seed_plus_i(engine):
    request = {"prompt": PROMPT, "image": [picture(), picture(seed=4)], **REQUEST}
    batch = engine.generate(**request, seed=7, num_outputs_per_prompt=3)
    hashes = [result.report["sha256"] for result in batch]
    assert hashes == [sha(engine, image=request["image"], seed=7 + i) for i in range(3)]
    assert len(set(hashes)) == 3


def test_what_changes_the_picture_changes_the_hash(engine):
    changes = (
        {},
        {"image": picture(seed=4)},
        {"image": [picture(), picture(seed=4)]},
        {"image": None},
        {"seed": 43},
        {"guidance_scale": 0.0},
    )
    assert len({sha(engine, **change) for change in changes}) == len(changes)


def test_edits_and_texts_do_not_touch_each_other(engine):
    edited, drawn = sha(engine), sha(engine, image=None)
    assert [sha(engine), sha(engine, image=None), sha(engine)] == [edited, drawn, edited]
    torch.manual_seed(5)
    assert sha(engine) == edited


@pytest.mark.parametrize("size", [(16, 16), (33, 57), (500, 130), (1080, 700)], ids=str)
def test_any_size_of_the_condition_image_is_read(engine, size):
    assert len(sha(engine, image=picture(*size), num_inference_steps=1)) == 64


@pytest.mark.parametrize("size,words", [((15, 40), "at least 16"), ((65, 16), "at most 4 to 1")])
def test_a_shape_that_the_processor_does_not_take_is_refused_before_it_runs(engine, size, words):
    with pytest.raises(InvalidParameter, match=f"got a picture of {size[0]}x{size[1]}.*{words}"):
        sha(engine, image=picture(*size))


def test_five_pictures_are_too_many(engine):
    with pytest.raises(InvalidParameter, match="got 5 pictures, expected at most 4"):
        sha(engine, image=[picture()] * 5)


@pytest.mark.parametrize("token", ["eos_token", "image_token"])
def test_a_prompt_with_image_tokens_is_refused(engine, token):
    with pytest.raises(InvalidParameter, match="without the model's own image tokens") as caught:
        sha(engine, prompt=f"a cat {SPECIAL[token]}")
    assert caught.value.field == "prompt"


def test_a_strength_is_said_to_be_without_effect(engine, caplog):
    caplog.set_level("WARNING", logger="sglang")
    assert sha(engine, strength=0.3) == sha(engine)
    assert [r.message for r in caplog.records] == [
        "strength has no effect: this model reads the image as a condition"
    ]


def test_two_ranks_edit_as_one_does(engine, tmp_path):
    """The prior reads the pictures on rank 0 alone; each rank remembers them for its forward."""
    folder = write_tiny_glm(tmp_path / "glm")
    several = [picture(), picture(96, 64, seed=4)]
    with DiffGenerator.from_pretrained(folder, num_gpus=2, device="cpu", log_level="error") as two:
        assert sha(two) == sha(engine)
        assert sha(two, image=several) == sha(engine, image=several)


def test_random_weights_edit_too(tmp_path, monkeypatch):
    """The way of `load_format="dummy"`, at tiny sizes: no weight, no tokenizer is read."""
    folder = write_tiny_glm(tmp_path / "GLM-Image")
    for part in ("processor", "tokenizer"):
        shutil.rmtree(folder / part)
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    monkeypatch.setattr(model_specs, "DUMMY_CONFIGS", tmp_path)
    options = {"load_format": "dummy", "device": "cpu", "log_level": "error"}
    with DiffGenerator.from_pretrained("GLM-Image", **options) as made:
        assert sha(made) == sha(made) != sha(made, image=None)


# On the GPU, bfloat16, tiny sizes.


@pytest.mark.cuda
def test_fast_paths_on_and_off_give_one_hash_on_cuda(tmp_path):
    folder = write_tiny_glm(tmp_path / "glm")
    hashes = []
    for fast in (True, False, True):
        options = {"attention_backend": "efficient", "log_level": "error", "fast_paths": fast}
        with DiffGenerator.from_pretrained(folder, **options) as made:
            several = [picture(), picture(seed=4)]
            hashes += [sha(made), sha(made), sha(made, image=several)]
    assert hashes[:3] == hashes[3:6] == hashes[6:] and len(set(hashes)) == 2
