"""What is alike in loading every model: where its parts go, its transformer, its scheduler."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.layers.attention import (
    make_attention,
    resolve_attention_backend,
)
from sglang.multimodal_gen.runtime.layers.layerwise_offload import offload_blocks
from sglang.multimodal_gen.runtime.loader.component_loader import (
    DTYPES,
    ComponentLoader,
    params_from_config,
)
from sglang.multimodal_gen.runtime.models.schedulers.flow_match_euler import FlowMatchEulerConfig
from sglang.multimodal_gen.runtime.pipelines.residency import offloads_text_encoders


@dataclass(frozen=True)
class Placement:
    """Devices and precisions of a model's components."""

    device: torch.device
    text_device: torch.device  # of the text encoders while no request needs them
    offloads: bool  # whether they wait in host memory
    precisions: dict[str, str]  # of "dit", "vae" and "text_encoder"

    @classmethod
    def of(cls, loader: ComponentLoader, args: ServerArgs) -> "Placement":
        """As the flags say, and the free memory where they leave it open."""
        parts, device = ("dit", "vae", "text_encoder"), loader.device
        offloads = offloads_text_encoders(args, loader)
        text_device = torch.device("cpu") if offloads else device
        precisions = {part: args.precision(part, device.type) for part in parts}
        return cls(device, text_device, offloads, precisions)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of the transformer, the VAE and the text encoders."""
        return tuple(DTYPES[name] for name in self.precisions.values())


def dit_dtype(loader: ComponentLoader, args: ServerArgs) -> torch.dtype:
    """Of the transformer and its latents."""
    return DTYPES[args.precision("dit", loader.device.type)]


def transformer(
    loader: ComponentLoader,
    args: ServerArgs,
    params_class: type,
    make: Callable[[Any, Any], torch.nn.Module],
) -> torch.nn.Module:
    """The transformer that `make` builds of its params and an attention, or this rank's part."""
    dtype = dit_dtype(loader, args)
    params = params_from_config(params_class, loader.config("transformer"))
    backend = resolve_attention_backend(args.attention_backend, loader.device, dtype)
    attention = make_attention(backend, loader.parallel.ulysses)
    if not args.dit_layerwise_offload or loader.device.type == "cpu":
        return loader.dit(lambda: make(params, attention), dtype)
    host = replace(loader, device=torch.device("cpu"))
    return offload_blocks(host.dit(lambda: make(params, attention), dtype), loader.device)


def scheduler(loader: ComponentLoader) -> FlowMatchEulerConfig:
    """The flow-match Euler scheduler's constants."""
    return FlowMatchEulerConfig.from_dict(loader.config("scheduler", "scheduler_config.json"))
