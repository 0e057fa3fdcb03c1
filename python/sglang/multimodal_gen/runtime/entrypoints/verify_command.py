"""`sglang verify`: every fused site against its eager chain, on this machine, on this model."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.server_args import COMPILING, ServerArgs
from sglang.multimodal_gen.configs.validation import InvalidParameter, rejected
from sglang.multimodal_gen.runtime.entrypoints.cli_flags import FlagParser
from sglang.multimodal_gen.runtime.entrypoints.console import configure_logging, print_error
from sglang.multimodal_gen.runtime.entrypoints.inspection import (
    add_json_flag,
    checked_settings,
    show_result,
)

if TYPE_CHECKING:
    import torch

    from sglang.multimodal_gen.runtime.entrypoints.diff_generator import DiffGenerator
    from sglang.multimodal_gen.runtime.layers.fused_site import SiteRecord

PROG = "sglang verify"
REQUEST_DEFAULTS = {"prompt": "a red apple", "num_inference_steps": 1}
TIMED_CALLS = 20
TABLE_WIDTH = 140


@dataclass(frozen=True)
class SiteRow:
    """One kind of site: an op at one input shape. Times: median microseconds of one call."""

    op: str
    shape: str
    sites: int  # calls in one denoising step
    status: str  # verified | eager | mountable
    reason: str
    fused_us: float | None
    eager_us: float | None
    failed: bool  # the kernel takes this input, yet the site does not run it


def run(words: Sequence[str]) -> int:
    """Print the table of sites. Returns 1 when a site that should be fused is not, else 0;
    exits with 2 for flags that are refused."""
    parser = build_parser()
    given = parser.parse(words)
    try:
        args, request = checked_settings(given, REQUEST_DEFAULTS)
        for name in COMPILING:
            if getattr(args, name):
                raise rejected(name, True, "False: compiled, every site steps aside")
    except InvalidParameter as error:
        parser.error(str(error))
    configure_logging(args.log_level)
    try:
        rows, has_gpu = verify(args, request)
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        print_error(PROG, error)
        return 2 if isinstance(error, ValueError) else 1
    table = [asdict(row) for row in rows]
    show_result(given.json, table, lambda: _print_rows(rows, has_gpu))
    return int(any(row.failed for row in rows))


def build_parser() -> FlagParser:
    """The flags of `sglang verify`: those of the process and of the picture, and --json."""
    parser = FlagParser(PROG, "Compare every fused site of a model with its eager chain.")
    parser.add_settings(ServerArgs, "process")
    parser.add_settings(SamplingParams, "picture that the sites are met in", REQUEST_DEFAULTS)
    add_json_flag(parser, "write the table as JSON")
    return parser


def verify(args: ServerArgs, request: dict[str, Any]) -> tuple[list[SiteRow], bool]:
    """Run one denoising step and judge every site it met. Returns (rows, on a GPU or not)."""
    from sglang.kernels.ops.diffusion.bitexact_gate import all_gates
    from sglang.multimodal_gen.runtime.entrypoints.diff_generator import DiffGenerator
    from sglang.multimodal_gen.runtime.layers.fused_site import observe_sites

    with DiffGenerator(args) as generator:
        for gate in all_gates():
            gate.reset()
        with observe_sites() as observed:
            generator.generate(sampling_params_kwargs=request)
        device = generator.device
        rows = [_exact_row(record, device) for record in observed.values()]
        rows += _high_rows(generator)
    return sorted(rows, key=lambda row: (row.op, row.shape)), device.type == "cuda"


def _exact_row(record: "SiteRecord", device: "torch.device") -> SiteRow:
    from sglang.multimodal_gen.runtime.layers.fused_site import rejection

    verified = record.fused is not None and record.gate.is_verified(record.signature)
    reason = "" if verified else record.gate.fallback_reason or ""
    if record.fused is None:
        reason = rejection(record.args)
    times = (None, None)
    if verified:
        times = tuple(_call_us(f, record.args) for f in (record.fused, record.reference))
    return SiteRow(
        op=record.gate.name,
        shape="x".join(map(str, record.args[0].shape)),
        sites=record.calls,
        status="verified" if verified else "eager",
        reason=reason,
        fused_us=times[0],
        eager_us=times[1],
        failed=record.fused is not None and not verified,
    )


def _high_rows(generator: "DiffGenerator") -> list[SiteRow]:
    from sglang.multimodal_gen.runtime.pipelines.stages.denoising import mounted_tier

    with mounted_tier(generator.transformer, "high") as mounted:
        return [
            SiteRow(
                op=name,
                shape="quality=high",
                sites=0,
                status="eager" if reason else "mountable",
                reason=reason or "",
                fused_us=None,
                eager_us=None,
                failed=False,
            )
            for name, reason in mounted.items()
        ]


def _call_us(fn: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """Median microseconds of one call as a caller sees it: launch and run."""
    import torch

    samples = []
    with torch.inference_mode():
        for _ in range(TIMED_CALLS + 3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            fn(*args)
            torch.cuda.synchronize()
            samples.append(time.perf_counter() - start)
    return 1e6 * statistics.median(samples[3:])


def _print_rows(rows: list[SiteRow], has_gpu: bool) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    console = Console()
    if not console.is_terminal:
        console.width = TABLE_WIDTH  # a pipe has no width of its own, and names must not be cut
    if not has_gpu:
        console.print("No CUDA GPU here: every site runs its eager chain, which is the reference.")
    table = Table(
        Column("op", no_wrap=True), "shape", "sites", "status", "fused us", "eager us", "reason"
    )
    for row in rows:
        times = ("" if us is None else f"{us:.1f}" for us in (row.fused_us, row.eager_us))
        table.add_row(row.op, row.shape, str(row.sites or ""), row.status, *times, row.reason)
    console.print(table)
