"""Writes the diffusers-layout folder and packs it for the way home."""

import json
import shutil
import tarfile
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from model_config import DEFAULTS, make_scheduler
from sampling import Model

PART_BYTES = 12 * 2**20  # transport limit of one file
WORK = Path(__file__).resolve().parent / "work"

MODEL_INDEX = {
    "_class_name": "FluxPipeline",
    "_diffusers_version": "0.42.1",
    "_sglang_defaults": DEFAULTS,
    "feature_extractor": [None, None],
    "image_encoder": [None, None],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


def export_folder(model: Model, folder: Path) -> int:
    """Write every component in bf16; returns the bytes of all safetensors files."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    parts = {
        "transformer": model.transformer,
        "vae": model.vae,
        "text_encoder": model.text.clip,
        "text_encoder_2": model.text.t5,
    }
    for name, module in parts.items():
        half = clone_bf16(module)
        half.save_pretrained(partial / name, safe_serialization=True)
    make_scheduler().save_pretrained(partial / "scheduler")
    for name in ("tokenizer", "tokenizer_2"):
        shutil.copytree(WORK / name, partial / name)
    (partial / "model_index.json").write_text(json.dumps(MODEL_INDEX, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def load_parts(folder: Path, transformer: torch.nn.Module, text: torch.nn.Module) -> None:
    """Fill a transformer and the text encoders from an exported folder."""
    for name, module in (
        ("transformer", transformer),
        ("text_encoder", text.clip),
        ("text_encoder_2", text.t5),
    ):
        saved = type(module).from_pretrained(folder / name)
        module.load_state_dict(saved.state_dict())


def clone_bf16(module: torch.nn.Module) -> torch.nn.Module:
    """A bf16 copy on the CPU; the training weights stay as they are."""
    if isinstance(module, AutoencoderKL) or hasattr(module, "register_to_config"):
        twin = type(module).from_config(module.config)
    else:
        twin = type(module)(module.config)
    twin.load_state_dict(module.state_dict())
    return twin.to("cpu", torch.bfloat16).eval()


def round_to_bf16(module: torch.nn.Module) -> None:
    """Round the weights in place to what the exported files hold: those are then measured."""
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.copy_(tensor.to(torch.bfloat16).to(tensor.dtype))


def pack(folder: Path, out: Path, stem: str = "bundled_model.tar") -> list[Path]:
    """Folder -> OUT/STEM.0, OUT/STEM.1, ...: pieces of one tar file, each under the limit."""
    out.mkdir(parents=True, exist_ok=True)
    archive = folder.with_suffix(".tar")
    with tarfile.open(archive, "w") as tar:
        tar.add(folder, arcname="bundled_model")
    data = archive.read_bytes()
    archive.unlink()
    pieces = []
    for index, start in enumerate(range(0, len(data), PART_BYTES)):
        piece = out / f"{stem}.{index}"
        piece.write_bytes(data[start : start + PART_BYTES])
        pieces.append(piece)
    return pieces
