"""GPU time of every memory-bound fused op in several launches, beside a copy of the same bytes.

python benchmark/kernels/bandwidth_sweep.py --json sweep.json

The times choose `LAUNCH` and `TILE` of the ops; a launch never decides about a bit, and `equal`
says so against the eager chain. Cold L2, bfloat16, 1024x1024 shapes. Percentages are of the copy
ceiling of this process (a gigabyte); the same-bytes copy is aten's at the size of the op, which
says how much of that ceiling a launch of this length can reach at all. `*` marks the fastest
launch, `now` the one that the product has.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benchmark"), str(Path(__file__).parent)]

import torch  # noqa: E402
from sweep_cases import Case, Launch, cases  # noqa: E402
from timing import copy_ceiling_tbps, time_us  # noqa: E402

from sglang.kernels.ops.diffusion.bitexact_gate import tensors_equal  # noqa: E402
from sglang.kernels.ops.diffusion.triton.row_launch import RowLaunch  # noqa: E402

COMPILERS = 16
BUDGET_S = 70.0  # of the whole run; what is left then is named as not timed


@dataclass(frozen=True)
class Timing:
    """One launch of one op at one shape; `us` and `equal` None where `note` says why."""

    op: str
    shape: tuple[int, ...]
    launch: str
    current: bool
    us: float | None
    pct_copy: float | None
    equal: bool | None
    note: str = ""


def describe(how: Launch) -> str:
    """A launch on one line: its fields but the false ones."""
    return " ".join(f"{k}={v}" for k, v in asdict_of(how).items() if v is not False)


def asdict_of(how: Launch) -> dict[str, object]:
    return how._asdict() if hasattr(how, "_asdict") else asdict(how)


def compile_launch(case: Case, how: Launch) -> None:
    """Run a launch once; its failure is reported where it is timed."""
    with torch.inference_mode():
        case.launch(how)


def compiled_form(case: Case, how: Launch) -> tuple[object, ...]:
    """What a launch's machine code depends on: not the rows, nor how many programs share them."""
    code = how._replace(per_sm=0) if isinstance(how, RowLaunch) else how
    return case.op, case.shape[2:], code


def compile_all(all_cases: Sequence[Case], seconds: float) -> None:
    """Compile each form once, in threads, for `seconds` at most."""
    pool = ThreadPoolExecutor(COMPILERS)
    forms = {compiled_form(c, how): (c, how) for c in all_cases for how in c.launches}
    futures = [pool.submit(compile_launch, *launch) for launch in forms.values()]
    wait(futures, timeout=seconds)
    pool.shutdown(wait=False, cancel_futures=True)
    torch.cuda.synchronize()


def percent(moved: int, us: float) -> float:
    return moved / us / 1e4 / copy_ceiling_tbps()


def measure(case: Case, how: Launch, expected: object, deadline: float) -> Timing:
    """Time one launch; an error becomes a note."""
    place = (case.op, case.shape, describe(how), how == case.current)
    if time.monotonic() > deadline:
        return Timing(*place, None, None, None, "not timed: the budget is spent")
    try:
        equal = tensors_equal(expected, case.launch(how))
        us = time_us(lambda: case.launch(how), iterations=80)
    except Exception as error:  # shown in the table, and the other launches still run
        return Timing(*place, None, None, None, f"{type(error).__name__}: {error}"[:90])
    return Timing(*place, us, percent(case.moved, us), equal)


def copy_us(moved: int) -> float:
    """Aten's copy with as many bytes read and written as the op moves."""
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return time_us(lambda: target.copy_(source), iterations=80)


def report(case: Case, deadline: float) -> list[Timing]:
    """Print one op's table."""
    copied = copy_us(case.moved)
    shape = "x".join(map(str, case.shape))
    print(f"{case.op} {shape}: {case.moved / 1e6:.0f} MB, a copy of as much {copied:.1f} us "
          f"= {percent(case.moved, copied):.0f} %", flush=True)  # fmt: skip
    expected = case.reference()
    timings = [measure(case, how, expected, deadline) for how in case.launches]
    best = min((t.us for t in timings if t.us is not None), default=None)
    for timing in timings:
        print("  " + line(timing, copied, best), flush=True)
    copy = Timing(case.op, case.shape, "copy", False, copied, percent(case.moved, copied), None)
    return [copy, *timings]


def line(timing: Timing, copied: float, best: float | None) -> str:
    marks = f"{'*' if timing.us == best else ' '} {'now' if timing.current else '':3}"
    if timing.us is None:
        return f"{marks}  {timing.launch}: {timing.note}"
    equal = "equal" if timing.equal else "DIFFERS"
    return (f"{marks} {timing.us:6.1f} us {timing.pct_copy:4.0f} % of the ceiling "
            f"{copied / timing.us * 100:4.0f} % of the copy  {equal:8}{timing.launch}")  # fmt: skip


def built(failures: list[str]) -> list[Case]:
    """The cases, those that can be built; the others are named in `failures`."""
    made = []
    for make in cases():
        try:
            made.append(make())
        except Exception:  # one op that cannot be set up leaves the others
            failures.append(traceback.format_exc(limit=3))
    return made


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the timings")
    parser.add_argument("--op", default="", help="only ops whose name has this text")
    arguments = parser.parse_args()
    begin, failures, timings = time.monotonic(), [], []
    chosen = sorted((c for c in built(failures) if arguments.op in c.op), key=lambda c: c.op)
    compile_all(chosen, BUDGET_S / 2)
    print(f"{torch.cuda.get_device_name()}, copy {copy_ceiling_tbps():.2f} TB/s, compiled in "
          f"{time.monotonic() - begin:.0f} s", flush=True)  # fmt: skip
    for case in chosen:
        try:
            timings += report(case, begin + BUDGET_S)
        except Exception:  # the other ops still run
            failures.append(f"{case.op}: {traceback.format_exc(limit=3)}")
    print("\n".join(failures), end="")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(t) for t in timings], indent=1) + "\n")


if __name__ == "__main__":
    main()
