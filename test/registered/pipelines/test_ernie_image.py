"""ERNIE-Image end to end: prompt enhancement, guidance, sizes, determinism, sites, fast paths."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import ErnieImagePipeline
from safetensors.torch import load_file, save_file

from sglang.cli import main
from sglang.kernels.ops.diffusion.bitexact_gate import all_gates
from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.configs.model_specs import read_model_spec
from sglang.multimodal_gen.configs.sampling_params import ImageRequest
from sglang.multimodal_gen.configs.validation import InvalidParameter
from sglang.multimodal_gen.runtime.loader.weights import CheckpointError
from sglang.multimodal_gen.runtime.models.schedulers.flow_match_euler import FlowMatchEulerConfig
from sglang.multimodal_gen.runtime.pipelines import loading
from sglang.multimodal_gen.runtime.pipelines.stages import prompt_enhancement
from sglang.multimodal_gen.runtime.pipelines.stages.mistral_text_encoding import (
    MistralTextEncodingStage,
)
from sglang.multimodal_gen.runtime.pipelines.stages.state import BatchState, ImageState
from sglang.multimodal_gen.runtime.pipelines.stages.static_timesteps import (
    StaticTimestepPreparationStage,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.tiny_ernie import write_tiny_ernie

register_cpu_ci(est_time=40, suite="base-a-test-cpu")
register_cuda_ci(est_time=180, stage="base-b-kernel-unit", runner_config="1-gpu-large")

REQUEST = {
    "prompt": "a red apple",
    "seed": 42,
    "width": 64,
    "height": 64,
    "num_inference_steps": 2,
}
SITES = {
    "ernie.norm_scale_shift",
    "ernie.gated_norm_scale_shift",
    "ernie.residual_gate_add",
    "ernie.qk_norm_rope",
    "ernie.gelu_mul",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints with and without a prompt enhancer, equal in all else."""
    root = tmp_path_factory.mktemp("tiny ernie")
    return {
        pe: write_tiny_ernie(root / ("pe" if pe else "no pe"), with_pe=pe) for pe in (True, False)
    }


@pytest.fixture(scope="module")
def enhancing(folders):
    with DiffGenerator.from_pretrained(folders[True], device="cpu", log_level="warning") as made:
        yield made


@pytest.fixture(scope="module")
def plain(folders):
    with DiffGenerator.from_pretrained(folders[False], device="cpu", log_level="warning") as made:
        yield made


@pytest.fixture
def enhancer_calls(enhancing):
    """How often the enhancer's model ran in this test."""
    calls = []
    stage = enhancing._worker.pipeline.stages[0]
    hook = stage.enhancer.register_forward_hook(lambda *call: calls.append(1))
    yield calls
    hook.remove()


@pytest.fixture
def warned(caplog):
    """Gives the warnings logged so far."""
    return lambda: [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


def sha(engine, **changes):
    return engine.generate(**{**REQUEST, **changes}).report["sha256"]


# The prompt enhancer.


def test_the_enhancer_is_on_by_default_where_the_checkpoint_has_one(
    enhancing, plain, enhancer_calls
):
    result = enhancing.generate(**REQUEST)
    assert enhancer_calls and result.revised_prompt
    assert result.prompt == REQUEST["prompt"] != result.revised_prompt
    assert result.report["revised_prompt"] == result.revised_prompt
    assert result.report["norm_backend"] == "aten"
    assert plain.generate(**REQUEST).revised_prompt is None
    # the revised prompt is what is drawn
    asked = {**REQUEST, "prompt": result.revised_prompt}
    assert result.report["sha256"] == sha(plain, **asked) != sha(plain)


def test_use_pe_false_makes_no_call_and_draws_the_prompt_as_it_is(enhancing, plain, enhancer_calls):
    result = enhancing.generate(**REQUEST, use_pe=False)
    assert enhancer_calls == [] and result.revised_prompt is None
    assert result.report["sha256"] == sha(plain) == sha(plain, use_pe=False)


def test_the_enhancer_can_be_stopped_in_mid_sentence(enhancing, enhancer_calls, monkeypatch):
    monkeypatch.setattr(prompt_enhancement, "PROGRESS_EVERY", 5)
    stage, expected = enhancing._worker.pipeline.stages[0], sha(enhancing)
    enhancer_calls.clear()

    class Stopped(Exception):
        pass

    def stop(label, done, total):
        raise Stopped(label, done)

    image = ImageState(ImageRequest(0, "a fox", None, seed=1))
    params = SimpleNamespace(use_pe=True, generator_device="cpu", width=64, height=64)
    with pytest.raises(Stopped) as stopped, torch.inference_mode():
        stage(BatchState(params, [image], stop))
    assert stopped.value.args == ("enhance 1/1", 5)
    assert len(enhancer_calls) == 5 and image.revised_prompt is None
    assert sha(enhancing) == expected


def test_use_pe_without_an_enhancer_is_refused_before_any_model_work(plain):
    with pytest.raises(InvalidParameter, match=r"no prompt enhancer \(`pe`\)") as caught:
        plain.generate(**REQUEST, use_pe=True)
    assert caught.value.field == "use_pe"


@pytest.mark.parametrize("prompt", ["a red apple", "", "größer 🍎"])
@pytest.mark.parametrize("seed", [0, 7])
def test_the_revised_prompt_is_the_references_with_the_same_draws(folders, enhancing, prompt, seed):
    reference = ErnieImagePipeline.from_pretrained(folders[True], local_files_only=True)
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # the reference draws from the global generator
        expected = reference._enhance_prompt_with_pe(prompt, torch.device("cpu"), 64, 96)
    result = enhancing.generate(**REQUEST | {"prompt": prompt, "seed": seed, "height": 96})
    assert result.revised_prompt == expected


def test_the_global_generator_neither_acts_nor_changes(enhancing):
    expected = enhancing.generate(**REQUEST).revised_prompt
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert enhancing.generate(**REQUEST).revised_prompt == expected
    assert torch.equal(torch.get_rng_state(), before)


def test_each_image_is_enhanced_with_its_own_seed(enhancing):
    batch = enhancing.generate(**REQUEST, num_outputs_per_prompt=3)
    assert len({result.revised_prompt for result in batch}) == 3
    for result in batch:
        alone = enhancing.generate(**REQUEST | {"seed": result.seed})
        assert alone.revised_prompt == result.revised_prompt
        assert alone.report["sha256"] == result.report["sha256"]


def test_a_checkpoints_own_default_turns_the_enhancer_off(folders, tmp_path):
    copy = tmp_path / "ernie"
    copy.mkdir()
    for part in folders[True].iterdir():
        (copy / part.name).symlink_to(part)
    index = json.loads((copy / "model_index.json").read_text())
    (copy / "model_index.json").unlink()
    defaults = {"use_pe": False, "guidance_scale": 2.0}
    (copy / "model_index.json").write_text(json.dumps(index | {"_sglang_defaults": defaults}))
    spec = read_model_spec(copy)
    assert (spec.use_pe, spec.has_prompt_enhancer, spec.true_cfg_scale) == (False, True, 2.0)


def test_an_enhancer_without_its_tokenizer_is_refused(folders, tmp_path):
    for part in folders[True].iterdir():
        if part.name != "pe_tokenizer":
            (tmp_path / part.name).symlink_to(part)
    with pytest.raises(CheckpointError, match="pe_tokenizer: got no tokenizer"):
        DiffGenerator.from_pretrained(tmp_path, device="cpu")


# Loading.


LOST = {
    "text_encoder": "language_model.model.norm.weight",
    "pe": "model.layers.1.mlp.up_proj.weight",
    "transformer": "layers.0.adaLN_sa_ln.weight",
    "vae": "bn.running_mean",
}


@pytest.mark.parametrize(("component", "name"), LOST.items(), ids=LOST)
def test_a_missing_tensor_is_refused_by_name(folders, tmp_path, component, name):
    copy = tmp_path / "ernie"
    shutil.copytree(folders[True], copy)
    file = next((copy / component).glob("*.safetensors"))
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    shown = name.replace("language_model.model.", "language_model.")
    with pytest.raises(CheckpointError, match=f"{component}: .*missing {shown}"):
        DiffGenerator.from_pretrained(copy, device="cpu")


def test_the_enhancer_and_the_encoder_wait_each_for_its_own_stage(folders, plain, monkeypatch):
    monkeypatch.setattr(loading, "offloads_text_encoders", lambda args, loader: True)
    with DiffGenerator.from_pretrained(folders[True], device="cpu") as generator:
        enhancement, text = generator._worker.pipeline.stages[:2]
        assert generator._worker.pipeline.offloaded == {
            "PromptEnhancementStage": (enhancement.enhancer,),
            "TextEncodingStage": (text.text_encoder,),
        }
        assert sha(generator, use_pe=False) == sha(plain)


@pytest.mark.parametrize(("begin", "ids"), [(None, [0]), (0, [0]), (5, [5])])
def test_an_empty_prompt_has_one_token(begin, ids):
    class Silent:
        bos_token_id = begin

        def __call__(self, prompts, **options):
            return SimpleNamespace(input_ids=[[] for _ in prompts])

    stage = MistralTextEncodingStage(Silent(), None, torch.device("cpu"), torch.float32)
    assert stage._token_ids("", 16) == ids


# Guidance and sizes.


def test_defaults_are_the_reference_pipelines(folders):
    spec = read_model_spec(folders[False])
    assert (spec.num_inference_steps, spec.true_cfg_scale, spec.negative_prompt) == (50, 4.0, "")
    assert (spec.width, spec.height, spec.size_multiple) == (1024, 1024, 16)


def test_guidance_scale_is_another_name_of_true_cfg_scale(plain, warned):
    hashes = [sha(plain, **{name: 2.0}) for name in ("guidance_scale", "true_cfg_scale")]
    assert hashes[0] == hashes[1] != sha(plain)
    assert sha(plain, guidance_scale=1.0) == sha(plain, true_cfg_scale=1.0)
    assert warned() == []
    with pytest.raises(InvalidParameter, match="another name for this model") as caught:
        plain.generate(**REQUEST, guidance_scale=2.0, true_cfg_scale=3.0)
    assert caught.value.field == "guidance_scale"


def test_a_negative_prompt_acts_and_is_warned_of_where_it_cannot(plain, warned):
    assert sha(plain, negative_prompt="blurry") != sha(plain) == sha(plain, negative_prompt="")
    assert warned() == []
    off = sha(plain, guidance_scale=1.0)
    assert sha(plain, guidance_scale=1.0, negative_prompt="blurry") == off
    assert ["negative_prompt has no effect" in text for text in warned()] == [True]


@pytest.mark.parametrize("size", [{"width": 72}, {"height": 1080}, {"width": 500, "height": 500}])
def test_a_size_that_the_model_cannot_make_is_refused_before_any_model_work(
    enhancing, enhancer_calls, size
):
    with pytest.raises(InvalidParameter, match="a multiple of 16 for this model; use"):
        enhancing.generate(**REQUEST | size)
    assert enhancer_calls == []


def test_a_long_prompt_is_cut_with_one_warning(plain, warned):
    words = " ".join(["tree"] * 200)
    kept = words[:511]  # of 512 tokens the first is <s>, and a byte is a token
    assert sha(plain, prompt=words) == sha(plain, prompt=kept)
    assert warned() == ["The text encoder reads 512 of the prompt's 1000 tokens; the rest is cut."]
    assert sha(plain, prompt=words, max_sequence_length=8) == sha(plain, prompt=words[:7])


def test_a_schedule_that_depends_on_the_size_is_refused():
    config = FlowMatchEulerConfig(use_dynamic_shifting=True)
    with pytest.raises(ValueError, match="use_dynamic_shifting=True, expected False"):
        StaticTimestepPreparationStage(config, torch.device("cpu"))


# Determinism and the report.


def test_repeats_and_other_requests_between_change_nothing(plain):
    expected = sha(plain)
    others = ({"width": 128}, {"prompt": "two dogs", "seed": 1}, {"num_outputs_per_prompt": 2})
    for other in others:
        plain.generate(**REQUEST | other)
        assert sha(plain) == expected
    assert sha(plain, seed=43) != expected


def test_image_i_is_the_single_image_with_seed_plus_i(plain):
    batch = plain.generate(**REQUEST, num_outputs_per_prompt=3, return_frames=True)
    for result in batch:
        single = plain.generate(**REQUEST | {"seed": result.seed}, return_frames=True)
        assert np.array_equal(result.frames, single.frames)
    assert len({result.report["sha256"] for result in batch}) == 3


def test_high_quality_mounts_nothing_and_says_so(plain, warned):
    result = plain.generate(**REQUEST, quality="high")
    assert result.report["quality"] == "lossless"
    assert result.report["sha256"] == sha(plain)
    assert ["none of its fusions runs" in text for text in warned()] == [True]


def test_verify_meets_every_site(folders, tmp_path):
    table = tmp_path / "sites.json"
    words = "--width 64 --height 64 --device cpu --json".split()
    assert main(["verify", "--model-path", str(folders[True]), *words, str(table)]) == 0
    sites = {row["op"]: row["sites"] for row in json.loads(table.read_text()) if row["sites"]}
    assert set(sites) == SITES
    layers = 2
    assert sites["ernie.gated_norm_scale_shift"] == 2 * layers - 1  # the first follows no MLP


# On the GPU: random weights of the published size.


@pytest.mark.cuda
def test_fast_paths_on_and_off_give_one_hash_on_cuda():
    prompts, seeds = ["a red apple", "two dogs on a beach at night, oil painting"], (1, 2)
    hashes, states = {}, {}
    for fast in (False, True):
        for gate in all_gates():
            gate.reset()
        with DiffGenerator.from_pretrained(
            "ERNIE-Image", load_format="dummy", fast_paths=fast, log_level="warning"
        ) as generator:
            results = [
                generator.generate(
                    prompts, seed=[seed] * 2, width=512, height=768, num_inference_steps=2
                )
                for seed in seeds
            ]
        hashes[fast] = [r.report["sha256"] for pair in results for r in pair]
        states[fast] = {row["op"]: row for row in results[-1][-1].report["sites"]}
    assert hashes[True] == hashes[False] and len(set(hashes[True])) == 4
    on_gpu = {"packed_projections", "denoise.cuda_graph"}
    assert set(states[True]) - on_gpu == SITES and states[False] == {}
    for row in states[True].values():
        assert row["status"] == "verified" and not row["eager_calls"], row
