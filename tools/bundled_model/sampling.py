"""A plain Euler sampler over batches of captions, for the quick measurements after training."""

from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from latents import decode_patches, position_ids
from model_config import DEFAULTS, LATENT_CHANNELS, TextEncoders
from pool import token_ids


@dataclass
class Model:
    """All trained parts with their tokenizers."""

    vae: AutoencoderKL
    transformer: FluxTransformer2DModel
    text: TextEncoders
    clip_tokenizer: object
    t5_tokenizer: object
    amp: bool

    def encode(self, texts: list[str], length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Captions -> (pooled, sequence of `length` tokens)."""
        device = self.transformer.device
        clip = torch.from_numpy(token_ids(self.clip_tokenizer, texts, 77).astype("int64"))
        t5 = torch.from_numpy(token_ids(self.t5_tokenizer, texts, length).astype("int64"))
        return self.text(clip.to(device), t5.to(device))


def initial_noise(seeds: list[int], size: tuple[int, int], channels: int) -> torch.Tensor:
    """The pipeline's noise: one CPU generator an image; packed [B, tokens, C * 4]."""
    from latents import pack

    shape = (1, channels, size[0] // 8, size[1] // 8)
    parts = [torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in seeds]
    return pack(torch.cat(parts))


@torch.no_grad()
def sample(
    model: Model,
    texts: list[str],
    seeds: list[int],
    *,
    size: tuple[int, int] = (128, 128),
    steps: int = DEFAULTS["num_inference_steps"],
    cfg: float = DEFAULTS["true_cfg_scale"],
    length: int = DEFAULTS["max_sequence_length"],
    chunk: int = 256,
) -> torch.Tensor:
    """Captions and seeds -> pictures in 0..1, float32 [B, 3, height, width] on the CPU."""
    out = []
    for start in range(0, len(texts), chunk):
        part, part_seeds = texts[start : start + chunk], seeds[start : start + chunk]
        with torch.autocast(model.transformer.device.type, torch.bfloat16, enabled=model.amp):
            patches = denoise(model, part, part_seeds, size, steps, cfg, length)
        out.append(decode_patches(model.vae, patches.float(), *size).cpu())
    return torch.cat(out)


def denoise(
    model: Model,
    texts: list[str],
    seeds: list[int],
    size: tuple[int, int],
    steps: int,
    cfg: float,
    length: int,
) -> torch.Tensor:
    """Euler steps from pure noise; with cfg > 1 the empty caption is the negative one."""
    device = model.transformer.device
    x = initial_noise(seeds, size, LATENT_CHANNELS).to(device)
    ids, txt_ids = position_ids(*size, device), torch.zeros(length, 3, device=device)
    positive = model.encode(texts, length)
    negative = model.encode([""] * len(texts), length) if cfg > 1 else None

    def velocity(text: tuple[torch.Tensor, torch.Tensor], sigma: float) -> torch.Tensor:
        time = torch.full((len(texts),), sigma, device=device)
        return model.transformer(
            hidden_states=x, timestep=time, pooled_projections=text[0],
            encoder_hidden_states=text[1], img_ids=ids, txt_ids=txt_ids, return_dict=False,
        )[0].float()  # fmt: skip

    sigmas = [1 - i / steps for i in range(steps)] + [0.0]
    for sigma, following in zip(sigmas, sigmas[1:], strict=False):
        v = velocity(positive, sigma)
        if negative is not None:
            unconditional = velocity(negative, sigma)
            v = unconditional + cfg * (v - unconditional)
        x = x + (following - sigma) * v
    return x
