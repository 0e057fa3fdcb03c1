"""JSON of strangers: one meaning or an error. No duplicate keys, no NaN, no deep nesting."""

import json
from collections.abc import Sequence
from typing import Any, NoReturn

from sglang.multimodal_gen.configs.validation import InvalidParameter, rejected

MAX_DEPTH = 8  # a request is an object of texts, numbers and lists of them
BODY = "body"


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`. Raises InvalidParameter("body") saying what is wrong with it."""
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except InvalidParameter:
        raise
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # also of bytes that are not UTF-8 and of integers without an end
        reason = str(error).partition(" (char")[0][:120]
        raise InvalidParameter(BODY, f"is not valid JSON: {reason}") from None
    if not isinstance(value, dict):
        raise rejected(BODY, value, "a JSON object")
    if _deeper_than(value, MAX_DEPTH):
        raise _too_deep()
    return value


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidParameter(twice[:64], "given twice; expected it once")
    return found


def _no_constant(word: str) -> NoReturn:
    raise InvalidParameter(BODY, f"got {word}, which is not JSON; expected a finite number")


def _deeper_than(value: object, levels: int) -> bool:
    if isinstance(value, dict):
        return not levels or any(_deeper_than(child, levels - 1) for child in value.values())
    if isinstance(value, list):
        return not levels or any(_deeper_than(child, levels - 1) for child in value)
    return False


def _too_deep() -> InvalidParameter:
    return InvalidParameter(BODY, f"nests too deeply; expected at most {MAX_DEPTH} levels")
