"""Under torch.compile every fused site steps aside: each transformer is one graph of eager ops."""

import pytest
import test_ernie_transformer as ernie
import test_flux_transformer as flux
import test_glm_image_transformer as glm
import torch

from sglang.kernels.ops.diffusion.bitexact_gate import all_gates
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.tiny_checkpoints import transformer_config
from sglang.test.tiny_ernie import ernie_transformer_config
from sglang.test.tiny_glm import glm_transformer_config

register_cpu_ci(est_time=25, suite="base-a-test-cpu")


def flux_case(dtype):
    config = transformer_config(guidance_embeds=True)
    ours, _ = flux.build_pair(config, dtype)
    request = flux.inputs(config, 1, (4, 4), 7, dtype)
    return ours, lambda: flux.run_ours(ours, request)


def ernie_case(dtype):
    config = ernie_transformer_config()
    ours, _ = ernie.build_pair(config, dtype)
    request = ernie.inputs(config, 1, (4, 4), 7, dtype)
    return ours, torch.inference_mode()(lambda: ours(*request))


def glm_case(dtype):
    config = glm_transformer_config()
    ours, _ = glm.build_pair(config, dtype)
    request = glm.inputs(config, 1, (4, 4), 7, dtype)
    return ours, lambda: glm.run_ours(ours, request, drop=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [flux_case, ernie_case, glm_case])
def test_a_transformer_is_one_graph_of_its_eager_chain(fresh_inductor, case, dtype):
    ours, run = case(dtype)
    expected = run()
    for gate in all_gates():
        gate.reset()
    ours.compile(fullgraph=True, backend="eager")
    assert torch.equal(run(), expected)
    assert all(gate.state().status == "unseen" for gate in all_gates())
