"""Typed reading of a checkpoint's JSON: a value of the wrong kind is named, never coerced."""

import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from sglang.multimodal_gen.configs.validation import InvalidParameter, show

_NAMES = {int: "an integer", float: "a finite number", bool: "true or false", str: "a text"}


def checked_fields(cls: type, values: Mapping[str, Any], source: str | Path) -> dict[str, Any]:
    """`values` for the fields of the dataclass `cls`, lists as tuples.

    Raises InvalidParameter("model_path") naming `source`, the field, what was got and expected.
    """
    hints = get_type_hints(cls)
    return {name: _checked(value, hints[name], name, source) for name, value in values.items()}


def require_number(config: Mapping[str, Any], name: str, source: str | Path) -> float:
    """A finite number of a JSON object; raises like `checked_fields`."""
    return _checked(config.get(name), float, name, source)


def _checked(value: Any, hint: Any, name: str, source: str | Path) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        (hint,) = (h for h in get_args(hint) if h is not type(None))
        origin = get_origin(hint)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _wrong(source, name, value, "a list")
        return tuple(_checked(v, get_args(hint)[0], name, source) for v in value)
    if not _fits(value, hint):
        raise _wrong(source, name, value, _NAMES[hint])
    return value


def _fits(value: Any, hint: type) -> bool:
    if hint is bool or isinstance(value, bool):
        return hint is bool and isinstance(value, bool)
    if hint is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, hint)


def _wrong(source: str | Path, name: str, value: Any, expected: str) -> InvalidParameter:
    return InvalidParameter(
        "model_path", f"{source}: {name}: got {show(value)}, expected {expected}"
    )
