"""Whatever is thrown at a settings class: a valid object or InvalidParameter, nothing else."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.multimodal_gen.configs.model_specs import model_spec
from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.configs.validation import InvalidParameter, show
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

SPEC = model_spec("FluxPipeline", transformer_config={}, vae_config={"block_out_channels": [8] * 4})


class Hostile:
    def __repr__(self):
        raise RuntimeError("no repr")

    def __eq__(self, other):
        raise RuntimeError("no comparison")

    __hash__ = None


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(0, 2000).map(lambda n: 16 * n),
    st.floats(),
    st.text(max_size=30),
    st.text(st.characters(), max_size=5),  # lone surrogates included
    st.binary(max_size=10),
    st.complex_numbers(),
    st.sampled_from([10**5000, np.array([1, 2]), np.int8(3), np.float64(2), np.bool_(1), object]),
    st.sampled_from(["lossless", "exact", "high", "cuda", "jpeg", "dummy", "FLUX.1-dev", "cpu"]),
    st.builds(Hostile),
)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.text(), SCALARS))


def keywords(cls):
    known = st.sampled_from(sorted(cls.__dataclass_fields__))
    rare = st.text(max_size=20)
    return st.dictionaries(st.one_of(*[known] * 12, rare), VALUES, max_size=3)


@settings(max_examples=1000, deadline=None)
@given(keywords(SamplingParams))
def test_sampling_params_are_valid_or_refused(values):
    try:
        params = SamplingParams.from_kwargs(**{"prompt": "a"} | values)
        requests = params.resolve(SPEC).expand()
    except InvalidParameter as error:
        assert len(str(error)) < 700 and error.field == error.args[0].partition("[")[0]
        return
    assert len(requests) == params.num_images
    assert all(0 <= request.seed < 2**63 for request in requests)
    assert hash(params) == hash(SamplingParams.from_kwargs(**{"prompt": "a"} | values))


@settings(max_examples=500, deadline=None)
@given(keywords(ServerArgs))
def test_server_args_are_valid_or_refused(values):
    try:
        args = ServerArgs.from_kwargs(**values)
    except InvalidParameter as error:
        assert len(str(error)) < 700
        return
    assert 1 <= args.num_gpus <= 64 and args.precision("dit", "cuda") in ("fp32", "bf16", "fp16")


@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_shown_values_are_short_and_on_one_line(value):
    assert len(show(value)) <= 80 and "\n" not in show(value)


@pytest.mark.parametrize("value", [math.nan, "x" * 10**6, list(range(10**5)), {"k": "v" * 1000}])
def test_long_values_are_cut(value):
    assert len(show(value)) <= 80
