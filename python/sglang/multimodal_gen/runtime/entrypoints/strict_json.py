"""JSON of strangers: one meaning or an error. No duplicate keys, no deep nesting.

Two megabytes of JSON can hold a million values, which would keep the event loop busy for a second:
more than a request has a use for are refused before they are parsed. NaN, infinities and endless
integers are handed on as floats: the rule of the field they stand in refuses them by its name.
"""

import json
from collections.abc import Sequence
from typing import Any

from sglang.multimodal_gen.configs.validation import InvalidParameter, rejected

MAX_DEPTH = 8  # a request is an object of texts, numbers and lists of them
MAX_VALUES = 2048  # some 40 fields, two of them with a value for each of 256 pictures
MAX_DIGITS = 1000  # of an integer; the largest parameter has 19
BODY = "body"


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`. Raises InvalidParameter("body") saying what is wrong with it."""
    if _values_at_most(data) > MAX_VALUES:
        text = f"has too many values; expected at most {MAX_VALUES}"
        raise InvalidParameter(BODY, text)
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=float,
            parse_int=_integer,
        )
    except InvalidParameter:
        raise
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # also of bytes that are not UTF-8
        reason = str(error).partition(" (char")[0][:120]
        raise InvalidParameter(BODY, f"is not valid JSON: {reason}") from None
    if not isinstance(value, dict):
        raise rejected(BODY, value, "a JSON object")
    if _deeper_than(value, MAX_DEPTH):
        raise _too_deep()
    return value


def _values_at_most(data: bytes) -> int:
    """How many values the text can have: each follows a bracket or a comma outside of texts."""
    unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"")
    outside = b"".join(unescaped.split(b'"', 4 * MAX_VALUES)[::2])  # a key and a text have four
    return sum(map(outside.count, (b",", b"[", b"{")))


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise InvalidParameter(name[:64], "given twice; expected it once")
        found[name] = value
    return found


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)


def _deeper_than(value: object, levels: int) -> bool:
    if isinstance(value, dict):
        return not levels or any(_deeper_than(child, levels - 1) for child in value.values())
    if isinstance(value, list):
        return not levels or any(_deeper_than(child, levels - 1) for child in value)
    return False


def _too_deep() -> InvalidParameter:
    return InvalidParameter(BODY, f"nests too deeply; expected at most {MAX_DEPTH} levels")
