"""Decoding of GLM-Image's autoregressive prior: our own loop around the weights of transformers.

Gives the tokens of `GlmImageForConditionalGeneration.generate` 5.24 for the same draws, with a
static key/value cache: every step runs the same operations on the same addresses and reads its
place from the device, so that there is no synchronisation in the loop. On a GPU a step is replayed
as a CUDA graph, once its logits and tokens have proven equal to the same steps without the graph.

Attention over the static cache is masked and so may round otherwise than over a growing one, and
norms sum in another order; in half precision the lossless reference of the graph is therefore this
loop, not `generate`.

Shape legend: T prompt tokens, N tokens to name, L cache slots (at least T + N), D hidden, K key
heads, Q query heads, E head size, V vocabulary of image tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from sglang.kernels.ops.diffusion.bitexact_gate import BitExactFusionGate, fast_paths_enabled
from sglang.multimodal_gen.runtime.layers.attention import BACKENDS

GLM_AR_GRAPH = BitExactFusionGate("glm_image.ar_cuda_graph", per_signature=True)
PROVEN_TOKENS = 8  # steps that a graph repeats before it is trusted
CACHE_STEP = 256  # slots are rounded up to it, so that prompts of like length share shapes
Rope = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # cos, sin, partner of DecodeState
Grid = tuple[int, int]  # (rows, columns) of image tokens
OnToken = Callable[[int], None]  # tokens named so far

# What of a generation_config.json acts here, and what is inert when a length is given.
_READ = {"do_sample", "temperature", "top_k", "top_p", "eos_token_id"}
_INERT = {"pad_token_id", "bos_token_id", "max_length", "max_new_tokens", "use_cache"}
_INERT |= {"transformers_version", "_from_model_config"}
_NEUTRAL = {"repetition_penalty": 1.0, "typical_p": 1.0, "num_beams": 1, "num_return_sequences": 1}


@dataclass(frozen=True)
class SamplingRule:
    """How a token is chosen; the defaults are those of `generate` with `do_sample=True`."""

    temperature: float = 1.0
    top_k: int = 50  # 0: all
    top_p: float = 1.0

    @classmethod
    def from_generation_config(cls, config: Any) -> "SamplingRule":
        """Of a transformers GenerationConfig. Raises ValueError for a setting that would change
        the tokens and that this loop lacks."""
        acting = {k: v for k, v in config.to_diff_dict().items() if v not in (None, False)}
        unknown = sorted(
            name
            for name, value in acting.items()
            if name not in _READ | _INERT and value != _NEUTRAL.get(name)
        )
        if unknown:
            raise ValueError(
                f"generation_config.json: got {unknown}, which the prior's sampler lacks;"
                f" expected only {sorted(_READ)}; remove them from the file"
            )
        given = {name: getattr(config, name) for name in ("temperature", "top_k", "top_p")}
        return cls(**{name: value for name, value in given.items() if value is not None})


@dataclass
class DecodeState:
    """Everything a step reads and writes, on the device, at fixed addresses."""

    keys: torch.Tensor  # [layers, 1, K, L, E]; slots not written yet are 0 and masked
    values: torch.Tensor
    cos: torch.Tensor  # [T + N, E], 1 where a channel does not turn
    sin: torch.Tensor  # [T + N, E], signed, 0 where a channel does not turn
    partner: torch.Tensor  # int64 [E], the channel that each is rotated with
    columns: torch.Tensor  # int64 [L]: 0, 1, ...
    noise: torch.Tensor | None  # float32 [N, V] exponential draws; None: greedy
    tokens: torch.Tensor  # int64 [N], the answer
    logits: torch.Tensor  # float32 [1, V], of the token named last
    token: torch.Tensor  # int64 [1, 1], named last
    slot: torch.Tensor  # int64 [1], where the next key goes
    step: torch.Tensor  # int64 [1], how many tokens are named


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
        noise: torch.Tensor | None,
        on_token: OnToken = lambda count: None,
    ) -> torch.Tensor:
        """The tokens of all grids, the first grid first.

        prompt_ids int64 [1, T]; noise float32 [N, V] of `exponential_noise` on the same device, or
        None for the likeliest token each time. Returns int64 [N], N the size of all grids.
        """
        with sdpa_kernel(BACKENDS[self._backend(prompt_ids.device)]):
            state = self.start(prompt_ids, grids, noise)
            on_token(1)
            advance = self._fastest_advance(state)
            for count in range(2, len(state.tokens) + 1):
                advance()
                on_token(count)
        if prompt_ids.is_cuda:
            torch.cuda.synchronize()  # a graph must outlive its replays
        return state.tokens

    def start(
        self, prompt_ids: torch.Tensor, grids: Sequence[Grid], noise: torch.Tensor | None
    ) -> DecodeState:
        """Read the prompt and name the first token."""
        state = self._new_state(prompt_ids, grids, noise)
        length = prompt_ids.shape[1]
        rope = (state.cos[:length], state.sin[:length], state.partner)
        x = self.text.embed_tokens(prompt_ids)
        for layer, keys, values in zip(self.text.layers, state.keys, state.values, strict=True):
            x = self._prefill_layer(layer, x, rope, keys, values)
        self._choose(state, x[:, -1:])
        return state

    def advance(self, state: DecodeState) -> None:
        """Name one more token, in place and without synchronising."""
        cos, sin = (table.index_select(0, state.slot) for table in (state.cos, state.sin))
        rope = (cos, sin, state.partner)
        x = self.text.embed_tokens(state.token)
        bias = torch.where(state.columns <= state.slot, 0.0, -torch.inf).to(x.dtype)
        for layer, keys, values in zip(self.text.layers, state.keys, state.values, strict=True):
            x = self._decode_layer(layer, x, rope, keys, values, state.slot, bias)
        state.slot.add_(1)
        self._choose(state, x)

    def _prefill_layer(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        rope: Rope,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        q, k, v = _project(layer, x, rope)
        length = x.shape[1]
        keys[:, :, :length] = k
        values[:, :, :length] = v
        groups = q.shape[1] // k.shape[1]
        k, v = (y.repeat_interleave(groups, dim=1) for y in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        return _finish(layer, x, out)

    def _decode_layer(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        rope: Rope,
        keys: torch.Tensor,
        values: torch.Tensor,
        slot: torch.Tensor,
        bias: torch.Tensor,
    ) -> torch.Tensor:
        q, k, v = _project(layer, x, rope)
        keys.index_copy_(2, slot, k)
        values.index_copy_(2, slot, v)
        # The query heads of one key head are rows of one attention: [1, K, Q / K, E].
        grouped = q.view(1, k.shape[1], -1, q.shape[-1])
        rows = bias.expand(1, 1, grouped.shape[2], -1)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=rows)
        return _finish(layer, x, out.reshape(q.shape))

    def _choose(self, state: DecodeState, x: torch.Tensor) -> None:
        state.logits.copy_(self.lm_head(_norm(self.text.norm, x))[:, -1])
        noise = None if state.noise is None else state.noise.index_select(0, state.step)
        token = choose_token(state.logits, self.rule, noise)
        state.tokens.index_copy_(0, state.step, token)
        state.token.copy_(token[None])
        state.step.add_(1)

    def _new_state(
        self, prompt_ids: torch.Tensor, grids: Sequence[Grid], noise: torch.Tensor | None
    ) -> DecodeState:
        device, config = prompt_ids.device, self.text.config
        prompt, count = prompt_ids.shape[1], sum(rows * columns for rows, columns in grids)
        assert noise is None or len(noise) == count, "one row of noise for each token"
        slots = -(-(prompt + count) // CACHE_STEP) * CACHE_STEP
        weight = self.text.embed_tokens.weight
        positions = token_positions(prompt, grids).to(device)
        head_dim = _head_dim(config)
        tables = self.text.rotary_emb(weight, positions[:, None])
        cos, sin, partner = _whole_head(tables[0][0], tables[1][0], head_dim)
        shape = (len(self.text.layers), 1, config.num_key_value_heads, slots, head_dim)

        def cache() -> torch.Tensor:
            return torch.zeros(shape, device=device, dtype=weight.dtype)

        def integers(*size: int, value: int = 0) -> torch.Tensor:
            return torch.full(size, value, device=device, dtype=torch.int64)

        return DecodeState(
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

    def _fastest_advance(self, state: DecodeState) -> Callable[[], None]:
        """`advance` of this state: as a CUDA graph where that gives the same bits."""
        eager = partial(self.advance, state)
        steps = min(PROVEN_TOKENS, len(state.tokens) - 1)
        if not state.token.is_cuda or not fast_paths_enabled() or not steps:
            return eager
        graphs: list[torch.cuda.CUDAGraph] = []

        def probe_graph() -> list[torch.Tensor]:
            graphs.append(_capture(eager))
            return _probe(state, graphs[0].replay, steps)

        signature = (state.keys.shape, state.keys.dtype, self.rule, state.noise is None)
        GLM_AR_GRAPH.run(probe_graph, partial(_probe, state, eager, steps), sig=signature)
        proven = graphs and GLM_AR_GRAPH.is_verified(signature)
        return graphs[0].replay if proven else eager

    @staticmethod
    def _backend(device: torch.device) -> str:
        """The one that takes a mask."""
        return "efficient" if device.type == "cuda" else "flash"


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


def _project(
    layer: torch.nn.Module, x: torch.Tensor, rope: Rope
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated queries [1, Q, S, E], rotated keys and values [1, K, S, E] of x [1, S, D]."""
    attn = layer.self_attn
    x = _norm(layer.input_layernorm, x)
    q, k, v = (
        projection(x).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)
        for projection in (attn.q_proj, attn.k_proj, attn.v_proj)
    )
    return _rotate(q, rope), _rotate(k, rope), v


def _finish(layer: torch.nn.Module, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """The rest of a layer after attention; x [1, S, D] is the residual, attended [1, Q, S, E]."""
    out = layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
    x = x + _norm(layer.post_self_attn_layernorm, out)
    out = layer.mlp(_norm(layer.post_attention_layernorm, x))
    return x + _norm(layer.post_mlp_layernorm, out)


def _norm(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """RMSNorm in float32, rounded to the model's dtype before the weight, as the reference."""
    return norm.weight * F.rms_norm(x, x.shape[-1:], None, norm.variance_epsilon)


def _rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotate x [1, H, S, E] in the model's dtype; channels that do not turn stay as they are."""
    cos, sin, partner = rope
    return x * cos + x.index_select(-1, partner) * sin


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


def token_positions(prompt_tokens: int, grids: Sequence[Grid]) -> torch.Tensor:
    """int64 [3, T + N] positions (time, row, column) of the prompt and of each grid's tokens.

    A grid's tokens share one time and count rows and columns from it; the next grid begins after
    the longer side.
    """
    text = torch.arange(prompt_tokens).expand(3, -1)
    parts, start = [text], prompt_tokens
    for rows, columns in grids:
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        parts.append(start + torch.stack([torch.zeros_like(row), row, column]).flatten(1))
        start += max(rows, columns)
    return torch.cat(parts, dim=1)


def exponential_noise(generator: torch.Generator, count: int, vocabulary: int) -> torch.Tensor:
    """float32 [count, vocabulary] on the generator's device, drawn row by row.

    `torch.multinomial` of one sample is the argmax of probability / noise over such a row, so a
    seed drawn here on the CPU means the same tokens on every machine.
    """
    noise = torch.empty(count, vocabulary, device=generator.device)
    for row in noise:
        row.exponential_(generator=generator)
    return noise


def choose_token(
    logits: torch.Tensor, rule: SamplingRule, noise: torch.Tensor | None
) -> torch.Tensor:
    """int64 [1] token of float32 logits [1, V]: the likeliest, or drawn with noise [1, V]."""
    if noise is None:
        return logits.argmax(dim=-1)
    probabilities = torch.softmax(_filter(logits, rule), dim=-1)
    return (probabilities / noise).argmax(dim=-1)


def _filter(logits: torch.Tensor, rule: SamplingRule) -> torch.Tensor:
    if rule.temperature != 1.0:
        logits = logits / rule.temperature
    if rule.top_k:
        least = torch.topk(logits, min(rule.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return _keep_top_p(logits, rule.top_p) if rule.top_p < 1.0 else logits


def _keep_top_p(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    ascending, order = torch.sort(logits)
    # Two equal rows: a scan of one row alone is not deterministic on CUDA.
    cumulative = ascending.softmax(dim=-1).expand(2, -1).cumsum(dim=-1)[:1]
    removed = cumulative <= 1 - top_p
    removed[:, -1] = False
    return logits.masked_fill(removed.scatter(1, order, removed), -torch.inf)
