"""Errors for values that a user gave, and the helpers that word them."""

import difflib
import reprlib
from collections.abc import Iterable

_MAX_SHOWN = 80
_MAX_SHOWN_BITS = 256


class InvalidParameter(ValueError):
    """A value that a user gave is refused; `str()` is "name: got ..., expected ...".

    `name` is the place of the fault ("seed[3]"), `field` the parameter that it lies in ("seed").
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)  # both in args, so that it survives pickling
        self.field = name.partition("[")[0]

    def __str__(self) -> str:
        return "{}: {}".format(*self.args)


def rejected(name: str, got: object, expected: str, advice: str = "") -> InvalidParameter:
    """The error "name: got X, expected Y; advice", with X shortened. The caller raises it."""
    return InvalidParameter(
        name, f"got {show(got)}, expected {expected}" + (f"; {advice}" if advice else "")
    )


class _ShortRepr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _MAX_SHOWN
        self.maxlist = self.maxtuple = 4

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to print integers of more than 4300 digits, with a ValueError of its own.
        if x.bit_length() > _MAX_SHOWN_BITS:
            return f"an integer of {x.bit_length()} bits"
        return super().repr_int(x, level)


_short_repr = _ShortRepr()


def show(value: object) -> str:
    """`repr(value)` on one line of at most 80 characters: errors never echo a long input."""
    text = " ".join(_short_repr.repr(value).split("\n"))
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None when nothing is alike."""
    names = {text.lower(): text for text in known}
    # Difflib is quadratic; no known name comes near 64 characters.
    matches = difflib.get_close_matches(name[:64].lower(), list(names), n=1)
    return names[matches[0]] if matches else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """Advice for an unknown name: the nearest known one if any is alike, else all of them."""
    names = list(known)
    match = nearest(name, names)
    return f"did you mean {match!r}?" if match else f"accepted: {', '.join(names)}"


def check_known_keys(keys: Iterable[str], known: Iterable[str], what: str = "parameter") -> None:
    """Raise InvalidParameter for the first key that is not known, naming the nearest known one."""
    names = list(known)
    for key in keys:
        if key not in names:
            raise InvalidParameter(key[:64], f"unknown {what}; {suggestion(key, names)}")
