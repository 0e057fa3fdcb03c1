"""Every predicate says no to odd tensors, whichever argument is one, and never raises."""

import importlib
import inspect
import pkgutil

import pytest
import torch
from torch import nn

from sglang.kernels.ops import diffusion
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")
register_cuda_ci(est_time=30, stage="base-b-kernel-unit", runner_config="1-gpu-large")

BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64
MODULES = [
    importlib.import_module(found.name)
    for found in pkgutil.walk_packages(diffusion.__path__, f"{diffusion.__name__}.")
    if not found.ispkg and not found.name.endswith("_kernels")
]
PREDICATES = {
    name: function
    for module in MODULES
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if name.startswith(("can_use_", "can_fuse_")) and function.__module__ == module.__name__
}

# Shapes that a predicate takes, by argument; bfloat16, or (shape, dtype).
HEADS, ROW, LINE, MATRIX = (2, 8, 4, 64), (1, 1, 64), (64,), (8, 64)
QK, TABLES = {"q": HEADS, "k": HEADS}, {"cos": ((8, 64), F32), "sin": ((8, 64), F32)}
WEIGHTS = {"q_weight": LINE, "k_weight": LINE}
STREAMS = {f"{s}_{n}": v for s in ("txt", "img") for n, v in (QK | WEIGHTS).items()}
JOINT_TABLES = {"cos": ((16, 64), F32), "sin": ((16, 64), F32)}
MODULATE = {"x": (2, 8, 64), "scale": (2, 64), "shift": (2, 64)}
PLACES = {"tokens": ((5,), I64), "token": ((1, 1), I64), "step": ((1,), I64), "slot": ((1,), I64)}
CACHE = {"keys": (1, 2, 64, 16), "values": (1, 2, 64, 16)}
LINEAR = {"weight": (64, 64), "bias": LINE}
ROWS, WEIGHT = (2, 512, 1024), (256, 1024)  # the least that a GEMM takes, if the GPU is small
ARGUMENTS = {
    "can_fuse_linear_gelu": LINEAR | {"x": (1, 8, 64)},
    "can_fuse_linear_gelu_static": LINEAR,
    "can_fuse_ln_modulate": {"x": (1, 1024, 64), "scale": (1, 64), "shift": (1, 64)},
    "can_use_decode_attention": {"qkv": (1, 1, 128), "cos": (64, 16), "sin": (64, 16)}
    | {"partner": ((16,), I64), "slot": ((1,), I64)}
    | CACHE,
    "can_use_fused_gated_layernorm_modulate": {"residual": (2, 8, 64), "update": (2, 8, 64)}
    | {"gate": (2, 64), "scale": (2, 64), "shift": (2, 64)},
    "can_use_fused_joint_qk_rmsnorm_rope": STREAMS | JOINT_TABLES,
    "can_use_fused_layernorm_modulate": MODULATE,
    "can_use_fused_qk_head_layernorm": {"q": (1, 512, 32, 128), "k": (1, 512, 32, 128)},
    "can_use_fused_qk_layernorm_rope": QK | TABLES,
    "can_use_fused_qk_rmsnorm_rope": QK | WEIGHTS | TABLES,
    "can_use_fused_qk_rmsnorm_rotate_half": QK | WEIGHTS | {"cos": (8, 1, 64), "sin": (8, 1, 64)},
    "can_use_fused_rmsnorm_scale_shift": {"x": (1, 8, 4096), "update": (1, 8, 4096)}
    | {"weight": (4096,), "scale": (1, 4096), "shift": (1, 4096), "gate": (1, 4096)},
    "can_use_gelu_mul_cuda": {"up": (2, 8, 64), "gate": (2, 8, 64)},
    "can_use_gelu_tanh_concat_cuda": {"attn": (2, 8, 64), "mlp": (2, 8, 128)},
    "can_use_gemv": {"x": ROW, "weight": MATRIX, "bias": (8,)},
    "can_use_gemv_qkv": {"x": ROW, "q": MATRIX, "k": MATRIX, "v": MATRIX}
    | {"q_bias": (8,), "k_bias": (8,), "v_bias": (8,)},
    "can_use_gemv_swiglu": {"x": ROW, "weight": MATRIX},
    "can_use_linear_gelu_bitexact": {"x": ROWS, "weight": WEIGHT, "bias": (256,)}
    | {"attn": (2, 512, 64)},
    "can_use_modulate_scale_shift_cuda": MODULATE,
    "can_use_residual_gate_add_cuda": {n: (2, 8, 64) for n in ("residual", "update", "gate")},
    "can_use_residual_rmsnorm": {"x": ROW, "update": ROW, "update_weight": LINE, "weight": LINE},
    "can_use_rmsnorm": {"x": ROW, "weight": LINE},
    "can_use_sample_token": {"logits": ROW, "noise": ((5, 64), F32), "wide": ((1, 64), F32)}
    | PLACES,
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


class Subclass(torch.Tensor):
    pass


def parts(tensor):
    """Of a nested tensor: as many axes as `tensor` has, where it has two or more."""
    return list(tensor.unbind()) if tensor.dim() > 1 else [tensor]


ODD = {
    "nested": lambda t: torch.nested.nested_tensor(parts(t)),
    "jagged": lambda t: torch.nested.nested_tensor(parts(t), layout=torch.jagged),
    "sparse": lambda t: t.to_sparse(),
    "csr": lambda t: t.view(-1, t.shape[-1]).to_sparse_csr(),
    "meta": lambda t: t.to("meta"),
    "subclass": lambda t: t.as_subclass(Subclass),
    "no axis": lambda t: t.new_zeros(()),
    "no row": lambda t: t[:0],
    "no column": lambda t: t[..., :0],
}


def made(name, device):
    """The arguments of a predicate as tensors."""
    sizes = {
        argument: given if isinstance(given[0], tuple) else (given, BF16)
        for argument, given in ARGUMENTS[name].items()
    }
    return {n: torch.ones(shape, dtype=dtype, device=device) for n, (shape, dtype) in sizes.items()}


@pytest.fixture
def ask(monkeypatch):
    """Calls a predicate by name; it sees tensors of the CPU as if they were on a GPU."""
    linear = nn.Linear(64, 64, device="meta")

    def call(name, arguments):
        arguments = dict(arguments)
        if name.startswith("can_fuse_linear"):
            arguments["linear"] = linear
            linear._parameters.update({n: arguments.pop(n) for n in LINEAR})
        if name == "can_use_gemv_qkv":
            arguments["biases"] = [arguments.pop(f"{n}_bias") for n in "qkv"]
        if name == "can_use_fused_qk_layernorm_rope":
            arguments["text_tokens"] = 0
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", property(lambda t: t.device.type != "meta"))
            patch.setattr(torch.Tensor, "get_device", lambda t: t.is_cuda - 1)
            for module in MODULES:
                if hasattr(module, "triton_runs_on"):
                    patch.setattr(module, "triton_runs_on", lambda device: device.type != "meta")
                if hasattr(module, "is_hopper"):
                    patch.setattr(module, "is_hopper", lambda device: device == 0)
                if hasattr(module, "multiprocessors"):
                    patch.setattr(module, "multiprocessors", lambda device: 4)
            return PREDICATES[name](**arguments)

    return call


def test_every_predicate_is_here():
    assert set(ARGUMENTS) == set(PREDICATES)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_plain_tensors_and_parameters_are_taken(ask, name, device):
    arguments = made(name, device)
    assert ask(name, arguments) is True
    as_parameters = {n: nn.Parameter(t, requires_grad=False) for n, t in arguments.items()}
    assert ask(name, as_parameters) is True


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_odd_tensors_are_not(ask, name, kind, device):
    arguments = made(name, device)
    for argument, tensor in arguments.items():
        assert ask(name, arguments | {argument: ODD[kind](tensor)}) is False, argument
    assert ask(name, {n: ODD[kind](t) for n, t in arguments.items()}) is False


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_wants_a_gradient_is_not(ask, name, device):
    """A fused linear's own weights may: it is mounted where gradients are still on."""
    arguments = made(name, device)
    for argument, tensor in arguments.items():
        if tensor.is_floating_point():
            taken = name.startswith("can_fuse_linear") and argument in LINEAR
            wanting = arguments | {argument: tensor.clone().requires_grad_()}
            assert ask(name, wanting) is taken, argument


@pytest.mark.parametrize("name", ARGUMENTS)
def test_inside_a_transform_nothing_is_taken(ask, name):
    arguments, answers = made(name, "cpu"), []
    first = next(iter(arguments))

    def recorded(x):
        answers.append(ask(name, arguments | {first: x}))
        return x

    torch.func.vmap(recorded)(arguments[first][None])
    assert answers == [False]
