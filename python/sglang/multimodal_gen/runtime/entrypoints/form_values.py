"""Multipart forms: the texts of fields as the values that JSON would have carried, and the files.

A field that several texts make sense for (seed) may come several times.
"""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from starlette.datastructures import FormData, UploadFile

from sglang.multimodal_gen.configs.rules import Flag
from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.validation import InvalidParameter, rejected
from sglang.multimodal_gen.runtime.entrypoints.openai_protocol import (
    OPTION_NAMES,
    SAMPLING_NAMES,
    UPLOADED,
    ImageOptions,
)

FILE_FIELDS = (UPLOADED, f"{UPLOADED}[]")  # OpenAI's clients send the second for a list
_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}
RULES = {
    field.name: field.metadata["rule"]
    for settings in (SamplingParams, ImageOptions)
    for field in fields(settings)
    if field.name in (*OPTION_NAMES, *SAMPLING_NAMES)
}


async def read_form(form: FormData) -> tuple[dict[str, Any], list[bytes]]:
    """(fields as from JSON, contents of the uploaded images, in order).

    Raises InvalidParameter for a file in a place for text, or a text in a place for a file.
    """
    values: dict[str, Any] = {}
    images: list[bytes] = []
    for name, item in form.multi_items():
        if name in FILE_FIELDS:
            images.append(await _file(item))
        elif isinstance(item, UploadFile):
            _refuse_file(name)
        else:
            _add(values, name, item)
    if not images:
        raise InvalidParameter(UPLOADED, "is missing; expected the file of a picture to edit")
    return values, images


def _refuse_file(name: str) -> None:
    if name == "mask":
        text = "is not supported: the whole picture is edited; leave it out"
        raise InvalidParameter(name, text)
    raise InvalidParameter(name[:64], "got a file, expected a text or no such field")


async def _file(item: UploadFile | str) -> bytes:
    if isinstance(item, str):
        advice = "upload the file itself; addresses are never fetched"
        raise rejected(UPLOADED, item, "the file of a picture", advice)
    return await item.read()


def _add(values: dict[str, Any], name: str, text: str) -> None:
    rule = RULES.get(name)
    value = text if rule is None else _typed(rule, text)
    if name not in values:
        values[name] = value
    elif rule is not None and rule.repeatable:
        values[name] = [*_as_list(values[name]), value]
    else:
        raise InvalidParameter(name[:64], "given twice; expected it once")


def _typed(rule: Any, text: str) -> object:
    return _BOOLEANS.get(text, text) if isinstance(rule, Flag) else rule.from_text(text)


def _as_list(value: object) -> Iterable[object]:
    return value if isinstance(value, list) else [value]
