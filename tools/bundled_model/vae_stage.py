"""Trains the VAE and measures its latents."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from clock import Stage
from diffusers import AutoencoderKL
from images import IconStore, augmented, compose
from torch import nn

PEAK_RATE = 1.5e-3
KL_WEIGHT = 3e-4
EMA = 0.998
# (canvas size, share of the steps, batch divisor); 128 is the main one.
OTHER_SIZES = [(256, 0.05, 4), (192, 0.02, 2), (64, 0.02, 1)]


class VaeLoss(nn.Module):
    """Images in -1..1 and standard normal noise -> the training loss and the pixel MSE."""

    def __init__(self, vae: AutoencoderKL) -> None:
        super().__init__()
        self.encoder, self.decoder = vae.encoder, vae.decoder

    def forward(self, images: torch.Tensor, noise: torch.Tensor) -> tuple:
        mean, log_variance = self.encoder(images).float().chunk(2, dim=1)
        log_variance = log_variance.clamp(-20.0, 10.0)
        latents = mean + torch.exp(0.5 * log_variance) * noise
        made = self.decoder(latents).float()
        error = made - images
        mse = error.square().mean()
        edges = error.diff(dim=2).abs().mean() + error.diff(dim=3).abs().mean()
        blocks = F.avg_pool2d(error, 8).abs().mean()
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        return error.abs().mean() + 2 * mse + 0.5 * edges + blocks + KL_WEIGHT * kl, mse.detach()


class VaeTrainer:
    """Optimizer, EMA and one training step."""

    def __init__(self, vae: AutoencoderKL, batch: int, amp: bool) -> None:
        self.vae, self.batch, self.amp = vae, batch, amp
        self.loss = VaeLoss(vae)
        self.fast_loss: Callable = self.loss
        self.device = next(vae.parameters()).device
        self.params = [p for p in vae.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.params, lr=PEAK_RATE, betas=(0.9, 0.99), weight_decay=1e-3,
            fused=self.device.type == "cuda",
        )  # fmt: skip
        self.ema = [p.detach().clone() for p in self.params]

    def step(self, images: torch.Tensor, loss: Callable, rate: float) -> torch.Tensor:
        """One update; returns the pixel MSE (not synchronised)."""
        images = images.contiguous(memory_format=torch.channels_last)
        channels = self.vae.config.latent_channels
        shape = (len(images), channels, images.shape[2] // 8, images.shape[3] // 8)
        noise = torch.randn(shape, device=self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            value, mse = loss(images, noise)
        value.backward()
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return mse

    def update_ema(self, step: int) -> None:
        """Exponential mean with a short memory at the start."""
        decay = min(EMA, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.ema, self.params, 1 - decay)

    def load_ema(self) -> None:
        """Put the mean weights into the model."""
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.ema)


def train_vae(
    trainer: VaeTrainer,
    store: IconStore,
    stage: Stage,
    ready: Callable[[], bool],
    compiled: Callable,
) -> None:
    """Train until the stage is over; switches to the compiled loss once its kernels are cached."""
    good = [p.clone() for p in trainer.ema]
    compiling = True
    while not stage.done():
        if compiling and ready():
            compiling = False
            trainer.fast_loss = try_compile(trainer, stage, store, compiled)
        size, divisor = pick_size(stage.step)
        images = augmented(store, max(4, trainer.batch // divisor), size)
        loss = trainer.fast_loss if size == 128 else trainer.loss
        mse = trainer.step(images, loss, stage.learning_rate(PEAK_RATE))
        trainer.update_ema(stage.step)
        stage.step += 1
        if stage.log_due() or stage.step == 1:
            value = float(mse)
            if not math.isfinite(value):
                restore(trainer.params, trainer.ema, good, trainer.optimizer)
            else:
                good = [p.clone() for p in trainer.ema]
            stage.log(f"psnr {psnr(value):.2f} dB (one batch)")
    trainer.load_ema()


def try_compile(
    trainer: VaeTrainer, stage: Stage, store: IconStore, compiled: Callable
) -> Callable:
    """The compiled loss, or the eager one when the compiler fails."""
    try:
        trainer.step(augmented(store, trainer.batch, 128), compiled, stage.learning_rate(PEAK_RATE))
    except Exception as error:  # any compiler failure only costs speed
        stage.log(f"torch.compile failed, going on eagerly: {error!r:.300}")
        trainer.optimizer.zero_grad(set_to_none=True)
        return trainer.loss
    stage.log("compiled")
    return compiled


def restore(params: list, ema: list, good: list, optimizer: torch.optim.Optimizer) -> None:
    """Back to the last finite weights, with a fresh optimizer state."""
    with torch.no_grad():
        torch._foreach_copy_(params, good)
        torch._foreach_copy_(ema, good)
    optimizer.state.clear()


def pick_size(step: int) -> tuple[int, int]:
    """Canvas size and batch divisor of a step: mostly 128."""
    roll = (step * 0.6180339887) % 1.0
    for size, share, divisor in OTHER_SIZES:
        if roll < share:
            return size, divisor
        roll -= share
    return 128, 1


def psnr(mse: float) -> float:
    """Decibels of an MSE over pixels in -1..1."""
    return 10 * math.log10(4 / max(mse, 1e-12)) if math.isfinite(mse) else float("nan")


@torch.no_grad()
def encode(vae: AutoencoderKL, images: torch.Tensor) -> torch.Tensor:
    """Raw latent means, float32."""
    return vae.encoder(images).float().chunk(2, dim=1)[0]


@torch.no_grad()
def measure(vae: AutoencoderKL, store: IconStore, scenes: torch.Tensor, amp: bool) -> dict:
    """Reconstruction PSNR (mean over images, clipped pixels), the latents' mean and deviation."""
    values, total, squares, count = [], 0.0, 0.0, 0
    for rows in scenes.split(256):
        images = compose(store, rows, 128, 128)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=amp):
            latents = encode(vae, images)
            made = vae.decoder(latents).float().clamp(-1, 1)
        mse = (made - images).square().mean(dim=(1, 2, 3))
        values.append(10 * torch.log10(4 / mse.clamp_min(1e-12)))
        total, squares = total + float(latents.sum()), squares + float(latents.square().sum())
        count += latents.numel()
    mean = total / count
    return {
        "psnr": float(torch.cat(values).mean()),
        "psnr_worst_percent": float(torch.cat(values).quantile(0.01)),
        "shift": mean,
        "scale": 1 / math.sqrt(max(1e-12, squares / count - mean * mean)),
    }


def finish(vae: AutoencoderKL, figures: dict, path: Path) -> None:
    """Write shift and scale into the config, and the weights to `path`."""
    from safetensors.torch import save_file

    vae.register_to_config(
        shift_factor=round(figures["shift"], 4), scaling_factor=round(figures["scale"], 4)
    )
    save_file({k: v.contiguous() for k, v in vae.state_dict().items()}, path)
