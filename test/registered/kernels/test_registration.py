import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang.kernels import registration
from sglang.kernels.registration import needs_dispatcher, register_op, wants_gradient
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

calls = []


def _scaled_add(x: torch.Tensor, y: torch.Tensor, factor: float) -> torch.Tensor:
    """x + factor * y"""
    calls.append("implementation")
    return x + factor * y


def _scaled_add_fake(x: torch.Tensor, y: torch.Tensor, factor: float) -> torch.Tensor:
    calls.append("fake")
    return torch.empty_like(x)


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, x - 1


scaled_add = register_op("test_scaled_add", _scaled_add, _scaled_add_fake)
split = register_op("test_split", _split, lambda x: (torch.empty_like(x), torch.empty_like(x)))


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.fixture
def tensors():
    calls.clear()
    return torch.arange(4.0), torch.ones(4)


def test_the_op_has_a_schema(tensors):
    schema = str(torch.ops.sglang_diffusion.test_scaled_add.default._schema)
    assert schema == "sglang_diffusion::test_scaled_add(Tensor x, Tensor y, float factor) -> Tensor"
    assert str(torch.ops.sglang_diffusion.test_split.default._schema).endswith("(Tensor, Tensor)")
    assert scaled_add.__name__ == "test_scaled_add" and scaled_add.__doc__ == "x + factor * y"


def test_plain_eager_calls_the_implementation_only(tensors):
    with torch.no_grad():
        assert not needs_dispatcher(*tensors, 2.0)
        assert torch.equal(scaled_add(*tensors, 2.0), torch.tensor([2.0, 3.0, 4.0, 5.0]))
    assert calls == ["implementation"]
    assert not needs_dispatcher(torch.nn.Parameter(tensors[0], requires_grad=False))


def test_the_dispatcher_gives_the_same(tensors):
    expected = scaled_add(*tensors, 2.0)
    assert torch.equal(torch.ops.sglang_diffusion.test_scaled_add(*tensors, 2.0), expected)


def test_dispatch_modes_see_the_op(tensors):
    with Recorder() as mode:
        scaled_add(*tensors, 2.0)
    assert mode.seen[0] == "sglang_diffusion.test_scaled_add.default"


def test_subclasses_and_gradients_and_transforms_need_the_dispatcher(tensors):
    class Subclass(torch.Tensor):
        pass

    x, y = tensors
    assert needs_dispatcher(x.as_subclass(Subclass), y)
    assert needs_dispatcher(x.clone().requires_grad_(), y)
    assert wants_gradient(x, y.clone().requires_grad_(), 2.0)
    with torch.no_grad():
        assert not needs_dispatcher(x.clone().requires_grad_(), y)
        assert not wants_gradient(x.clone().requires_grad_(), y)
    with torch.inference_mode():
        assert not needs_dispatcher(x, y)
    inside = []
    torch.func.vmap(lambda t: (inside.append(needs_dispatcher(t)), t)[1])(x)
    assert inside == [True]


def test_fake_tensors_run_the_fake_only(tensors):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in tensors]
        assert scaled_add(*fakes, 2.0).shape == (4,)
    assert calls == ["fake"]


def test_fullgraph_compile_keeps_the_op(tensors, fresh_inductor):
    graphs = []

    def backend(graph, example_inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    compiled = torch.compile(
        lambda x, y: scaled_add(x, y, 2.0).relu(), fullgraph=True, backend=backend
    )
    assert torch.equal(compiled(*tensors), scaled_add(*tensors, 2.0).relu())
    assert any("test_scaled_add" in target for target in graphs[0])


def test_opcheck(tensors):
    torch.library.opcheck(torch.ops.sglang_diffusion.test_scaled_add.default, (*tensors, 2.0))
    torch.library.opcheck(torch.ops.sglang_diffusion.test_split.default, tensors[:1])


def test_a_name_is_registered_once():
    with pytest.raises(RuntimeError, match="test_scaled_add"):
        register_op("test_scaled_add", _scaled_add, _scaled_add_fake)


def test_describe_names_what_was_got(tensors):
    text = registration.describe(x=tensors[0], y=torch.ones(2, 4, dtype=torch.bfloat16).T)
    assert text == "x float32[4] cpu contiguous, y bfloat16[4, 2] cpu strides (1, 4)"


def test_describe_names_what_has_no_shape(tensors):
    rows = torch.ones(2, 4)
    text = registration.describe(
        a=torch.nested.nested_tensor([rows, rows]), b=rows.to_sparse(), c=rows.to_sparse_csr()
    )
    assert text == "a float32 cpu nested, b float32 cpu torch.sparse_coo, " + (
        "c float32 cpu torch.sparse_csr"
    )
