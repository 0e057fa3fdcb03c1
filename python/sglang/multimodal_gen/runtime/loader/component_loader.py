"""Loads the components of a checkpoint in diffusers layout, or builds them with random weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from sglang.multimodal_gen.configs.json_config import checked_fields
from sglang.multimodal_gen.configs.model_specs import read_json
from sglang.multimodal_gen.configs.validation import rejected
from sglang.multimodal_gen.runtime.distributed.parallel_state import SINGLE, ParallelState
from sglang.multimodal_gen.runtime.layers.packed_projections import pack_projections
from sglang.multimodal_gen.runtime.loader import dummy
from sglang.multimodal_gen.runtime.loader.weights import (
    CheckpointError,
    check_weight_files,
    iterate_weights,
    load_strict,
    raise_problems,
)

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "spiece.model")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ComponentLoader:
    """Reads one model folder. A local folder never touches the network."""

    folder: Path
    dummy: bool
    device: torch.device
    parallel: ParallelState = SINGLE  # which parts of the transformer this rank holds

    def weight_bytes(self) -> int:
        """Bytes of all components' safetensors files; 0 where weights are random."""
        return sum(path.stat().st_size for path in self.folder.glob("*/*.safetensors"))

    def config(self, name: str, file: str = "config.json") -> dict[str, Any]:
        """A component's JSON config."""
        return read_json(self.folder / name / file)

    def check_class(self, name: str, *accepted: str) -> None:
        """Raise InvalidParameter where model_index.json names another class for a component: a
        checkpoint made for it would load, and draw something else."""
        entry = read_json(self.folder / "model_index.json").get(name)
        got = entry[1] if isinstance(entry, list) and len(entry) == 2 else entry
        if got not in accepted:
            expected = f"{' or '.join(accepted)} as {name} in {self.folder / 'model_index.json'}"
            raise rejected("model_path", got, expected)

    def dit(self, build: Callable[[], torch.nn.Module], dtype: torch.dtype) -> torch.nn.Module:
        """The transformer: built without initialisation on its device, then filled strictly."""
        with new_tensors(self.device, dtype), layers_uninitialised():
            module = build()
        if self.dummy:
            dummy.fill_random(module, self.device)
        else:
            path = self.folder / "transformer"
            check_weight_files(path)
            load_strict(module, iterate_weights(path), str(path))
        if self.device.type == "cuda":
            pack_projections(module)
        return module.eval().requires_grad_(False)

    def transformers_model(
        self, name: str, cls: type, dtype: torch.dtype, device: torch.device
    ) -> torch.nn.Module:
        """A transformers model (`cls` a PreTrainedModel class) of the folder `name`."""
        self.check_class(name, cls.__name__)
        if self.dummy:
            config = cls.config_class.from_dict(self.config(name))
            return self._random(lambda: cls(config), dtype, device)
        return self._pretrained(name, cls, dtype, device, dtype=dtype)

    def diffusers_model(
        self, name: str, cls: type, dtype: torch.dtype, device: torch.device
    ) -> torch.nn.Module:
        """A diffusers model (`cls` a ModelMixin class) of the folder `name`."""
        self.check_class(name, cls.__name__)
        if self.dummy:
            config = self.config(name)
            return self._random(lambda: cls.from_config(config), dtype, device)
        return self._pretrained(
            name,
            cls,
            dtype,
            device,
            torch_dtype=dtype,
            low_cpu_mem_usage=False,
            use_safetensors=True,
        )

    def tokenizer(
        self,
        name: str,
        cls: type,
        dummy_tokenizer: Any,
        files: Sequence[str] = TOKENIZER_FILES,
        positions: int | None = None,
    ) -> Any:
        """A tokenizer or processor; `dummy_tokenizer` stands in when weights are random. The
        folder must have one of `files`; `positions` is the most tokens that its encoder takes."""
        if self.dummy:
            return dummy_tokenizer
        path = self.folder / name
        # Without its files the library makes up an empty vocabulary instead of failing.
        if not any((path / file).is_file() for file in files):
            raise CheckpointError(
                f"{path}: got no tokenizer, expected one of the files {', '.join(files)}"
            )
        try:
            tokenizer = cls.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: cannot load {cls.__name__}: {error}") from error
        if positions is not None and tokenizer.model_max_length > positions:
            raise CheckpointError(
                f"{path}: got model_max_length {tokenizer.model_max_length}, expected at most the"
                f" text encoder's {positions} positions"
            )
        return tokenizer

    def _random(
        self, build: Callable[[], torch.nn.Module], dtype: torch.dtype, device: torch.device
    ) -> torch.nn.Module:
        with uninitialised(device, dtype):
            module = build()
        dummy.fill_random(module, device)
        return module.eval().requires_grad_(False)

    def _pretrained(
        self, name: str, cls: type, dtype: torch.dtype, device: torch.device, /, **options: Any
    ) -> torch.nn.Module:
        path = self.folder / name
        self.config(name)  # without it the library takes its own defaults
        check_weight_files(path)
        try:
            module, info = cls.from_pretrained(
                path,
                output_loading_info=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # listed in `info` and raised below, with names
                **options,
            )
        except (OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise CheckpointError(f"{path}: cannot load {cls.__name__}: {error}") from error
        raise_problems(_loading_problems(info), str(path))
        return module.to(device).eval().requires_grad_(False)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence the advice and progress bars of transformers and diffusers while a model loads:
    what matters of a load is checked strictly here. The caller's verbosity is restored."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    libraries = (diffusers_logging, transformers_logging)
    levels = [library.get_verbosity() for library in libraries]
    bars = [library.is_progress_bar_enabled() for library in libraries]
    try:
        for library in libraries:
            library.set_verbosity_error()
            library.disable_progress_bar()
        yield
    finally:
        for library, level, bar in zip(libraries, levels, bars, strict=True):
            library.set_verbosity(level)
            if bar:
                library.enable_progress_bar()


def _loading_problems(info: Mapping[str, Any]) -> list[str]:
    problems = [f"missing {name}" for name in sorted(info["missing_keys"])]
    problems += [f"unexpected {name}" for name in sorted(info["unexpected_keys"])]
    problems += [
        f"{name} has shape {list(got)}, expected {list(expected)}"
        for name, got, expected in sorted(info["mismatched_keys"])
    ]
    return problems + [str(message) for message in info.get("error_msgs") or []]


@contextmanager
def uninitialised(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Modules built inside have parameters of `dtype` on `device` with no values written: 12 B
    parameters take no time. Buffers are computed as usual."""
    from transformers.initialization import no_init_weights

    with no_init_weights(), new_tensors(device, dtype):
        yield


@contextmanager
def new_tensors(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Tensors made inside are of `dtype` on `device` unless told otherwise."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(previous)


@contextmanager
def layers_uninitialised() -> Iterator[None]:
    """As `uninitialised` for modules of torch's layers alone, as our transformers are; without the
    imports of transformers, which take a further rank seconds."""
    layers = (torch.nn.Linear, torch.nn.Embedding, torch.nn.Conv2d)
    initialise = [layer.reset_parameters for layer in layers]
    try:
        for layer in layers:
            layer.reset_parameters = lambda self: None
        yield
    finally:
        for layer, function in zip(layers, initialise, strict=True):
            layer.reset_parameters = function


def params_from_config(cls: type, config: Mapping[str, Any]) -> Any:
    """`cls` (a params dataclass) from a config.json. Unknown options raise; lists become tuples."""
    names = {f.name for f in fields(cls)}
    public = {k: v for k, v in config.items() if not k.startswith("_")}
    unknown = sorted(public.keys() - names)
    if unknown:
        raise CheckpointError(
            f"config.json: got options this model lacks: {unknown}, expected {sorted(names)}"
        )
    return cls(**checked_fields(cls, public, "transformer/config.json"))
