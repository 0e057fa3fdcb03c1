"""Where a model's files are: the bundled model, a shipped config, a local folder, or the hub."""

from pathlib import Path

from sglang.multimodal_gen.configs.model_specs import local_model_folder
from sglang.multimodal_gen.configs.validation import InvalidParameter

COMPONENT_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
HUB_FILES = ["model_index.json", *(f"*/{pattern}" for pattern in COMPONENT_FILES)]


def find_model_folder(model_path: str | None, load_format: str) -> Path:
    """A local folder in diffusers layout. Only a hub id that is no local folder is downloaded.

    Raises InvalidParameter("model_path") when there is no such folder or hub model.
    """
    folder = local_model_folder(model_path, load_format)
    return folder if folder is not None else _download(model_path)


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # Files at the top level are single-file copies of the same weights: 24 GB for nothing.
        path = snapshot_download(hub_id, allow_patterns=HUB_FILES)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise InvalidParameter(
            "model_path",
            f"got {hub_id!r}, which is neither a local folder nor a hub model that could be"
            f" fetched ({type(error).__name__}: {error}); check the name, the network and HF_TOKEN",
        ) from error
    return Path(path)
