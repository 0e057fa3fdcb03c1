"""How the ranks of one picture share its work, and which ways of sharing a model allows.

A rank is one GPU, or one process where the device is the CPU. Everything here is decided from the
settings and the transformer's config, before anything is loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang.multimodal_gen.configs.json_config import checked_fields
from sglang.multimodal_gen.configs.model_specs import ModelSpec
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.configs.validation import InvalidParameter

MAX_RANKS = 64
CFG_BRANCHES = 2  # of true classifier-free guidance: the prompt's and the negative prompt's
# Pipeline class -> heads of its transformer where config.json leaves them out.
DEFAULT_HEADS = {"FluxPipeline": 24, "ErnieImagePipeline": 24, "GlmImagePipeline": 64}
TENSOR_PARALLEL = ("FluxPipeline",)


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Ranks along each axis; their product is the number of ranks."""

    cfg: int = 1  # 2: one half of the ranks runs the negative prompt's forward
    ulysses: int = 1  # parts that the tokens are cut into
    tp: int = 1  # parts that heads and MLP columns are cut into

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.cfg * self.ulysses * self.tp

    def __str__(self) -> str:
        axes = {"cfg": self.cfg, "ulysses": self.ulysses, "tp": self.tp}
        return "+".join(f"{name}{size}" for name, size in axes.items() if size > 1) or "single"

    @property
    def exactness(self) -> str:
        """How the pictures of this layout compare with those of one rank."""
        if self.tp > 1:
            return (
                "bounded: sums over heads and MLP columns are formed part by part, then added;"
                " byte-equal between runs and between fused and eager sites"
            )
        if self.ulysses > 1:
            return (
                "the same operations on every token, attention over whole sequences; byte-equal"
                " where a GEMM rounds alike for fewer rows, else bounded"
            )
        return "byte-equal to one rank"


@dataclass(frozen=True)
class _Heads:
    num_attention_heads: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelTraits:
    """What decides which layouts are legal for a model, and which is best."""

    pipeline_class: str
    heads: int
    runs_cfg: bool  # two forwards a step by default

    @classmethod
    def of(cls, spec: ModelSpec, transformer_config: Mapping[str, Any]) -> "ModelTraits":
        """The traits of a checkpoint, from its table row and `transformer/config.json`."""
        name = spec.pipeline_class
        given = {k: v for k, v in transformer_config.items() if k == "num_attention_heads"}
        config = _Heads(**checked_fields(_Heads, given, "transformer/config.json"))
        heads = config.num_attention_heads or DEFAULT_HEADS[name]
        return cls(pipeline_class=name, heads=heads, runs_cfg=spec.true_cfg_scale > 1)

    def allows(self, layout: ParallelLayout) -> bool:
        """Whether the model runs in this layout: the parts of an attention layer are whole heads,
        and tensor parallelism exists for some models only."""
        if layout.tp > 1 and self.pipeline_class not in TENSOR_PARALLEL:
            return False
        return layout.cfg in (1, CFG_BRANCHES) and self.heads % (layout.ulysses * layout.tp) == 0


def legal_layouts(ranks: int, traits: ModelTraits) -> list[ParallelLayout]:
    """Every layout of exactly `ranks` ranks that the model allows, the best first.

    A model with two forwards a step runs them side by side first, as they exchange one tensor a
    step. Then the tokens are cut rather than the weights: attention exchanges less than two sums
    a block, and every norm and gate is shared out as well.
    """
    found = [
        ParallelLayout(cfg=cfg, ulysses=ranks // (cfg * tp), tp=tp)
        for cfg in (1, CFG_BRANCHES)
        for tp in range(1, ranks + 1)
        if ranks % (cfg * tp) == 0
    ]
    legal = [layout for layout in found if traits.allows(layout)]
    return sorted(legal, key=lambda layout: ((layout.cfg == 1) == traits.runs_cfg, layout.tp))


def choose_layout(args: ServerArgs, traits: ModelTraits) -> ParallelLayout:
    """The best legal layout of `args.num_gpus` ranks that agrees with every degree that is given.

    Raises InvalidParameter naming the setting at fault and the layouts that are legal.
    """
    legal = legal_layouts(args.num_gpus, traits)
    if not legal:
        raise InvalidParameter("num_gpus", f"got {args.num_gpus}, expected {_counts(traits)}")
    kept = legal
    for name, degree in _asked(args):
        kept = [layout for layout in kept if degree in (None, _degree(layout, name))]
        if not kept:
            raise InvalidParameter(name, _refusal(name, args, traits, legal))
    return kept[0]


def explain(layout: ParallelLayout, traits: ModelTraits) -> str:
    """Why a layout is as it is, in one sentence for the log."""
    reasons = []
    if layout.cfg > 1:
        reasons.append("prompt and negative prompt run side by side")
        if not traits.runs_cfg:
            reasons.append("which helps only requests with a negative prompt and true_cfg_scale")
    if layout.ulysses > 1:
        reasons.append(f"the tokens are cut into {layout.ulysses} parts, attention by heads")
    if layout.tp > 1:
        reasons.append(f"heads and MLP columns are cut into {layout.tp} parts")
    return "; ".join(reasons) or "one rank does it all"


def _asked(args: ServerArgs) -> list[tuple[str, int | bool | None]]:
    names = ("tp_size", "ulysses_degree", "enable_cfg_parallel")
    return [(name, getattr(args, name)) for name in names]


def _degree(layout: ParallelLayout, name: str) -> int | bool:
    by_name = {"tp_size": layout.tp, "ulysses_degree": layout.ulysses}
    return by_name.get(name, layout.cfg > 1)


def _refusal(name: str, args: ServerArgs, traits: ModelTraits, legal: list[ParallelLayout]) -> str:
    given = {key: value for key, value in _asked(args) if value is not None and key != name}
    others = "".join(f", {key}={value}" for key, value in given.items())
    why = f"num_gpus = tp_size x ulysses_degree (x 2 with CFG-parallel); {_heads_rule(traits)}"
    if name == "tp_size" and args.tp_size > 1 and traits.pipeline_class not in TENSOR_PARALLEL:
        why = f"tensor parallelism is there for {', '.join(TENSOR_PARALLEL)}"
    layouts = ", ".join(map(str, legal))
    got = f"got {getattr(args, name)} with num_gpus={args.num_gpus}{others}"
    return f"{got}, expected one of these layouts: {layouts} ({why})"


def _heads_rule(traits: ModelTraits) -> str:
    return f"tp_size x ulysses_degree divides the {traits.heads} attention heads"


def _counts(traits: ModelTraits) -> str:
    counts = [n for n in range(1, MAX_RANKS + 1) if legal_layouts(n, traits)]
    return f"one of {', '.join(map(str, counts))} for this model ({_heads_rule(traits)})"
