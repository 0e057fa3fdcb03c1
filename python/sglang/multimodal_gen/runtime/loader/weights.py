"""Safetensors to module, strict: every name once, every shape equal, nothing left over."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from sglang.multimodal_gen.runtime.distributed.tensor_parallel import full_shape, local_part

INDEX_SUFFIX = ".safetensors.index.json"
FLOAT_DTYPES = ("F32", "BF16", "F16", "F64")
INDEX_BUFFERS = ("position_ids", "num_batches_tracked")  # integers by nature, in any checkpoint


class CheckpointError(ValueError):
    """A checkpoint that is incomplete, corrupt, or not the model's."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a component, through its index when it is sharded."""
    indexes = sorted(folder.glob(f"*{INDEX_SUFFIX}"))
    if not indexes:
        # a dot in the stem marks a variant, as in model.fp16.safetensors: the plain file counts
        files = sorted(p for p in folder.glob("*.safetensors") if "." not in p.stem)
        if not files:
            raise CheckpointError(
                f"{folder}: got no *.safetensors file, expected the weights there"
            )
        return files
    try:
        names = sorted(set(json.loads(indexes[0].read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{indexes[0]}: got an unreadable index ({error}), expected JSON with weight_map"
        ) from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{indexes[0].name} names files that {folder} lacks: {missing}")
    return [folder / name for name in names]


def iterate_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, CPU tensor) of every tensor of a component, one at a time."""
    for path in weight_files(folder):
        with _open(path) as file:
            for name in file.keys():
                yield name, file.get_tensor(name)


def check_weight_files(folder: Path) -> None:
    """Raise `CheckpointError` for a missing, corrupt or truncated file, and for a tensor that is
    not a plain float (a quantized checkpoint); reads headers only."""
    problems = []
    for path in weight_files(folder):
        with _open(path) as file:
            for name in file.keys():
                dtype = file.get_slice(name).get_dtype()
                if dtype not in FLOAT_DTYPES and not name.endswith(INDEX_BUFFERS):
                    problems.append(f"{name} is {dtype}, expected one of {', '.join(FLOAT_DTYPES)}")
    raise_problems(problems, str(folder))


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: got a corrupt or truncated file ({error}), expected safetensors;"
            " fetch it again"
        ) from error


@torch.no_grad()
def load_strict(
    module: torch.nn.Module, weights: Iterator[tuple[str, torch.Tensor]], source: str
) -> None:
    """Copy `weights` into the parameters and buffers of `module`.

    Each is cast to the parameter's dtype and device; a parameter that is cut over ranks takes its
    slice. Raises `CheckpointError` naming every
    missing, unexpected, duplicate or mis-shaped tensor.
    """
    targets = module.state_dict(keep_vars=True)
    missing, problems = set(targets), []
    for name, tensor in weights:
        if name not in targets:
            problems.append(f"unexpected {name}")
        elif name not in missing:
            problems.append(f"duplicate {name}")
        elif tensor.shape != (expected := full_shape(targets[name])):
            missing.discard(name)
            problems.append(f"{name} has shape {list(tensor.shape)}, expected {list(expected)}")
        else:
            missing.discard(name)
            targets[name].copy_(local_part(targets[name], tensor))
    problems += [f"missing {name}" for name in sorted(missing)]
    raise_problems(problems, source)


def raise_problems(problems: list[str], source: str, shown: int = 20) -> None:
    """Raise one `CheckpointError` listing the problems; do nothing when there are none."""
    if not problems:
        return
    more = f" and {len(problems) - shown} more" if len(problems) > shown else ""
    raise CheckpointError(
        f"{source}: the weights do not fit the model: {'; '.join(problems[:shown])}{more}"
    )
