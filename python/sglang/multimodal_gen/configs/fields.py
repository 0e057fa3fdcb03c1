"""Settings dataclasses: fields that carry the rule that checks them and their line of help."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from sglang.multimodal_gen.configs.validation import check_known_keys


def normalise_fields(instance: Any) -> None:
    """Check each field of a frozen dataclass by its own rule; store what the rule returns."""
    for field in dataclasses.fields(instance):
        value = field.metadata["rule"].check(field.name, getattr(instance, field.name))
        object.__setattr__(instance, field.name, value)


def setting(default: Any, rule: Any, help_text: str) -> Any:
    """A dataclass field with the rule that checks it and its line in the command line's help."""
    return dataclasses.field(default=default, metadata={"rule": rule, "help": help_text})


def build_from_kwargs(cls: type, values: Mapping[str, object]) -> Any:
    """`cls(**values)` where an unknown key is an InvalidParameter that names the nearest one."""
    check_known_keys(values, [field.name for field in dataclasses.fields(cls)])
    return cls(**values)
