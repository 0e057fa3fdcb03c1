"""Command line flags built from the fields of settings dataclasses: no default is written twice.

A flag that is not given leaves no value: defaults and checks stay in the dataclass.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from sglang.multimodal_gen.configs.rules import Flag
from sglang.multimodal_gen.configs.validation import suggestion

HELP_WIDTH = 100


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=HELP_WIDTH)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{action.option_strings[0].removeprefix('--')}"
        return super()._format_action_invocation(action)


class FlagParser(argparse.ArgumentParser):
    """A parser of settings flags; every refusal exits with 2 and says what would be accepted."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} [--flag VALUE ...]   (all flags: {prog} --help)",
            description=description,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )

    def add_settings(
        self, settings: type, title: str, defaults: Mapping[str, object] | None = None
    ) -> None:
        """One flag for each field of the dataclass; the help shows `defaults` before its own."""
        group = self.add_argument_group(title)
        for field in dataclasses.fields(settings):
            shown = (defaults or {}).get(field.name, field.default)
            _add_flag(group, field, shown)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The flags that were given, and only those. Exits with 2 on an unknown one."""
        given, unknown = self.parse_known_args(words)
        if unknown:
            self._refuse(unknown[0])
        return given

    def error(self, message: str) -> NoReturn:
        """Print "prog: error: message" and exit with 2."""
        if "expected one argument" in message:
            message += "; write --flag=VALUE when the value starts with '-'"
        super().error(message)

    def _refuse(self, word: str) -> NoReturn:
        if not word.startswith("-"):
            self.error(f"got the word {word[:80]!r} outside any flag; quote a value with spaces")
        flag = word.partition("=")[0]
        known = sorted(name for name in self._option_string_actions if name.startswith("--"))
        advice = suggestion(flag, known)
        self.error(f"unknown option {flag[:80]!r}; {advice if '?' in advice else 'see --help'}")


def values_of(given: argparse.Namespace, settings: type) -> dict[str, Any]:
    """The given flags that are fields of `settings`, as keywords; one repeat is a single value."""
    values = {}
    for field in dataclasses.fields(settings):
        if hasattr(given, field.name):
            value = getattr(given, field.name)
            values[field.name] = value[0] if isinstance(value, list) and len(value) == 1 else value
    return values


def _add_flag(group: Any, field: dataclasses.Field, default: object) -> None:
    rule, text = field.metadata["rule"], field.metadata["help"]
    flag = "--" + field.name.replace("_", "-")
    shared = {"dest": field.name, "default": argparse.SUPPRESS, "help": _help(text, default)}
    if isinstance(rule, Flag):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **shared)
        return
    action = "append" if rule.repeatable else "store"
    group.add_argument(flag, action=action, type=rule.from_text, metavar=rule.metavar, **shared)


def _help(text: str, default: object) -> str:
    if default is None or default == ():
        return text
    shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
    return f"{text} [{shown}]"
