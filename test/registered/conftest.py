"""Tests marked ``cuda`` need a GPU: they are collected only where torch sees one, never skipped."""

import pytest
import torch


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs an NVIDIA GPU; deselected where there is none")
    torch.set_num_threads(1)  # many test processes share the cores


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    needs_gpu = [item for item in items if item.get_closest_marker("cuda")]
    config.hook.pytest_deselected(items=needs_gpu)
    items[:] = [item for item in items if item not in set(needs_gpu)]


@pytest.fixture
def fresh_inductor():
    """A test that compiles starts from an empty dynamo cache."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
