"""The lossless tier's guard: a fused op runs only where it proved itself bit-equal to eager.

On its first real input a `BitExactFusionGate` runs the fused op and the eager chain, compares the
bits, and remembers the verdict. A mismatch or an exception turns the gate off for good, with one
warning; it can cost speed, never an output. Verdicts are never formed inside CUDA-graph capture
(comparing would synchronize) or under torch.compile tracing (a graph would bake the verdict in).

Every eager answer is counted with its reason, because self-verification can hide a regression.
Counters are exact while one thread runs the model, as a worker does; verdicts are thread-safe.
"""

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)

Output = torch.Tensor | Sequence[torch.Tensor]
Thunk = Callable[[], Output]

UNVERIFIED_IN_CAPTURE = "not verified before CUDA-graph capture"

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALL_GATES: "weakref.WeakSet[BitExactFusionGate]" = weakref.WeakSet()
_fast_paths_enabled = True


def tensors_equal(a: Output, b: Output) -> bool:
    """Whether two tensors, or two sequences of tensors, hold the same bits.

    Shapes and dtypes must match. Stricter than `torch.equal` on signed zeros (-0 is not +0),
    and laxer on NaN: a NaN equals any NaN in the same place.
    """
    left, right = ([x] if isinstance(x, torch.Tensor) else list(x) for x in (a, b))
    return len(left) == len(right) and all(map(_same_bits, left, right))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    bits = _BITS[a.element_size()]
    if torch.equal(a.view(bits), b.view(bits)):
        return True
    # only now the costly way: most outputs hold no NaN
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


@dataclass(frozen=True)
class GateState:
    """What the report shows of one gate.

    `status`: "verified" (fused runs), "eager" (it does not; `reason` says why) or "unseen".
    `signatures`: how many signatures are verified; 0 or 1 for a gate without signatures.
    """

    name: str
    status: str
    reason: str | None
    fused_calls: int
    eager_calls: int
    signatures: int


class BitExactFusionGate:
    """Lets one fused op through after it matched its eager chain bit for bit.

    per_signature: verify once for each `sig` (any hashable, usually shapes) instead of once.
        A mismatch on one signature still turns the whole gate off: an op that is wrong
        somewhere is not trusted elsewhere.

    A CUDA out-of-memory error is not a verdict, as it is about the load and not the op: that
    call is answered by the eager chain and the gate stays as it was.
    """

    def __init__(self, name: str, *, per_signature: bool = False) -> None:
        self.name = name
        self.per_signature = per_signature
        self._lock = threading.Lock()
        self.reset()
        _ALL_GATES.add(self)

    def reset(self) -> None:
        """Forget verdict and counters, as if newly made (for tests and for `sglang verify`)."""
        with self._lock:
            self.verified = False
            self.disabled = False
            self.verified_sigs: set[Hashable] = set()
            self.fallback_reason: str | None = None
            self.fused_calls = 0
            self.eager_calls = 0

    def reset_counters(self) -> None:
        """Start counting anew (a request's start); verdicts and a disabled gate's reason stay."""
        self.fused_calls = 0
        self.eager_calls = 0
        if not self.disabled:
            self.fallback_reason = None

    def is_verified(self, sig: Hashable = None) -> bool:
        """Whether the fused op may run now: for `sig`, or at all when not per_signature."""
        return sig in self.verified_sigs if self.per_signature else self.verified

    def can_attempt_once(self) -> bool:
        """Whether the fused op may be tried now: verified before, or free to be verified."""
        if self.disabled or not _fast_paths_enabled or torch.compiler.is_compiling():
            return False
        return self.verified or not _capturing()

    def run(self, fused_fn: Thunk, reference_fn: Thunk, *, sig: Hashable = None) -> Output:
        """The output of `fused_fn` where it is verified, else that of `reference_fn`.

        An exception of `reference_fn` propagates. `sig` is read by per_signature gates only.
        """
        if torch.compiler.is_compiling() or not _fast_paths_enabled:
            return reference_fn()
        if self.verified and (not self.per_signature or sig in self.verified_sigs):
            return self._run_verified(fused_fn, reference_fn)
        if self.disabled:
            self.eager_calls += 1
            return reference_fn()
        if _capturing():
            self.note_eager(UNVERIFIED_IN_CAPTURE)
            return reference_fn()
        return self._run_and_verify(fused_fn, reference_fn, sig)

    def accept_or_fallback(
        self, fused: Output, reference: Output, *, sig: Hashable = None
    ) -> Output:
        """Form the verdict from two outputs already at hand, and return the one to use."""
        if _capturing() or not self.can_attempt_once():
            self.eager_calls += 1
            return reference
        if not tensors_equal(fused, reference):
            self._disable(f"its output differs from the eager chain's{_at(sig)}")
            self.eager_calls += 1
            return reference
        with self._lock:
            if not self.disabled:  # another thread may have found a mismatch meanwhile
                self.verified = True
                if self.per_signature:
                    self.verified_sigs.add(sig)
        self.fused_calls += 1
        return fused

    def note_eager(self, reason: str) -> None:
        """Count a call that the site answered eagerly itself, e.g. one its predicate rejects."""
        self.eager_calls += 1
        if not self.disabled:
            self.fallback_reason = reason

    def state(self) -> GateState:
        """A snapshot for the report."""
        unseen = not self.disabled and not self.eager_calls
        return GateState(
            name=self.name,
            status="verified" if self.verified else "unseen" if unseen else "eager",
            reason=self.fallback_reason,
            fused_calls=self.fused_calls,
            eager_calls=self.eager_calls,
            signatures=len(self.verified_sigs) if self.per_signature else int(self.verified),
        )

    def _run_verified(self, fused_fn: Thunk, reference_fn: Thunk) -> Output:
        try:
            output = fused_fn()
        except torch.cuda.OutOfMemoryError as error:
            self.note_eager(_describe(error))
        except Exception as error:  # the contract: any exception means eager, and a warning
            self._disable(_describe(error))
            self.eager_calls += 1
        else:
            self.fused_calls += 1
            return output
        return reference_fn()

    def _run_and_verify(self, fused_fn: Thunk, reference_fn: Thunk, sig: Hashable) -> Output:
        reference = reference_fn()
        try:
            return self.accept_or_fallback(fused_fn(), reference, sig=sig)
        except torch.cuda.OutOfMemoryError as error:
            self.note_eager(_describe(error))
        except Exception as error:  # the contract: any exception means eager, and a warning
            self._disable(f"{_describe(error)}{_at(sig)}")
            self.eager_calls += 1
        return reference

    def _disable(self, reason: str) -> None:
        with self._lock:
            if self.disabled:
                return
            self.disabled = True
            self.verified = False
            self.verified_sigs.clear()
            self.fallback_reason = reason
        logger.warning(
            "%s runs the eager chain from now on, correctness is preserved: %s", self.name, reason
        )


def all_gates() -> list[BitExactFusionGate]:
    """Every gate alive in this process, by name."""
    return sorted(_ALL_GATES, key=lambda gate: gate.name)


def fast_paths_enabled() -> bool:
    """Whether gates may run fused ops in this process."""
    return _fast_paths_enabled


def set_fast_paths(enabled: bool) -> bool:
    """Turn every gate of the process on or off, and return the setting before.

    Off means that `run` calls the eager chain and leaves verdicts and counters alone.
    """
    global _fast_paths_enabled
    previous, _fast_paths_enabled = _fast_paths_enabled, enabled
    return previous


@contextlib.contextmanager
def fast_paths(enabled: bool) -> Iterator[None]:
    """`set_fast_paths(enabled)` for the length of a `with` block; process-wide."""
    previous = set_fast_paths(enabled)
    try:
        yield
    finally:
        set_fast_paths(previous)


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _at(sig: Hashable) -> str:
    return "" if sig is None else f" at {sig}"


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
