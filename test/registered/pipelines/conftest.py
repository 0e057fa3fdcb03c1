"""One tiny FLUX.1-dev checkpoint a test process, and an engine a test file."""

import pytest

from sglang.multimodal_gen import DiffGenerator
from sglang.test.tiny_checkpoints import write_tiny_flux


@pytest.fixture(scope="session")
def tiny_dev(tmp_path_factory):
    """The checkpoint's folder."""
    return write_tiny_flux(tmp_path_factory.mktemp("tiny") / "dev", guidance_embeds=True)


@pytest.fixture(scope="module")
def engine(tiny_dev):
    """A loaded generator on the CPU; warnings are logged, information is not."""
    with DiffGenerator.from_pretrained(tiny_dev, device="cpu", log_level="warning") as generator:
        yield generator
