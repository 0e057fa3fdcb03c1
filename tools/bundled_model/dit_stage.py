"""Trains the transformer and both text encoders together, by flow matching on stored latents."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from clock import Stage
from diffusers import AutoencoderKL, FluxTransformer2DModel
from images import IconStore
from latents import encode_scenes, position_ids
from model_config import IMAGE_SIZE, TextEncoders
from pool import TEXT_LENGTH, Scenes
from torch import nn
from vae_stage import restore

PEAK_RATE = 1e-3
EMA = 0.9995
DROPOUT = 0.10  # captions replaced by the empty one
MAIN = (IMAGE_SIZE, IMAGE_SIZE)
# Share of the steps and batch divisor, for other canvases (height, width) and other text lengths.
OTHER_SIZES = {
    (256, 256): (0.015, 4),
    (192, 192): (0.012, 2),
    (64, 64): (0.012, 1),
    (96, 96): (0.008, 1),
    (128, 192): (0.006, 2),
    (192, 128): (0.006, 2),
}
OTHER_LENGTHS = {64: (0.012, 1), 128: (0.012, 2), 512: (0.010, 4)}
SCENES_PER_SIZE = 5000


@dataclass
class Batch:
    """One step's data; tokens are padded to one T5 length."""

    latents: torch.Tensor  # [B, patches, C * 4]
    clip: torch.Tensor  # [B, TEXT_LENGTH]
    t5: torch.Tensor  # [B, T5 length]
    size: tuple[int, int]


class Pool:
    """Latents of all scenes and the tokenised captions, on the device."""

    def __init__(self, path: str, empty: tuple[np.ndarray, np.ndarray], device: torch.device):
        archive = np.load(path)
        self.scene = torch.from_numpy(archive["scene"]).to(device)
        self.clip = torch.from_numpy(archive["clip"].astype(np.int16)).to(device)
        self.t5 = torch.from_numpy(archive["t5"].astype(np.int16)).to(device)
        self.empty = [torch.from_numpy(e.astype(np.int64)).to(device) for e in empty]
        self.latents: dict[tuple[int, int], torch.Tensor] = {}
        self.members: dict[tuple[int, int], torch.Tensor] = {}  # caption rows of a size
        self.rows: dict[tuple[int, int], torch.Tensor] = {}  # scene -> row of its latents
        self.device = device

    def encode(self, vae: AutoencoderKL, store: IconStore, scenes: Scenes, amp: bool) -> None:
        """Fill the latent tables: all scenes at 128x128, a sample of them at the other sizes."""
        table = torch.from_numpy(scenes.table).to(self.device)
        generator = torch.Generator().manual_seed(3)
        self.latents[MAIN] = encode_scenes(vae, store, table, MAIN, amp)
        # Plain icons always, so that every name is seen at every size.
        base_end = scenes.ranges["base"][1]
        for size in OTHER_SIZES:
            more = torch.randperm(len(table) - base_end, generator=generator)[:SCENES_PER_SIZE]
            chosen = torch.cat([torch.arange(base_end), base_end + more]).to(self.device)
            self.latents[size] = encode_scenes(vae, store, table[chosen], size, amp)
            row = torch.full((len(table),), -1, dtype=torch.long, device=self.device)
            row[chosen] = torch.arange(len(chosen), device=self.device)
            self.rows[size] = row
            self.members[size] = (row[self.scene.long()] >= 0).nonzero()[:, 0]

    def draw(self, count: int, size: tuple[int, int], length: int) -> Batch:
        """A random batch."""
        pick = torch.randint(self.draws(size), (count,), device=self.device)
        if size != MAIN:
            pick = self.members[size][pick]
        scene = self.scene[pick].long()
        row = scene if size == MAIN else self.rows[size][scene]
        clip, t5 = self.clip[pick].long(), self.t5[pick].long()
        drop = torch.rand(count, 1, device=self.device) < DROPOUT
        clip, t5 = torch.where(drop, self.empty[0], clip), torch.where(drop, self.empty[1], t5)
        t5 = torch.nn.functional.pad(t5, (0, length - t5.shape[1]))  # T5's padding id is 0
        return Batch(self.latents[size][row], clip, t5, size)

    def draws(self, size: tuple[int, int]) -> int:
        """Captions that may be drawn at a size."""
        return len(self.scene) if size == MAIN else len(self.members[size])


class VelocityLoss(nn.Module):
    """Flow matching: predict noise - x0 at x_t = (1 - t) x0 + t noise; mean squared error."""

    def __init__(self, transformer: FluxTransformer2DModel) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(
        self,
        clean: torch.Tensor,
        noise: torch.Tensor,
        time: torch.Tensor,
        pooled: torch.Tensor,
        sequence: torch.Tensor,
        img_ids: torch.Tensor,
        txt_ids: torch.Tensor,
    ) -> torch.Tensor:
        clean = clean.float()
        mixed = torch.lerp(clean, noise, time[:, None, None])
        velocity = self.transformer(
            hidden_states=mixed,
            timestep=time,
            pooled_projections=pooled,
            encoder_hidden_states=sequence,
            img_ids=img_ids,
            txt_ids=txt_ids,
            guidance=None,
            return_dict=False,
        )[0]
        return (velocity.float() - (noise - clean)).square().mean()


class DitTrainer:
    """Models, optimizer, EMA and one training step."""

    def __init__(
        self, transformer: FluxTransformer2DModel, text: TextEncoders, batch: int, amp: bool
    ) -> None:
        self.transformer, self.text, self.batch, self.amp = transformer, text, batch, amp
        self.loss = VelocityLoss(transformer)
        self.fast_loss: Callable = self.loss
        self.device = next(transformer.parameters()).device
        self.params = [*transformer.parameters(), *text.parameters()]
        self.params = [p for p in self.params if p.requires_grad]
        groups = [
            {"params": [p for p in self.params if p.ndim >= 2], "weight_decay": 0.01},
            {"params": [p for p in self.params if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=PEAK_RATE, betas=(0.9, 0.99), fused=self.device.type == "cuda"
        )
        self.ema = [p.detach().clone() for p in self.params]
        self.ids: dict[tuple[int, int], torch.Tensor] = {}

    def step(self, batch: Batch, loss: Callable, rate: float) -> torch.Tensor:
        """One update; returns the loss (not synchronised)."""
        count = len(batch.clip)
        time = self.draw_times(count)
        noise = torch.randn(batch.latents.shape, device=self.device)
        if batch.size not in self.ids:
            self.ids[batch.size] = position_ids(*batch.size, self.device)
        txt_ids = torch.zeros(batch.t5.shape[1], 3, device=self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            pooled, sequence = self.text(batch.clip, batch.t5)
            value = loss(
                batch.latents, noise, time, pooled, sequence, self.ids[batch.size], txt_ids
            )
        value.backward()
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return value.detach()

    def draw_times(self, count: int) -> torch.Tensor:
        """Logit-normal, 15 % uniform; float32 [count] in 0..1."""
        uniform = torch.rand(count, device=self.device)
        normal = torch.sigmoid(torch.randn(count, device=self.device))
        return torch.where(torch.rand(count, device=self.device) < 0.15, uniform, normal)

    def update_ema(self, step: int) -> None:
        """Exponential mean with a short memory at the start."""
        torch._foreach_lerp_(self.ema, self.params, 1 - min(EMA, (1 + step) / (10 + step)))

    def swap_ema(self) -> None:
        """Exchange the weights and their mean; called twice it changes nothing."""
        with torch.no_grad():
            for param, mean in zip(self.params, self.ema, strict=True):
                kept = param.detach().clone()
                param.copy_(mean)
                mean.copy_(kept)


def pick_shape(step: int) -> tuple[tuple[int, int], int, int]:
    """(canvas, T5 length, batch divisor) of a step: mostly 128x128 and TEXT_LENGTH."""
    roll = (step * 0.6180339887) % 1.0
    for size, (share, divisor) in OTHER_SIZES.items():
        if roll < share:
            return size, TEXT_LENGTH, divisor
        roll -= share
    for length, (share, divisor) in OTHER_LENGTHS.items():
        if roll < share:
            return MAIN, length, divisor
        roll -= share
    return MAIN, TEXT_LENGTH, 1


def train_dit(
    trainer: DitTrainer,
    pool: Pool,
    stage: Stage,
    peak: float,
    ready: Callable[[], bool],
    compiled: Callable,
    checkpoint: Callable[[], None],
    checkpoint_seconds: float = 90.0,
) -> None:
    """Train until the stage is over, leaving the mean weights in the models."""
    good = [p.clone() for p in trainer.ema]
    compiling, next_checkpoint = True, checkpoint_seconds
    smooth = torch.ones((), device=trainer.device)
    while not stage.done():
        if compiling and ready():
            compiling = False
            trainer.fast_loss = try_compile(trainer, pool, stage, compiled)
        size, length, divisor = pick_shape(stage.step)
        main = size == MAIN and length == TEXT_LENGTH
        batch = pool.draw(max(2, trainer.batch // divisor), size, length)
        loss = trainer.fast_loss if main else trainer.loss
        value = trainer.step(batch, loss, stage.learning_rate(peak))
        trainer.update_ema(stage.step)
        if main:
            smooth.lerp_(value, 0.05)
        stage.step += 1
        if stage.log_due() or stage.step == 1:
            if math.isfinite(float(smooth)):
                good = [p.clone() for p in trainer.ema]
            else:
                restore(trainer.params, trainer.ema, good, trainer.optimizer)
                smooth.fill_(1.0)
                stage.log("not finite: back to the last good weights")
            stage.log(f"loss {float(smooth):.4f} lr {stage.learning_rate(peak):.2e}")
            if stage.fraction() * (stage.end - stage.start) > next_checkpoint:
                next_checkpoint += checkpoint_seconds
                trainer.swap_ema()
                checkpoint()
                trainer.swap_ema()
    trainer.swap_ema()


def try_compile(trainer: DitTrainer, pool: Pool, stage: Stage, compiled: Callable) -> Callable:
    """The compiled loss, or the eager one when the compiler fails."""
    try:
        batch = pool.draw(trainer.batch, MAIN, TEXT_LENGTH)
        trainer.step(batch, compiled, stage.learning_rate(PEAK_RATE))
    except Exception as error:  # any compiler failure only costs speed
        stage.log(f"torch.compile failed, going on eagerly: {error!r:.300}")
        trainer.optimizer.zero_grad(set_to_none=True)
        return trainer.loss
    stage.log("compiled")
    return compiled
