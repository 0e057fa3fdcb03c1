"""A process's settings: strict values, no silent override of an explicit one."""

import pytest

from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.configs.validation import InvalidParameter, show
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

REFUSED = {
    "model_path": ["", "a\0b", 3, b"x"],
    "lora_path": ["", "a\0b", 3, b"x"],
    "backend": ["", "vllm", None, 1],
    "num_gpus": [0, 65, True, "1", None],
    "tp_size": [0, 65, True, "1"],
    "ulysses_degree": [0, 65, 2.0],
    "enable_cfg_parallel": [1, "yes"],
    "local_mode": [1, None],
    "load_format": ["pt", None, "dumy"],
    "device": ["tpu", "cuda:0", None],
    "dit_precision": ["float32", "", 32],
    "vae_precision": ["fp8"],
    "text_encoder_precision": ["int8"],
    "attention_backend": ["xformers", None],
    "performance_mode": ["fast", None],
    "text_encoder_cpu_offload": ["yes", 1],
    "dit_layerwise_offload": ["yes", 1, None],
    "enable_torch_compile": ["yes", None],
    "regional_compile": ["yes", None],
    "fast_paths": [0],
    "log_level": ["INFO", 10],
}
CASES = [(field, value) for field, values in REFUSED.items() for value in values]


@pytest.mark.parametrize("field,value", CASES, ids=lambda case: ascii(show(case))[:30])
def test_a_bad_value_is_refused_by_name(field, value):
    with pytest.raises(InvalidParameter, match=f"^{field}: got .*expected") as caught:
        ServerArgs.from_kwargs(**{field: value})
    assert caught.value.field == field


def test_every_field_has_refused_values():
    assert set(REFUSED) == set(ServerArgs.__dataclass_fields__)


def test_an_unknown_keyword_names_the_nearest():
    with pytest.raises(InvalidParameter, match="modelpath: .*'model_path'"):
        ServerArgs.from_kwargs(modelpath="x")


@pytest.mark.parametrize(
    "given,field",
    [
        ({"load_format": "dummy"}, "model_path"),
        ({"load_format": "dummy", "model_path": "/tmp"}, "model_path"),
        (
            {"performance_mode": "speed", "text_encoder_cpu_offload": True},
            "text_encoder_cpu_offload",
        ),
        (
            {"performance_mode": "memory", "text_encoder_cpu_offload": False},
            "text_encoder_cpu_offload",
        ),
        ({"device": "cpu", "text_encoder_cpu_offload": True}, "text_encoder_cpu_offload"),
        ({"device": "cpu", "attention_backend": "cudnn"}, "attention_backend"),
        ({"num_gpus": 2, "enable_torch_compile": True}, "enable_torch_compile"),
        ({"num_gpus": 2, "regional_compile": True}, "regional_compile"),
        ({"num_gpus": 2, "backend": "diffusers"}, "num_gpus"),
        (
            {"load_format": "dummy", "model_path": "GLM-Image", "backend": "diffusers"},
            "load_format",
        ),
    ],
)
def test_contradictions_raise_instead_of_overriding(given, field):
    with pytest.raises(InvalidParameter) as caught:
        ServerArgs(**given)
    assert caught.value.field == field


def test_what_none_stands_for():
    args = ServerArgs(vae_precision="fp16")
    assert [args.precision("dit", device) for device in ("cpu", "cuda")] == ["fp32", "bf16"]
    assert args.precision("vae", "cpu") == "fp16"
    modes = {"auto": False, "speed": False, "memory": True, "manual": False}
    assert {m: ServerArgs(performance_mode=m).offload_text_encoder for m in modes} == modes
    assert ServerArgs(text_encoder_cpu_offload=True).offload_text_encoder
