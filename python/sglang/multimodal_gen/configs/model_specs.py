"""Model table: diffusers class name -> defaults and rules. A variant is a row of differences."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.validation import (
    InvalidParameter,
    check_known_keys,
    rejected,
    suggestion,
)

PACKAGE = Path(__file__).resolve().parent.parent
BUNDLED_MODEL = PACKAGE / "bundled_model"
DUMMY_CONFIGS = PACKAGE / "configs" / "dummy"
# folders of DUMMY_CONFIGS
DUMMY_MODELS = ("FLUX.1-dev", "FLUX.1-schnell", "ERNIE-Image", "GLM-Image")
OVERRIDES_KEY = "_sglang_defaults"  # in model_index.json


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Defaults of one model (fields named as in SamplingParams) and what it can do."""

    pipeline_class: str
    width: int = 1024
    height: int = 1024
    num_inference_steps: int = 50
    guidance_scale: float | None = 0.0  # None: the pipeline decides
    true_cfg_scale: float = 1.0
    negative_prompt: str | None = None
    max_sequence_length: int = 512
    max_sequence_length_limit: int = 512
    size_multiple: int = 16
    tokens_a_multiple: int = 1  # packed latent tokens that a side must be a multiple of
    has_guidance_embedding: bool = False
    guidance_scale_is_cfg: bool = False  # guidance_scale and true_cfg_scale are one parameter
    use_pe: bool = False
    has_prompt_enhancer: bool = False
    # how pictures of the request act: noised and denoised again, or read beside the text
    edits: Literal["img2img", "condition"] | None = None
    max_condition_images: int = 1  # where the model edits
    min_condition_side: int = 1  # pixels
    max_condition_ratio: float | None = None  # of the longer side to the shorter
    strength: float | None = None  # of img2img
    cfg_needs_negative_prompt: bool = True
    untaken: tuple[str, ...] = ()  # parameters that the pipeline does not take

    def with_overrides(self, overrides: Mapping[str, Any]) -> "ModelSpec":
        """The spec with a checkpoint's own defaults, checked as strictly as a request.

        A default true_cfg_scale above 1 acts against the empty prompt unless told otherwise.
        """
        names = [field.name for field in fields(SamplingParams) if hasattr(self, field.name)]
        check_known_keys(overrides, names, what=f"name in {OVERRIDES_KEY}")
        given = SamplingParams(prompt="", **overrides)
        values = {name: getattr(given, name) for name in overrides}
        for name, value in values.items():
            if value is None and name != "negative_prompt":
                raise rejected(name, value, "a value")
        if self.guidance_scale_is_cfg and "guidance_scale" in values:
            values.setdefault("true_cfg_scale", values["guidance_scale"])
        if values.get("true_cfg_scale", 1) > 1:
            values.setdefault("negative_prompt", "")
        spec = replace(self, **values)
        given.fit(spec)
        return spec


_FLUX_DEV = ModelSpec(
    pipeline_class="FluxPipeline",
    guidance_scale=3.5,
    has_guidance_embedding=True,
    edits="img2img",
    strength=0.6,
)
_FLUX_SCHNELL = replace(
    _FLUX_DEV,
    guidance_scale=0.0,
    has_guidance_embedding=False,
    num_inference_steps=4,
    max_sequence_length=256,
)

_GLM_IMAGE = ModelSpec(
    pipeline_class="GlmImagePipeline",
    num_inference_steps=30,
    guidance_scale=1.5,
    true_cfg_scale=1.5,
    negative_prompt="",
    guidance_scale_is_cfg=True,
    max_sequence_length=2048,
    max_sequence_length_limit=2048,
    tokens_a_multiple=2,  # a token of the prior covers 2x2 tokens of the transformer
    edits="condition",
    max_condition_images=4,  # a picture of 1024x1024 adds 2 GB of keys and values in bf16
    min_condition_side=16,  # what its processor takes, as is the ratio
    max_condition_ratio=4.0,
)

_ERNIE_IMAGE = ModelSpec(
    pipeline_class="ErnieImagePipeline",
    guidance_scale=4.0,
    true_cfg_scale=4.0,
    negative_prompt="",
    max_sequence_length=4096,
    max_sequence_length_limit=4096,
    guidance_scale_is_cfg=True,
    use_pe=True,
    has_prompt_enhancer=True,
)

# (pipeline class, guidance embedding in the transformer) -> row
MODEL_SPECS = {
    ("FluxPipeline", True): _FLUX_DEV,
    ("FluxPipeline", False): _FLUX_SCHNELL,
    ("ErnieImagePipeline", False): _ERNIE_IMAGE,
    ("GlmImagePipeline", False): _GLM_IMAGE,
}


def model_spec(
    pipeline_class: str,
    *,
    transformer_config: Mapping[str, Any],
    vae_config: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    has_prompt_enhancer: bool = False,
) -> ModelSpec:
    """The row of a checkpoint, told by its configs and never by its name.

    `overrides` are the `_sglang_defaults` of model_index.json. Raises InvalidParameter for a
    pipeline class that is not in the table, listing those that are.
    """
    check_pipeline_class(pipeline_class)
    row = MODEL_SPECS[pipeline_class, False]
    if transformer_config.get("guidance_embeds"):
        row = MODEL_SPECS.get((pipeline_class, True), row)
    enhancer = row.has_prompt_enhancer and has_prompt_enhancer
    spec = replace(
        row,
        size_multiple=row.tokens_a_multiple * _size_multiple(vae_config),
        has_prompt_enhancer=enhancer,
        use_pe=enhancer and row.use_pe,
    )
    try:
        return spec.with_overrides(overrides or {})
    except InvalidParameter as error:
        raise InvalidParameter("model_path", f"bad {OVERRIDES_KEY}: {error}") from None


def _size_multiple(vae_config: Mapping[str, Any]) -> int:
    channels = vae_config.get("block_out_channels")
    if not isinstance(channels, list | tuple) or not 1 <= len(channels) <= 8:
        raise rejected("model_path", channels, "block_out_channels of 1 to 8 blocks in the VAE")
    # A latent token covers 2x2 latents; the VAE halves the picture between its blocks.
    return 2 * 2 ** (len(channels) - 1)


def read_model_spec(folder: Path) -> ModelSpec:
    """The spec of a folder in diffusers layout, from its JSON files alone (milliseconds).

    Raises InvalidParameter("model_path") when the folder or a config is missing or not readable.
    """
    if not folder.is_dir():
        raise rejected("model_path", str(folder), "a folder that exists", "check the path")
    index = read_json(folder / "model_index.json")
    check_pipeline_class(index.get("_class_name"))
    overrides = index.get(OVERRIDES_KEY, {})
    if not isinstance(overrides, dict):
        raise rejected("model_path", overrides, f"a JSON object as {OVERRIDES_KEY}")
    return model_spec(
        index["_class_name"],
        transformer_config=read_json(folder / "transformer" / "config.json"),
        vae_config=read_json(folder / "vae" / "config.json"),
        overrides=overrides,
        has_prompt_enhancer=_has_component(index, "pe"),
    )


def choose_backend(asked: str, folder: Path) -> str:
    """Who runs the model in `folder`: "sglang" or "diffusers". With asked="auto" diffusers runs
    every pipeline class that is not in the table."""
    if asked != "auto":
        return asked
    name = read_json(folder / "model_index.json").get("_class_name")
    known = any(name == known for known, _ in MODEL_SPECS)
    return "sglang" if known or not isinstance(name, str) else "diffusers"


def known_spec(model_path: str | None, load_format: str, backend: str) -> ModelSpec | None:
    """The spec where files alone tell it; None for a hub id, which is looked at when it is loaded,
    and for diffusers, whose spec is the loaded pipeline's. Raises like `read_model_spec`."""
    folder = local_model_folder(model_path, load_format)
    if folder is None or choose_backend(backend, folder) == "diffusers":
        return None
    return read_model_spec(folder)


def _has_component(index: Mapping[str, Any], name: str) -> bool:
    """An optional component that a checkpoint lacks is absent or [null, null]."""
    entry = index.get(name)
    return isinstance(entry, list) and any(entry)


def check_pipeline_class(name: object) -> None:
    """Raise InvalidParameter("model_path") for a class not in the table, listing those that are."""
    supported = sorted({known for known, _ in MODEL_SPECS})
    if name not in supported:
        expected = f"a checkpoint of a supported pipeline class: {', '.join(supported)}"
        raise rejected("model_path", name, expected)


def read_json(path: Path) -> dict[str, Any]:
    """A checkpoint's JSON object. Raises InvalidParameter("model_path") naming the file."""
    if not path.is_file():
        layout = "expected a checkpoint in diffusers layout (model_index.json and one folder each)"
        raise InvalidParameter("model_path", f"{path.parent} has no {path.name}; {layout}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also bytes that are not UTF-8
        raise InvalidParameter("model_path", f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise rejected("model_path", content, f"a JSON object in {path}")
    return content


def local_model_folder(model_path: str | None, load_format: str = "auto") -> Path | None:
    """Where a model lies on this machine, or None when `model_path` can only be a hub id.

    None is the bundled model; with load_format="dummy" a name of DUMMY_MODELS is a shipped config.
    Raises InvalidParameter("model_path") for a path that does not exist.
    """
    if load_format == "dummy":
        if model_path not in DUMMY_MODELS:
            advice = suggestion(model_path or "", DUMMY_MODELS)
            expected = f"one of {', '.join(DUMMY_MODELS)} with load_format='dummy'"
            raise rejected("model_path", model_path, expected, advice)
        return DUMMY_CONFIGS / model_path
    if model_path is None:
        return BUNDLED_MODEL
    folder = Path(model_path)
    if folder.exists() or not _could_be_hub_id(model_path):
        if not folder.is_dir():
            expected = "an existing folder in diffusers layout, or a hub id such as owner/name"
            raise rejected("model_path", model_path, expected, "the folder does not exist")
        return folder
    return None


def _could_be_hub_id(text: str) -> bool:
    owner, slash, name = text.partition("/")
    words_only = all(
        part and part.replace("-", "").replace("_", "").replace(".", "").isalnum()
        for part in (owner, name)
    )
    # "models/flux" beside an existing folder "models" is a mistyped path, not a hub id.
    return bool(slash) and words_only and text.isascii() and not Path(owner).exists()
