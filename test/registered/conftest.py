"""Tests marked ``cuda`` need a GPU, or ``cuda(2)`` two: they are collected only where torch sees as
many, never skipped."""

import pytest
import torch


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda(count=1): needs NVIDIA GPUs; deselected without them")
    torch.set_num_threads(1)  # many test processes share the cores


def pytest_collection_modifyitems(config, items):
    count = torch.cuda.device_count()
    needs_more = [item for item in items if _gpus_of(item) > count]
    config.hook.pytest_deselected(items=needs_more)
    items[:] = [item for item in items if item not in set(needs_more)]


def _gpus_of(item):
    return max((mark.args[0] if mark.args else 1 for mark in item.iter_markers("cuda")), default=0)


@pytest.fixture
def fresh_inductor():
    """A test that compiles starts from an empty dynamo cache."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
