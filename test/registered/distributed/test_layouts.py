"""Every legal layout of two and four ranks against one rank: real processes, gloo, float32.

What holds, and is asserted: the two forwards of guidance on ranks of their own give the bytes of
one rank. With cut sequences the bytes are the same where the parts are multiples of 32 tokens, as
the CPU's GEMM then rounds a row alike whatever the number of rows; else latents differ by at most
1e-5 of the largest. With cut weights they differ by at most 1e-4. All ranks always agree.
"""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from sglang.multimodal_gen.configs.model_specs import read_json, read_model_spec
from sglang.multimodal_gen.configs.parallel_layout import ModelTraits, legal_layouts
from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.distributed.launch import RankProcesses
from sglang.multimodal_gen.runtime.loader.component_loader import ComponentLoader, quiet_libraries
from sglang.multimodal_gen.runtime.managers.numeric_switches import numeric_switches
from sglang.multimodal_gen.runtime.pipelines.registry import PIPELINES
from sglang.multimodal_gen.runtime.pipelines.stages.denoising import DenoisingStage
from sglang.multimodal_gen.runtime.pipelines.stages.state import BatchState, ImageState
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.spmd_rank import CPU, Case, denoised, silent
from sglang.test.tiny_checkpoints import write_tiny_flux
from sglang.test.tiny_ernie import write_tiny_ernie
from sglang.test.tiny_glm import write_tiny_glm

register_cpu_ci(est_time=90, suite="base-a-test-cpu")

HEADS = RANKS = 4
WRITERS = {
    "flux": lambda folder: write_tiny_flux(folder, guidance_embeds=True, heads=HEADS),
    "ernie": lambda folder: write_tiny_ernie(folder, with_pe=False, heads=HEADS),
    "glm": lambda folder: write_tiny_glm(folder, heads=HEADS),
}
GUIDED = {"negative_prompt": "dark", "true_cfg_scale": 4.0}
PICTURE = Image.linear_gradient("L").resize((96, 64)).convert("RGB")
# Odd lengths of text and image, down to one token; guidance 1 and 4; two pictures at once; edits.
UNEVEN = {
    "flux": [
        {"prompt": "a red apple", "width": 80, "height": 48, "max_sequence_length": 13},
        {"prompt": "an owl", "width": 112, "height": 80, "max_sequence_length": 4, **GUIDED},
    ],
    "ernie": [
        {"prompt": "a red apple", "width": 80, "height": 48, "guidance_scale": 4.0},
        {"prompt": "", "width": 112, "height": 80, "guidance_scale": 1.0},
        {"prompt": "an owl", "width": 16, "height": 16, "num_outputs_per_prompt": 2},
    ],
    "glm": [
        {"prompt": 'a sign "open"', "width": 96, "height": 160, "guidance_scale": 4.0},
        {"prompt": "no sign", "width": 64, "height": 96, "guidance_scale": 1.0},
        {"prompt": "blue", "width": 64, "height": 64, "image": [PICTURE, PICTURE]},
    ],
}
# Parts of a multiple of 32 tokens in each stream, on two and on four ranks.
EVEN = {
    "flux": [{"prompt": "a red apple", "width": 256, "height": 256, "max_sequence_length": 128}],
    "ernie": [{"prompt": "a" * 127, "width": 256, "height": 256, "negative_prompt": "b" * 127}],
    "glm": [
        {
            "prompt": f'"{"a" * 126}"',
            "width": 256,
            "height": 128,
            "negative_prompt": f'"{"b" * 126}"',
        }
    ],
}
TRAITS = {
    "flux": ModelTraits(pipeline_class="FluxPipeline", heads=HEADS, runs_cfg=False),
    "ernie": ModelTraits(pipeline_class="ErnieImagePipeline", heads=HEADS, runs_cfg=True),
    "glm": ModelTraits(pipeline_class="GlmImagePipeline", heads=HEADS, runs_cfg=True),
}
CASES = [
    pytest.param(model, layout, id=f"{model}-{layout}")
    for ranks in (2, 4)
    for model in WRITERS
    for layout in legal_layouts(ranks, TRAITS[model])
]


class Model:
    """A tiny checkpoint with batches that are ready to be denoised, and one rank's latents."""

    def __init__(self, name, folder):
        self.folder = WRITERS[name](folder)
        self.spec = read_model_spec(self.folder)
        loader = ComponentLoader(self.folder, False, CPU)
        with numeric_switches(CPU), quiet_libraries():
            build = PIPELINES[self.spec.pipeline_class]
            self._pipeline = build(loader, self.spec, ServerArgs(device="cpu"), lambda *step: None)
        self.batches = {}
        self.expected = {}
        for kind, requests in (("uneven", UNEVEN[name]), ("even", EVEN[name])):
            batches = [self._prepared(request) for request in requests]
            self.batches[kind] = pickle.dumps(batches)
            self.expected[kind] = denoised(self.folder, batches)

    def _prepared(self, request):
        asked = SamplingParams(seed=7, num_inference_steps=2, **request)
        params = asked.fit(self.spec)
        true_cfg = params.true_cfg_scale > 1 and params.negative_prompt is not None
        images = [ImageState(image) for image in params.expand()]
        batch = BatchState(params, images, silent, true_cfg)
        with torch.inference_mode(), numeric_switches(CPU):
            for stage in self._pipeline.stages:
                if isinstance(stage, DenoisingStage):
                    return batch
                stage(batch)
        raise AssertionError("the pipeline does not denoise")


@pytest.fixture(scope="module")
def world():
    """Four processes for all cases; while they start, the models are made."""
    processes = RankProcesses("sglang.test.spmd_rank", RANKS, 600.0)
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def models(world, tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have: on a CPU threads decide the order of sums
    folder = tmp_path_factory.mktemp("layouts")
    made = {name: Model(name, folder / name) for name in WRITERS}
    assert world.answers() == ["ready"] * RANKS
    yield made
    torch.set_num_threads(threads)


def run(world, layout, model, kind, store_file):
    """Every rank's latents of the model's batches, by the first ranks of the world."""
    cases = [
        Case(rank, layout, model.folder, model.batches[kind], str(store_file))
        for rank in range(layout.world)
    ]
    world.send(cases + [None] * (RANKS - layout.world))
    answers = world.answers()[: layout.world]
    failures = [answer for answer in answers if isinstance(answer, str)]
    assert not failures, failures[0]
    return answers


@pytest.mark.parametrize("kind", ["uneven", "even"])
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_layout_gives_the_picture_of_one_rank(models, world, tmp_path, name, layout, kind):
    model = models[name]
    answers = run(world, layout, model, kind, tmp_path / "store")
    for other in answers[1:]:
        assert all(map(np.array_equal, other, answers[0])), "ranks disagree"

    byte_equal = layout.tp == 1 and (layout.ulysses == 1 or kind == "even")
    bound = 0.0 if byte_equal else 1e-5 if layout.tp == 1 else 1e-4
    for got, expected in zip(answers[0], model.expected[kind], strict=True):
        assert np.std(expected) > 0.1, "the latents are (nearly) constant"
        assert np.abs(got - expected).max() <= bound * np.abs(expected).max()


def test_the_traits_are_the_checkpoints(models):
    for name, model in models.items():
        config = read_json(model.folder / "transformer" / "config.json")
        assert ModelTraits.of(model.spec, config) == TRAITS[name]
