"""Rules: each checks one kind of value, once, for Python, the command line and HTTP alike.

`check(field, value)` returns the value in its normal form or raises InvalidParameter.
`from_text(text)` reads a command line word; a word that it cannot read is returned as it is, so
that `check` words the only error message there is.
"""

import math
import numbers
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sglang.multimodal_gen.configs.validation import nearest, rejected

MAX_COMPONENT_BYTES = 255  # what file systems allow
MAX_NAME_BYTES = 200  # leaves room for "_255" and the extension


def _read(kind: Callable[[str], object], text: str) -> object:
    if "_" in text or not text.isascii():
        return text  # Python's literals, and digits of any script, are no input
    try:
        return kind(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class Integer:
    """An integer in low..high. bool is none; numpy integers are."""

    low: int
    high: int
    optional: bool = False
    metavar: str = "N"
    repeatable = False

    def check(self, name: str, value: object) -> int | None:
        """The value as a Python int (None where optional)."""
        if value is None and self.optional:
            return None
        if isinstance(value, numbers.Integral) and not isinstance(value, bool):
            if self.low <= value <= self.high:
                return int(value)
        several = f"an integer from {self.low} to {self.high}"
        raise rejected(name, value, several if self.low < self.high else f"{self.low}")

    def from_text(self, text: str) -> object:
        """The word as an int, or unchanged."""
        return _read(int, text)


@dataclass(frozen=True)
class Number:
    """A finite number in low..high. bool is none; numpy numbers are."""

    low: float
    high: float
    optional: bool = False
    metavar: str = "X"
    repeatable = False

    def check(self, name: str, value: object) -> float | None:
        """The value as a Python float (None where optional)."""
        if value is None and self.optional:
            return None
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            if self.low <= value <= self.high and math.isfinite(value):
                return float(value)
        raise rejected(name, value, f"a finite number from {self.low:g} to {self.high:g}")

    def from_text(self, text: str) -> object:
        """The word as a float, or unchanged."""
        return _read(float, text)


@dataclass(frozen=True)
class Flag:
    """True or False, nothing that merely looks like it."""

    optional: bool = False
    repeatable = False

    def check(self, name: str, value: object) -> bool | None:
        """The value itself."""
        if isinstance(value, bool) or (value is None and self.optional):
            return value
        raise rejected(name, value, "True or False")


@dataclass(frozen=True)
class Choice:
    """One of `values`; `aliases` maps further accepted words to them."""

    values: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    optional: bool = False
    repeatable = False

    @property
    def metavar(self) -> str:
        """The accepted values as the help shows them."""
        return "{" + ",".join(self.values) + "}"

    def check(self, name: str, value: object) -> str | None:
        """The value, with aliases replaced by what they stand for."""
        if value is None and self.optional:
            return None
        accepted = [*self.values, *self.aliases]
        if not isinstance(value, str):
            raise rejected(name, value, f"one of {', '.join(accepted)}")
        if value not in accepted:
            match = nearest(value, accepted)
            advice = f"did you mean {match!r}?" if match else ""
            raise rejected(name, value, f"one of {', '.join(accepted)}", advice)
        return self.aliases.get(value, str(value))

    def from_text(self, text: str) -> str:
        """The word itself."""
        return text


@dataclass(frozen=True)
class Text:
    """Text of at most `max_bytes` bytes of UTF-8; with `many` also a non-empty list of texts."""

    max_bytes: int
    optional: bool = False
    many: bool = False
    metavar: str = "TEXT"

    @property
    def repeatable(self) -> bool:
        """Whether the command line takes the flag several times."""
        return self.many

    def check(self, name: str, value: object) -> str | tuple[str, ...] | None:
        """The text, or the texts as a tuple."""
        if value is None and self.optional:
            return None
        if self.many and isinstance(value, list | tuple):
            if not value:
                raise rejected(name, value, "at least one text")
            return tuple(self._check_one(f"{name}[{i}]", text) for i, text in enumerate(value))
        if not isinstance(value, str):
            raise rejected(name, value, "a text or a list of texts" if self.many else "a text")
        return self._check_one(name, value)

    def _check_one(self, name: str, value: object) -> str:
        if not isinstance(value, str):
            raise rejected(name, value, "a text")
        if utf8_size(name, value) > self.max_bytes:
            raise rejected(name, value, f"at most {self.max_bytes} bytes of UTF-8")
        return value

    def from_text(self, text: str) -> str:
        """The word itself."""
        return text


@dataclass(frozen=True)
class Folder:
    """A path as str or os.PathLike, "~" expanded; not empty, no NUL."""

    optional: bool = False
    metavar: str = "PATH"
    repeatable = False

    def check(self, name: str, value: object) -> str | None:
        """The path as str."""
        if value is None and self.optional:
            return None
        path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
        if not isinstance(path, str) or not path.strip() or "\0" in path:
            raise rejected(name, value, "a path that is not empty and has no NUL character")
        if max(utf8_size(name, part) for part in path.split("/")) > MAX_COMPONENT_BYTES:
            raise rejected(name, path, f"a path of names of at most {MAX_COMPONENT_BYTES} bytes")
        return os.path.expanduser(path)

    def from_text(self, text: str) -> str:
        """The word itself."""
        return text


@dataclass(frozen=True)
class FileName:
    """A bare, visible file name: no separator, no control character, bytes limited."""

    optional: bool = False
    max_bytes: int = MAX_NAME_BYTES
    metavar: str = "NAME"
    repeatable = False

    def check(self, name: str, value: object) -> str | None:
        """The name itself."""
        if value is None and self.optional:
            return None
        if not isinstance(value, str) or not value.strip() or value.startswith("."):
            raise rejected(name, value, "a file name that is not empty and starts with no dot")
        if any(char in "/\\" or ord(char) < 32 or ord(char) == 127 for char in value):
            advice = "choose the folder with output_path"
            raise rejected(
                name, value, "a file name without '/', '\\' or control characters", advice
            )
        if utf8_size(name, value) > self.max_bytes:
            raise rejected(name, value, f"a file name of at most {self.max_bytes} bytes")
        return value

    def from_text(self, text: str) -> str:
        """The word itself."""
        return text


def utf8_size(name: str, text: str) -> int:
    """Bytes of `text` as UTF-8; InvalidParameter when it has no UTF-8 form (lone surrogates)."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise rejected(
            name, text, "text that can be encoded as UTF-8", "remove lone surrogates"
        ) from None
