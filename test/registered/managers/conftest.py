"""A tiny checkpoint, its pictures made in this process, and an engine a test file."""

import pytest
from engine_harness import serving

from sglang.multimodal_gen import DiffGenerator
from sglang.test.tiny_checkpoints import write_tiny_flux


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return write_tiny_flux(tmp_path_factory.mktemp("tiny") / "flux", guidance_embeds=True)


@pytest.fixture(scope="session")
def local(folder):
    """The same model in this process."""
    with DiffGenerator.from_pretrained(folder, device="cpu", log_level="warning") as generator:
        yield generator


@pytest.fixture(scope="module")
def served(folder):
    """A ready engine."""
    with serving(folder) as served:
        served.run(served.engine.wait_ready())
        yield served
