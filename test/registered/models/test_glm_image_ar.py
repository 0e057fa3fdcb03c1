"""GLM-Image's autoregressive prior: the tokens of transformers' `generate` for the same draws."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import GenerationConfig

from sglang.kernels.ops.diffusion.bitexact_gate import fast_paths, tensors_equal
from sglang.multimodal_gen.runtime.models import glm_image_ar
from sglang.multimodal_gen.runtime.models.glm_image_ar import (
    GLM_AR_GRAPH,
    GLM_AR_KERNELS,
    GlmImageDecoder,
    _probe,
    sdpa,
    token_positions,
)
from sglang.multimodal_gen.runtime.models.glm_image_ar_sampling import (
    NoiseRows,
    SamplingRule,
    choose_token,
    exponential_noise,
)
from sglang.multimodal_gen.runtime.models.glm_image_sources import place_sources, read_sources
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.tiny_glm import CODEBOOK, glm_ar_model, glm_processor

register_cpu_ci(est_time=40, suite="base-a-test-cpu")
register_cuda_ci(est_time=30, stage="base-b-kernel-unit", runner_config="1-gpu-large")

RULES = {
    "defaults": SamplingRule(),
    "published": SamplingRule(temperature=0.9, top_k=0, top_p=0.75),
    "all": SamplingRule(temperature=1.3, top_k=5, top_p=0.9),
    "one": SamplingRule(top_k=1),
}
SIZES = [(32, 32), (64, 96), (128, 32)]


@pytest.fixture(scope="module")
def model():
    return glm_ar_model()


@pytest.fixture(scope="module")
def processor():
    return glm_processor()


def noise_picture(height, width):
    pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def inputs_of(processor, prompt, height, width, pictures=()):
    """What diffusers' pipeline hands to `generate`."""
    content = [{"type": "image", "image": picture} for picture in pictures]
    message = {"role": "user", "content": [*content, {"type": "text", "text": prompt}]}
    return processor.apply_chat_template(
        [[message]],
        tokenize=True,
        padding=False,
        target_h=height,
        target_w=width,
        return_dict=True,
        return_tensors="pt",
    )


def grids_of(inputs):
    """(rows, columns) in the order in which they are named: the preview first."""
    return [tuple(grid[1:]) for grid in inputs["image_grid_thw"].tolist()][::-1]


def reference_tokens(model, inputs, rule, seed):
    """`generate` with its draws from the global generator; the end token is left out."""
    count = int(inputs["image_grid_thw"].prod(-1).sum())
    settings = {"do_sample": False}
    if rule is not None:
        settings = {"do_sample": True, **dataclasses.asdict(rule)}
    torch.manual_seed(seed)
    out = model.generate(**inputs, max_new_tokens=count + 1, **settings)
    return out[0, inputs["input_ids"].shape[1] :][:count]


def our_tokens(model, inputs, rule, seed):
    grids = grids_of(inputs)
    count = sum(rows * columns for rows, columns in grids)
    generator = torch.Generator().manual_seed(seed)
    noise = None if rule is None else exponential_noise(generator, count, CODEBOOK)
    decoder = GlmImageDecoder(model, rule or SamplingRule())
    return decoder.generate(inputs["input_ids"], grids, noise)


@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("rule", [*RULES, "greedy"])
def test_tokens_equal_those_of_generate(model, processor, rule, size):
    inputs = inputs_of(processor, "ein roter Apfel 'OPEN' 漢字", *size)
    expected = reference_tokens(model, inputs, RULES.get(rule), seed=5)
    assert expected.unique().numel() > 4, "the tokens are (nearly) constant"
    assert torch.equal(our_tokens(model, inputs, RULES.get(rule), seed=5), expected)


def test_the_seed_and_the_prompt_decide(model, processor):
    inputs = inputs_of(processor, "a cat", 32, 32)
    other = inputs_of(processor, "a dog", 32, 32)
    rule = RULES["published"]
    first = our_tokens(model, inputs, rule, seed=1)
    assert torch.equal(first, our_tokens(model, inputs, rule, seed=1))
    assert not torch.equal(first, our_tokens(model, inputs, rule, seed=2))
    assert not torch.equal(first, our_tokens(model, other, rule, seed=1))


def test_the_global_generator_is_neither_read_nor_seeded(model, processor):
    inputs = inputs_of(processor, "a cat", 32, 32)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = our_tokens(model, inputs, RULES["defaults"], seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    assert torch.equal(our_tokens(model, inputs, RULES["defaults"], seed=1), first)


@pytest.mark.parametrize("size", [*SIZES, (1024, 1024)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_positions_equal_the_reference(model, processor, size):
    inputs = inputs_of(processor, "a cat", *size)
    ids = inputs["input_ids"]
    prompt, _ = model.model.get_rope_index(ids, image_grid_thw=inputs["image_grid_thw"])
    named = model.model._cached_decode_position_ids[0, :, :-1]  # the last is the end marker's
    expected = torch.cat([prompt[:, 0], named], dim=1)
    assert torch.equal(token_positions(ids.shape[1], grids_of(inputs)), expected)


@pytest.mark.parametrize("sizes", [[(64, 96)], [(64, 64), (32, 128), (96, 64)]], ids=["1", "3"])
def test_an_image_in_the_prompt_acts_as_in_generate(model, processor, sizes):
    """Its tokens are the reference's, and so are positions and the tokens that follow."""
    pictures = [noise_picture(*size) for size in sizes]
    inputs = inputs_of(processor, "make it red", 64, 32, pictures)
    source_grids = inputs["image_grid_thw"][:-1]
    read = read_sources(model, inputs["pixel_values"], source_grids)
    ids, sources = place_sources(inputs["input_ids"], read, model.config)
    assert [len(source.tokens) for source in read] == source_grids.prod(-1).tolist()

    prompt, _ = model.model.get_rope_index(
        inputs["input_ids"], image_grid_thw=inputs["image_grid_thw"]
    )
    named = model.model._cached_decode_position_ids[0, :, :-1]
    positions = token_positions(ids.shape[1], [(2, 1)], sources)
    assert torch.equal(positions, torch.cat([prompt[:, 0], named], dim=1))

    rule, noise = (
        RULES["published"],
        exponential_noise(torch.Generator().manual_seed(5), 2, CODEBOOK),
    )
    got = GlmImageDecoder(model, rule).generate(ids, [(2, 1)], noise, sources=sources)
    torch.manual_seed(5)
    settings = {"do_sample": True, "max_new_tokens": 3, **dataclasses.asdict(rule)}
    out = model.generate(**inputs, **settings)
    assert torch.equal(got, out[0, ids.shape[1] :][:2])


def test_every_token_is_announced(model, processor):
    inputs, heard = inputs_of(processor, "a cat", 32, 32), []
    decoder = GlmImageDecoder(model, SamplingRule())
    tokens = decoder.generate(inputs["input_ids"], grids_of(inputs), None, heard.append)
    assert heard == list(range(1, len(tokens) + 1))


def test_a_choice_is_the_draw_of_multinomial():
    logits = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * 3
    everything = SamplingRule(top_k=0)
    for seed, row in enumerate(logits[:, None]):
        noise = exponential_noise(torch.Generator().manual_seed(seed), 1, 512)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.multinomial(torch.softmax(row, dim=-1), 1, generator=generator)
        assert torch.equal(choose_token(row, everything, noise), drawn[0])


def test_probing_steps_leaves_the_state_where_it_was(model, processor):
    inputs = inputs_of(processor, "a cat", 32, 32)
    grids = grids_of(inputs)
    decoder = GlmImageDecoder(model, SamplingRule())
    expected = decoder.generate(inputs["input_ids"], grids, None)
    with torch.inference_mode():
        state = decoder.start(inputs["input_ids"], grids, None)
        advance = partial(decoder.advance, state)
        first, again = (_probe(state, advance, steps=8) for _ in range(2))
        for _ in expected[1:]:
            advance()
    assert tensors_equal(first, again) and len(first) == 16
    assert torch.equal(state.tokens, expected)


@pytest.mark.parametrize("count", (1, 16, 37))
def test_noise_drawn_when_needed_is_the_same(count):
    expected = exponential_noise(torch.Generator().manual_seed(3), count, 50)
    noise = NoiseRows(torch.Generator().manual_seed(3), count, 50, torch.device("cpu"))
    noise.rows.fill_(float("nan"))
    for asked in (1, 9, 10, count + 5):
        noise.draw(asked)
        asked = min(asked, count)
        assert torch.equal(noise.rows[:asked], expected[:asked])
    assert torch.equal(noise.rows, expected)


def test_a_picture_draws_its_noise_as_it_goes(model, processor):
    inputs = inputs_of(processor, "a cat", 64, 96)
    grids, rule = grids_of(inputs), RULES["published"]
    count = sum(rows * columns for rows, columns in grids)
    noise = NoiseRows(torch.Generator().manual_seed(5), count, CODEBOOK, torch.device("cpu"))
    noise.rows.fill_(float("nan"))
    tokens = GlmImageDecoder(model, rule).generate(inputs["input_ids"], grids, noise)
    assert torch.equal(tokens, our_tokens(model, inputs, rule, seed=5))


@pytest.mark.cuda
def test_noise_for_a_gpu_is_the_hosts(model):
    expected = exponential_noise(torch.Generator().manual_seed(3), 400, 5000)
    noise = NoiseRows(torch.Generator().manual_seed(3), 400, 5000, torch.device("cuda"))
    for asked in range(0, 401, 7):
        noise.draw(asked)
    noise.draw(400)
    assert torch.equal(noise.rows.cpu(), expected)


def test_settings_that_the_sampler_lacks_are_refused():
    with pytest.raises(ValueError, match=r"got \['repetition_penalty'\].*lacks"):
        SamplingRule.from_generation_config(GenerationConfig(repetition_penalty=1.2))
    neutral = {"repetition_penalty": 1.0, "num_beams": 1, "output_attentions": False}
    config = GenerationConfig(do_sample=True, temperature=0.9, top_p=0.75, **neutral)
    assert SamplingRule.from_generation_config(config) == SamplingRule(0.9, 50, 0.75)


@pytest.mark.cuda
@pytest.mark.parametrize("rule", [*RULES, "greedy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_graph_names_the_tokens_of_the_loop_without_it(processor, dtype, rule):
    on_gpu = glm_ar_model().to("cuda", dtype)
    decoder = GlmImageDecoder(on_gpu, RULES.get(rule, SamplingRule()))
    GLM_AR_GRAPH.reset(), GLM_AR_KERNELS.reset()
    for size in SIZES:
        inputs = inputs_of(processor, "a cat", *size)
        ids, grids = inputs["input_ids"].to("cuda"), grids_of(inputs)
        count = sum(rows * columns for rows, columns in grids)
        generator = torch.Generator().manual_seed(0)
        noise = exponential_noise(generator, count, CODEBOOK).to("cuda") if rule in RULES else None
        with fast_paths(False):
            expected = decoder.generate(ids, grids, noise)
        for _ in range(2):  # the call that verifies, and one after it
            assert torch.equal(decoder.generate(ids, grids, noise), expected)
        assert expected.unique().numel() > 4
    state = GLM_AR_GRAPH.state()
    assert state.status == "verified" and not state.eager_calls, state
    kernels = GLM_AR_KERNELS.state()
    if dtype == torch.bfloat16:
        assert kernels.status == "unseen", kernels
    else:
        assert kernels.eager_calls == 9 and "torch.float32" in kernels.reason, kernels


def greedy_logits(model, inputs, device, dtype):
    """Logits [16, V] of the loop's step where each token is the float32 model's."""
    decoder = GlmImageDecoder(glm_ar_model().to(device, dtype), SamplingRule())
    expected = GlmImageDecoder(model, SamplingRule()).generate(inputs["input_ids"], [(4, 4)], None)
    with torch.inference_mode(), sdpa(torch.device(device)):
        state = decoder.start(inputs["input_ids"].to(device), [(4, 4)], None)
        rows = [state.logits.clone()]
        for token in expected[:-1]:
            state.token.fill_(int(token))
            decoder.advance(state)
            rows.append(state.logits.clone())
    return torch.cat(rows).cpu(), state.fused


@pytest.mark.cuda
def test_fused_steps_are_as_close_to_float32_as_plain_ones(model, processor, monkeypatch):
    inputs = inputs_of(processor, "a cat", 64, 64)
    exact, _ = greedy_logits(model, inputs, "cpu", torch.float32)
    fused, is_fused = greedy_logits(model, inputs, "cuda", torch.bfloat16)
    monkeypatch.setattr(glm_image_ar, "unfused_reason", lambda *arguments: "for this test")
    plain, is_plain = greedy_logits(model, inputs, "cuda", torch.bfloat16)
    assert is_fused and not is_plain
    distance = {name: (x - exact).norm() for name, x in (("fused", fused), ("plain", plain))}
    # Two roundings of one chain, so the distances are two draws of one size.
    assert distance["fused"] < 1.5 * distance["plain"], distance
    assert distance["plain"] < 0.1 * exact.norm(), distance
