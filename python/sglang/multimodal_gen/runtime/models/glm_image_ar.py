"""Decoding of GLM-Image's autoregressive prior: our own loop around the weights of transformers.

Gives the tokens of `GlmImageForConditionalGeneration.generate` 5.24 for the same draws, with a
static key/value cache: every step runs the same operations on the same addresses and reads its
place from the device, so that there is no synchronisation in the loop. On a GPU a step is replayed
as a CUDA graph, once its logits and tokens have proven equal to the same steps without the graph.

In half precision attention over the static cache and the sums of norms and products round otherwise
than `generate`'s; the lossless reference of the graph is therefore this loop, not `generate`.

Shape legend: T prompt tokens, N tokens to name, L cache slots (at least T + N), D hidden, K key
heads, Q query heads, E head size, V vocabulary of image tokens.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from sglang.kernels.ops.diffusion.bitexact_gate import BitExactFusionGate, fast_paths_enabled
from sglang.kernels.ops.diffusion.triton.gemv import gemv
from sglang.kernels.ops.diffusion.triton.sample_token import can_use_sample_token, sample_token
from sglang.multimodal_gen.runtime.layers.attention import BACKENDS
from sglang.multimodal_gen.runtime.models.glm_image_ar_layers import (
    Rope,
    TokenCache,
    fused_step,
    norm,
    plain_step,
    prefill_layer,
    unfused_reason,
)
from sglang.multimodal_gen.runtime.models.glm_image_ar_sampling import (
    NoiseRows,
    SamplingRule,
    choose_token,
)

GLM_AR_GRAPH = BitExactFusionGate("glm_image.ar_cuda_graph", per_signature=True)
# Counts the pictures whose steps are not fused kernels on a GPU, with the reason.
GLM_AR_KERNELS = BitExactFusionGate("glm_image.ar_kernels")
PROVEN_TOKENS = 8  # steps that a graph repeats before it is trusted
QUEUED_TOKENS = 32  # a batch of steps that the host queues ahead
CACHE_STEP = 256  # slots are rounded up to it, so that prompts of like length share shapes
Grid = tuple[int, int]  # (rows, columns) of image tokens
Source = tuple[int, Grid]  # an image within a prompt: its first token's index, its grid
OnToken = Callable[[int], None]  # tokens named so far


@dataclass
class DecodeState(TokenCache):
    """Everything a step reads and writes, on the device, at fixed addresses."""

    noise: torch.Tensor | None  # float32 [N, V] exponential draws; None: greedy
    tokens: torch.Tensor  # int64 [N], the answer
    logits: torch.Tensor  # float32 [1, V], of the token named last
    step: torch.Tensor  # int64 [1], how many tokens are named
    fused: bool = False  # whether a step is `fused_step`


class GlmImageDecoder:
    """Names image tokens with the text model of a `GlmImageForConditionalGeneration`."""

    def __init__(self, model: torch.nn.Module, rule: SamplingRule) -> None:
        self.text = model.model.language_model
        self.lm_head = model.lm_head
        self.rule = rule

    @property
    def vocabulary(self) -> int:
        """How many image tokens the model tells apart: the columns of the noise."""
        return self.lm_head.out_features

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: torch.Tensor,
        grids: Sequence[Grid],
        noise: torch.Tensor | NoiseRows | None,
        on_token: OnToken = lambda count: None,
        sources: Sequence[Source] = (),
    ) -> torch.Tensor:
        """The tokens of all grids, the first grid first.

        prompt_ids int64 [1, T], with the tokens of the images that it has at `sources`; noise
        float32 [N, V] of `exponential_noise` on the same device, its rows drawn already or when
        they are needed, or None for the likeliest token each time. Returns int64 [N], N the size
        of all grids.
        """
        draw = noise.draw if isinstance(noise, NoiseRows) else lambda count: None
        rows = noise.rows if isinstance(noise, NoiseRows) else noise
        with sdpa(prompt_ids.device):
            draw(1 + PROVEN_TOKENS)
            state = self.start(prompt_ids, grids, rows, sources)
            on_token(1)
            advance = self._fastest_advance(state)
            queue = _Queue(prompt_ids.is_cuda)
            for count in range(2, len(state.tokens) + 1):
                draw(count)
                advance()
                queue.keep_short(count)
                on_token(count)
        if prompt_ids.is_cuda:
            torch.cuda.synchronize()  # a graph must outlive its replays
        return state.tokens

    def start(
        self,
        prompt_ids: torch.Tensor,
        grids: Sequence[Grid],
        noise: torch.Tensor | None,
        sources: Sequence[Source] = (),
    ) -> DecodeState:
        """Read the prompt and name the first token."""
        state = self._new_state(prompt_ids, grids, noise, sources)
        length = prompt_ids.shape[1]
        rope = (state.cos[:length], state.sin[:length], state.partner)
        x = self.text.embed_tokens(prompt_ids)
        for layer, keys, values in zip(self.text.layers, state.keys, state.values, strict=True):
            x = prefill_layer(layer, x, rope, keys, values)
        self._choose(state, self.lm_head(norm(self.text.norm, x[:, -1:])))
        return state

    def advance(self, state: DecodeState) -> None:
        """Name one more token, in place and without synchronising."""
        if state.fused:
            logits = gemv(fused_step(self.text, state), self.lm_head.weight, self.lm_head.bias)
            sample_token(logits, *_places(state), **asdict(self.rule))
        else:
            logits = self.lm_head(plain_step(self.text, state))
            state.slot.add_(1)
            self._choose(state, logits)

    def _choose(self, state: DecodeState, logits: torch.Tensor) -> None:
        state.logits.copy_(logits[:, -1])
        noise = None if state.noise is None else state.noise.index_select(0, state.step)
        token = choose_token(state.logits, self.rule, noise)
        state.tokens.index_copy_(0, state.step, token)
        state.token.copy_(token[None])
        state.step.add_(1)

    def _new_state(
        self,
        prompt_ids: torch.Tensor,
        grids: Sequence[Grid],
        noise: torch.Tensor | None,
        sources: Sequence[Source],
    ) -> DecodeState:
        device, config = prompt_ids.device, self.text.config
        prompt, count = prompt_ids.shape[1], sum(rows * columns for rows, columns in grids)
        assert noise is None or len(noise) == count, "one row of noise for each token"
        slots = -(-(prompt + count) // CACHE_STEP) * CACHE_STEP
        weight = self.text.embed_tokens.weight
        positions = token_positions(prompt, grids, sources).to(device)
        head_dim = _head_dim(config)
        tables = self.text.rotary_emb(weight, positions[:, None])
        cos, sin, partner = _whole_head(tables[0][0], tables[1][0], head_dim)
        shape = (len(self.text.layers), 1, config.num_key_value_heads, slots, head_dim)

        def cache() -> torch.Tensor:
            return torch.zeros(shape, device=device, dtype=weight.dtype)

        def integers(*size: int, value: int = 0) -> torch.Tensor:
            return torch.full(size, value, device=device, dtype=torch.int64)

        state = DecodeState(
            keys=cache(),
            values=cache(),
            cos=cos,
            sin=sin,
            partner=partner,
            columns=torch.arange(slots, device=device),
            noise=noise,
            tokens=integers(count),
            logits=torch.zeros(1, self.vocabulary, device=device),
            token=integers(1, 1),
            slot=integers(1, value=prompt),
            step=integers(1),
        )
        reason = unfused_reason(self.text, self.lm_head, state)
        logits = weight.new_empty(1, 1, self.vocabulary)
        if reason is None and not can_use_sample_token(logits, *_places(state)):
            reason = f"the sampler does not take a vocabulary of {self.vocabulary}"
        if reason is not None and device.type == "cuda":
            GLM_AR_KERNELS.note_eager(reason)
        return replace(state, fused=reason is None)

    def _fastest_advance(self, state: DecodeState) -> Callable[[], None]:
        """`advance` of this state: as a CUDA graph where that gives the same bits."""
        eager = partial(self.advance, state)
        steps = min(PROVEN_TOKENS, len(state.tokens) - 1)
        if not state.token.is_cuda or not fast_paths_enabled() or not steps:
            return eager
        signature = (
            state.keys.shape,
            state.keys.dtype,
            self.rule,
            state.noise is None,
            state.fused,
        )
        if GLM_AR_GRAPH.is_verified(signature):
            steps = 0  # only counted
        graphs: list[torch.cuda.CUDAGraph] = []

        def probe_graph() -> list[torch.Tensor]:
            graphs.append(_capture(eager))
            return _probe(state, graphs[0].replay, steps)

        GLM_AR_GRAPH.run(probe_graph, partial(_probe, state, eager, steps), sig=signature)
        proven = graphs and GLM_AR_GRAPH.is_verified(signature)
        return graphs[0].replay if proven else eager


def _places(state: DecodeState) -> tuple[torch.Tensor | None, ...]:
    """What `sample_token` reads and writes, in its order."""
    return state.noise, state.logits, state.tokens, state.token, state.step, state.slot


def sdpa(device: torch.device) -> AbstractContextManager[None]:
    """The one backend of attention that takes a mask, for the `with` block around the steps."""
    return sdpa_kernel(BACKENDS["efficient" if device.type == "cuda" else "flash"])


class _Queue:
    """Keeps the host at most two batches of tokens ahead of a GPU, so that what it announces is
    nearly true. It waits for the batch before the last: the GPU never runs out of work."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.before: torch.cuda.Event | None = None

    def keep_short(self, count: int) -> None:
        """Token number `count` was queued."""
        if not self.on_gpu or count % QUEUED_TOKENS:
            return
        event = torch.cuda.Event()
        event.record()
        if self.before is not None:
            self.before.synchronize()
        self.before = event


def _capture(advance: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        advance()
    return graph


def _probe(state: DecodeState, advance: Callable[[], None], steps: int) -> list[torch.Tensor]:
    """The logits and tokens of the next steps; the state is then where it was."""
    place = (state.token, state.slot, state.step, state.logits)
    saved = [tensor.clone() for tensor in place]
    seen = []
    for _ in range(steps):
        advance()
        seen += [state.logits.clone(), state.token.clone()]
    for tensor, value in zip(place, saved, strict=True):
        tensor.copy_(value)
    return seen


def _whole_head(cos: torch.Tensor, sin: torch.Tensor, head_dim: int) -> Rope:
    """Tables [S, R] of the R channels that turn, half against half -> tables of a whole head."""
    turning = cos.shape[-1]
    still = (0, head_dim - turning)
    partner = torch.arange(head_dim, device=cos.device)
    partner[:turning] = partner[:turning].roll(turning // 2)
    signed = torch.cat([-sin[:, : turning // 2], sin[:, turning // 2 :]], dim=-1)
    return F.pad(cos, still, value=1.0), F.pad(signed, still), partner


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def token_positions(
    prompt_tokens: int, grids: Sequence[Grid], sources: Sequence[Source] = ()
) -> torch.Tensor:
    """int64 [3, T + N] positions (time, row, column) of the prompt and of each grid's tokens.

    A grid's tokens share one time and count rows and columns from it; what comes after it begins
    after the longer side. `sources` are the images within the prompt.
    """
    parts, done, place = [], 0, 0
    for first, (rows, columns) in sources:
        parts.append(_text_positions(place, first - done))
        place += first - done
        parts.append(_grid_positions(place, rows, columns))
        place += max(rows, columns)
        done = first + rows * columns
    parts.append(_text_positions(place, prompt_tokens - done))
    place += prompt_tokens - done
    for rows, columns in grids:
        parts.append(_grid_positions(place, rows, columns))
        place += max(rows, columns)
    return torch.cat(parts, dim=1)


def _text_positions(start: int, count: int) -> torch.Tensor:
    return torch.arange(start, start + count).expand(3, -1)


def _grid_positions(start: int, rows: int, columns: int) -> torch.Tensor:
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return start + torch.stack([torch.zeros_like(row), row, column]).flatten(1)
