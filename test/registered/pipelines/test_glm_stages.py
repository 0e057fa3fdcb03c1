"""GLM-Image's own stages: schedule, glyphs, priors, what is refused and what repeats."""

import math
import shutil

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, GlmImagePipeline
from diffusers.pipelines.glm_image.pipeline_glm_image import calculate_shift, retrieve_timesteps

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.configs import model_specs
from sglang.multimodal_gen.configs.model_specs import DUMMY_CONFIGS, read_json, read_model_spec
from sglang.multimodal_gen.configs.validation import InvalidParameter
from sglang.multimodal_gen.runtime.loader.component_loader import params_from_config
from sglang.multimodal_gen.runtime.loader.dummy_glm import GlmByteProcessor
from sglang.multimodal_gen.runtime.loader.weights import CheckpointError
from sglang.multimodal_gen.runtime.models.dits.glm_image import GlmImageParams
from sglang.multimodal_gen.runtime.models.schedulers.flow_match_euler import FlowMatchEulerConfig
from sglang.multimodal_gen.runtime.pipelines.stages.glm_sampling import glm_schedule
from sglang.multimodal_gen.runtime.pipelines.stages.glyph_encoding import glyph_texts
from sglang.multimodal_gen.runtime.pipelines.stages.prior_tokens import PriorTokensError, upsample
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.tiny_glm import CODEBOOK, SPECIAL, glm_processor, write_tiny_glm

register_cpu_ci(est_time=60, suite="base-a-test-cpu")
register_cuda_ci(est_time=60, stage="base-b-kernel-unit", runner_config="1-gpu-large")

PUBLISHED = read_json(DUMMY_CONFIGS / "GLM-Image" / "scheduler" / "scheduler_config.json")
SCHEDULERS = {
    "published": PUBLISHED,
    "exponential": PUBLISHED | {"time_shift_type": "exponential"},
    "static": PUBLISHED | {"use_dynamic_shifting": False, "shift": 3.0},
}
DIT_SITES = {
    "glm_image.gated_layernorm_modulate",
    "glm_image.layernorm_modulate",
    "glm_image.linear_gelu",
    "glm_image.qk_norm_rope",
    "glm_image.residual_gate_add",
}
REQUEST = {
    "prompt": "a red apple with 'OPEN' on it",
    "seed": 42,
    "width": 64,
    "height": 32,
    "num_inference_steps": 2,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = write_tiny_glm(tmp_path_factory.mktemp("tiny") / "glm")
    with DiffGenerator.from_pretrained(folder, device="cpu", log_level="warning") as generator:
        yield generator


def sha(engine, **changes):
    return engine.generate(**{**REQUEST, **changes}).report["sha256"]


# Schedule


@pytest.mark.parametrize("tokens", [16, 1024, 4096, 6144])
@pytest.mark.parametrize("steps", [1, 2, 8, 30, 50, 1000])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedule_equals_the_reference(name, steps, tokens):
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(SCHEDULERS[name])
    levels = np.linspace(1000, 1.0, steps + 1)[:-1].astype(np.int64).astype(np.float32)
    mu = calculate_shift(tokens, 256, scheduler.config.base_shift, scheduler.config.max_shift)
    retrieve_timesteps(scheduler, steps, "cpu", levels, levels / 1000, mu=mu)
    config = FlowMatchEulerConfig.from_dict(SCHEDULERS[name])
    timesteps, sigmas = glm_schedule(config, steps, tokens)
    assert torch.equal(timesteps, scheduler.timesteps) and timesteps.dtype == torch.float32
    assert torch.equal(sigmas, scheduler.sigmas) and sigmas.dtype == torch.float32


def test_schedule_equals_a_frozen_one():
    timesteps, sigmas = glm_schedule(FlowMatchEulerConfig.from_dict(PUBLISHED), 4, 4096)
    assert timesteps.tolist() == [1000.0, 750.0, 500.0, 250.0]
    frozen = [1.0, 0.9069766998291016, 0.7647058963775635, 0.5199999809265137, 0.0]
    assert torch.equal(sigmas, torch.tensor(frozen))


# Glyphs

GLYPHS = {
    "nothing quoted": [],
    "'a' and \"b\"": ["a", "b"],
    "\"b\" and 'a'": ["a", "b"],
    "“deep “inner” x”": ["inner"],
    "「赤」 and '' and it's": ["", "赤"],
    "'''": [""],
}


@pytest.mark.parametrize("prompt", GLYPHS)
def test_quoted_texts_are_the_references(prompt):
    assert glyph_texts(prompt) == GLYPHS[prompt]
    assert glyph_texts(prompt) == GlmImagePipeline.get_glyph_texts(None, prompt)[0]


def test_a_cut_text_is_reported_with_what_was_kept(engine, caplog):
    engine.generate(**{**REQUEST, "max_sequence_length": 3})
    assert "reads 3 of a quoted text's 5 tokens" in caplog.text


def test_a_negative_prompt_that_cannot_act_is_reported(engine, caplog):
    without = sha(engine)
    assert sha(engine, negative_prompt="blurry") == without
    assert "negative_prompt has no quoted text and so no effect" in caplog.text
    caplog.clear()
    assert sha(engine, negative_prompt="no 'OPEN'") != without
    assert "negative_prompt" not in caplog.text


# Prior


def test_upsampling_equals_the_reference():
    tokens = torch.arange(15)
    assert torch.equal(upsample(tokens, 3, 5), GlmImagePipeline._upsample_token_ids(tokens, 3, 5))


@pytest.mark.parametrize("size", [(1024, 1024), (32, 8192), (1536, 1024), (64, 96)])
def test_the_stand_in_processor_has_the_real_grids(size):
    options = {"target_h": size[0], "target_w": size[1], "return_tensors": "pt"}
    processors = (glm_processor(), GlmByteProcessor(5))
    grids = [processor(text=["x"], **options)["image_grid_thw"] for processor in processors]
    assert torch.equal(*grids)


@pytest.mark.parametrize("token", ["eos_token", "image_token"])
def test_a_prompt_with_image_tokens_is_refused(engine, token):
    with pytest.raises(InvalidParameter, match="without the model's own image tokens") as caught:
        engine.generate(**{**REQUEST, "prompt": f"a cat {SPECIAL[token]}"})
    assert caught.value.field == "prompt"


def test_a_prior_that_leaves_the_codebook_is_an_error(engine):
    stage = engine._worker.pipeline.stages[0]
    tokens, grids = torch.zeros(8, dtype=torch.int64), [(2, 2), (2, 2)]
    assert torch.equal(stage.checked(tokens, grids), tokens[4:])
    tokens[2] = CODEBOOK + 5  # of the preview, which goes nowhere
    assert torch.equal(stage.checked(tokens, grids), tokens[4:])
    tokens[6] = CODEBOOK
    with pytest.raises(PriorTokensError, match=f"got token {CODEBOOK}, expected 0 to"):
        stage.checked(tokens, grids)
    tokens[3] = stage.end_token
    with pytest.raises(PriorTokensError, match="ended the picture after 3 of 8.*another seed"):
        stage.checked(tokens, grids)


def test_an_early_end_fails_this_request_only(tmp_path):
    folder = write_tiny_glm(tmp_path / "glm", vision_vocabulary=CODEBOOK + 2)
    with DiffGenerator.from_pretrained(folder, device="cpu", log_level="error") as engine:
        for _ in range(2):
            with pytest.raises(PriorTokensError, match="GlmImageAR: the model ended|got token"):
                engine.generate(**{**REQUEST, "seed": 1})


# Requests


@pytest.mark.parametrize("size", [500, 1080, 1040, 48])
def test_a_size_the_prior_cannot_make_is_refused_before_it_runs(engine, size, monkeypatch):
    stage = engine._worker.pipeline.stages[0]
    monkeypatch.setattr(stage.decoder, "generate", lambda *args: pytest.fail("the prior ran"))
    with pytest.raises(InvalidParameter, match=f"got {size}, expected a multiple of 32"):
        engine.generate(**{**REQUEST, "width": size})


def test_the_global_generator_is_neither_read_nor_seeded(engine):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    expected = sha(engine)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    assert sha(engine) == expected


def test_repeats_and_other_requests_between_change_nothing(engine):
    expected = sha(engine)
    others = (
        {"width": 96, "height": 96},
        {"guidance_scale": 1.0, "num_inference_steps": 1},
        {"negative_prompt": "'x'", "num_outputs_per_prompt": 2, "quality": "high"},
    )
    for other in others:
        engine.generate(**{**REQUEST, **other})
        assert sha(engine) == expected


def test_image_i_of_a_batch_is_the_single_image_with_seed_plus_i(engine):
    batch = engine.generate(**REQUEST, num_outputs_per_prompt=3)
    assert [result.seed for result in batch] == [42, 43, 44]
    hashes = [result.report["sha256"] for result in batch]
    assert hashes == [sha(engine, seed=42 + i) for i in range(3)]
    assert len(set(hashes)) == 3


def test_prompts_keep_their_order(engine):
    batch = engine.generate(**{**REQUEST, "prompt": ["a cat", "a dog"]})
    assert [result.prompt for result in batch] == ["a cat", "a dog"]
    assert batch[1].report["sha256"] == sha(engine, prompt="a dog", seed=43)


def test_what_changes_the_picture_changes_the_hash(engine):
    changes = (
        {},
        {"seed": 43},
        {"prompt": "a green apple with 'OPEN' on it"},
        {"prompt": "a red apple with 'SHUT' on it"},
        {"true_cfg_scale": 3.0},
        {"guidance_scale": 0.0},
        {"num_inference_steps": 3},
        {"max_sequence_length": 2},
    )
    assert len({sha(engine, **change) for change in changes}) == len(changes)


def test_stages_and_sites_are_reported(engine):
    report = engine.generate(**REQUEST).report
    assert list(report["stage_seconds"])[:2] == ["GlmImageAR", "GlyphEncodingStage"]
    assert report["true_cfg_scale"] == 1.5 and len(report["step_seconds"]) == 2
    where_it_is_not_rotated_in_the_kernel = {"glm_image.qk_layernorm"}
    seen = {row["op"] for row in report["sites"]}
    assert seen == DIT_SITES | where_it_is_not_rotated_in_the_kernel


# Checkpoints


def test_the_shipped_config_is_the_published_size():
    folder = DUMMY_CONFIGS / "GLM-Image"
    params = params_from_config(GlmImageParams, read_json(folder / "transformer" / "config.json"))
    assert (params.num_layers, params.hidden, params.text_embed_dim) == (30, 4096, 1472)
    assert (params.time_embed_dim, params.prior_vq_quantizer_codebook_size) == (512, 16384)
    spec = read_model_spec(folder)
    assert (spec.size_multiple, spec.num_inference_steps, spec.width) == (32, 30, 1024)
    # Random weights would end pictures early and leave the codebook, so they cannot name more.
    ar = read_json(folder / "vision_language_encoder" / "config.json")["text_config"]
    assert ar["vision_vocab_size"] == params.prior_vq_quantizer_codebook_size
    rope = ar["rope_parameters"]
    assert (rope["partial_rotary_factor"], rope["mrope_section"]) == (0.5, [8, 12, 12])
    assert math.isclose(sum(rope["mrope_section"]), 128 * 0.5 / 2)


def test_random_weights_of_a_shipped_config_make_a_picture(tmp_path, monkeypatch):
    """The way of `load_format="dummy"`, at tiny sizes: no weight, no tokenizer is read."""
    folder = write_tiny_glm(tmp_path / "GLM-Image")
    for part in ("processor", "tokenizer"):
        shutil.rmtree(folder / part)
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    monkeypatch.setattr(model_specs, "DUMMY_CONFIGS", tmp_path)
    options = {"load_format": "dummy", "device": "cpu", "log_level": "error"}
    with DiffGenerator.from_pretrained("GLM-Image", **options) as engine:
        hashes = [engine.generate(**REQUEST).report["sha256"] for _ in range(2)]
    assert hashes[0] == hashes[1]


def test_tokens_that_clash_are_refused(tmp_path):
    folder = write_tiny_glm(tmp_path / "glm")
    path = folder / "transformer" / "config.json"
    path.write_text(path.read_text().replace('"patch_size": 2', '"patch_size": 1'))
    with pytest.raises(CheckpointError, match="patch_size 1, expected 8 and 2"):
        DiffGenerator.from_pretrained(folder, device="cpu", log_level="error")


# On the GPU, bfloat16, tiny sizes.


@pytest.fixture(scope="module")
def gpu_engines(tmp_path_factory):
    """(fast paths on, fast paths off) over one checkpoint."""
    folder = write_tiny_glm(tmp_path_factory.mktemp("tiny") / "glm")
    options = {"attention_backend": "efficient", "log_level": "error"}
    return [
        DiffGenerator.from_pretrained(folder, fast_paths=fast, **options) for fast in (True, False)
    ]


@pytest.mark.cuda
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("prompt", ["a cat", "a shop sign that says 'OPEN'"])
def test_fast_paths_on_and_off_give_one_hash_on_cuda(gpu_engines, prompt, seed):
    request = {**REQUEST, "prompt": prompt, "seed": seed}
    fast, eager = (engine.generate(**request).report for engine in gpu_engines)
    again = gpu_engines[0].generate(**request).report
    assert fast["sha256"] == eager["sha256"] == again["sha256"]
    status = {row["op"]: row["status"] for row in fast["sites"]}
    assert status.pop("glm_image.ar_cuda_graph") == "verified"
    assert set(status.values()) == {"verified"}, fast["sites"]
    in_the_norms_kernel = {"glm_image.residual_gate_add"}
    assert status.keys() > DIT_SITES - in_the_norms_kernel, fast["sites"]


@pytest.mark.cuda
def test_high_quality_mounts_the_gelu_sites_on_cuda(gpu_engines):
    report = gpu_engines[0].generate(**{**REQUEST, "quality": "high"}).report
    mounted = {row["op"]: row["status"] for row in report["sites"]}
    assert mounted["fused_linear_gelu"] == "mounted" and report["quality"] == "high"
