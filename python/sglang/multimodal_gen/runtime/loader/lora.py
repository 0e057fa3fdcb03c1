"""LoRA: low-rank updates `strength * alpha / rank * up @ down` added to a transformer's weights.

Nothing is left out in silence: a tensor of the file that no weight takes is an error with its name,
and so is a file without any. What is taken away leaves the weights as they were, byte for byte.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from sglang.multimodal_gen.configs.validation import rejected
from sglang.multimodal_gen.runtime.loader.weights import CheckpointError, raise_problems

ADAPTER_CONFIG = "adapter_config.json"  # of a folder that PEFT wrote
METADATA, METADATA_PREFIX = "lora_adapter_metadata", "transformer."  # of a file of diffusers
SCALES = ("alpha_pattern", "rank_pattern", "use_rslora", "use_dora")  # PEFT's other rules of scale
_PREFIX = re.compile(r"(base_model\.model\.|transformer\.|diffusion_model\.)*")
_PARTS = {  # the end of a tensor's name -> its part of the update
    "down": re.compile(r"\.lora_A(\.\w+)?\.weight$|\.lora[._]down\.weight$"),
    "up": re.compile(r"\.lora_B(\.\w+)?\.weight$|\.lora[._]up\.weight$"),
    "alpha": re.compile(r"\.alpha$"),
}
_FOREIGN = re.compile(r"lora_(unet|te\d?)_|.*\.processor\.")  # dialects that diffusers translates

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Update:
    """Of one weight [out, in]: down [rank, in], up [out, rank], and alpha / rank."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    def delta(self, device: torch.device) -> torch.Tensor:
        """fp32 [out, in]."""
        up, down = (part.to(device, torch.float32) for part in (self.up, self.down))
        return self.scale * (up @ down)


def read_lora(path: str, weights: Tensors) -> dict[str, Update]:
    """Name in `weights` -> update, of a safetensors file or of a folder with one.

    Takes the names of PEFT, diffusers and, through diffusers' converters, of kohya and xlabs for
    FLUX.1. Raises InvalidParameter for a path that has no such file, CheckpointError naming every
    tensor that does not fit.
    """
    file = lora_file(path)
    tensors, alpha = _read(file), _alpha(file)
    if any(map(_FOREIGN.match, tensors)):
        tensors = _translated(tensors, file)
    found, problems = _grouped(tensors)
    updates = {}
    for module, parts in found.items():
        name = f"{module}.weight"
        problem = _misfit(parts, weights.get(name))
        if problem is None:
            rank = len(parts["down"])
            own_alpha = parts.get("alpha", rank if alpha is None else alpha)
            updates[name] = Update(parts["down"], parts["up"], float(own_alpha) / rank)
        else:
            problems.append(f"{module} {problem}")
    raise_problems(problems or ([] if updates else ["it has no LoRA tensors"]), str(file))
    return updates


def lora_file(lora_path: str) -> Path:
    """The file that a path names. Raises InvalidParameter where there is none, or one of many."""
    path = Path(lora_path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if len(files) != 1 or not files[0].is_file():
        expected = "a safetensors file, or a folder with exactly one"
        raise rejected("lora_path", lora_path, expected)
    return files[0]


def _alpha(file: Path) -> float | None:
    """The alpha of all updates, as PEFT's config beside the file or diffusers' metadata in it say;
    None where neither does."""
    config = file.parent / ADAPTER_CONFIG
    with safe_open(file, framework="pt") as opened:
        text = (opened.metadata() or {}).get(METADATA)
    try:
        settings = json.loads(config.read_text() if config.is_file() else text or "{}")
        settings = {k.removeprefix(METADATA_PREFIX): v for k, v in settings.items()}
        alpha = settings.get("lora_alpha")
        alpha = None if alpha is None else float(alpha)
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: its LoRA settings cannot be read ({error})") from error
    unknown = [f"{name} is not supported" for name in SCALES if settings.get(name)]
    raise_problems(unknown, str(file))
    return alpha


def _read(file: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: got {error}, expected a whole safetensors file") from error


def _translated(tensors: dict[str, torch.Tensor], file: Path) -> dict[str, torch.Tensor]:
    from diffusers.loaders import FluxLoraLoaderMixin

    try:
        translated, alphas = FluxLoraLoaderMixin.lora_state_dict(dict(tensors), return_alphas=True)
    except (ValueError, KeyError, IndexError, RuntimeError) as error:
        why = " ".join(str(error).split())
        text = f"{file}: got names of another dialect, which diffusers cannot translate ({why})"
        raise CheckpointError(text) from error
    return translated | (alphas or {})


def _grouped(tensors: Tensors) -> tuple[dict[str, dict[str, torch.Tensor]], list[str]]:
    """(module -> part -> tensor, a line for each name that is no part of an update)."""
    found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    problems = []
    for name, tensor in tensors.items():
        for part, ending in _PARTS.items():
            module = ending.sub("", name)
            if module != name:
                found[module[_PREFIX.match(module).end() :]][part] = tensor
                break
        else:
            problems.append(f"unexpected {name}")
    return found, problems


def _misfit(parts: Tensors, weight: torch.Tensor | None) -> str | None:
    """Why these parts are no update of this weight, or None."""
    if weight is None or weight.dim() != 2:
        return "is no linear layer of this model's transformer"
    if not {"down", "up"} <= parts.keys():
        return "lacks one of its two matrices"
    down, up = parts["down"].shape, parts["up"].shape
    if len(down) != 2 or len(up) != 2 or (up[0], down[1]) != weight.shape or up[1] != down[0]:
        return f"has shapes {list(up)} and {list(down)} for a weight of {list(weight.shape)}"
    return None
