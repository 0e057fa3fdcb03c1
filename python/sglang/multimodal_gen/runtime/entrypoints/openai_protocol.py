"""The OpenAI images API in front of SamplingParams: what a body asks, checked before model work.

OpenAI's own fields are `ImageOptions`; every other name is a field of SamplingParams, read by that
class's rules. JSON null means "not given", as in OpenAI's clients.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sglang.multimodal_gen.configs import validation
from sglang.multimodal_gen.configs.fields import normalise_fields, setting
from sglang.multimodal_gen.configs.http_args import HttpArgs
from sglang.multimodal_gen.configs.model_specs import ModelSpec
from sglang.multimodal_gen.configs.rules import Choice, Flag, Integer, Text
from sglang.multimodal_gen.configs.sampling_params import MAX_IMAGES, SamplingParams
from sglang.multimodal_gen.configs.validation import (
    InvalidParameter,
    check_known_keys,
    rejected,
)
from sglang.multimodal_gen.runtime.entrypoints.http_errors import ApiError

_SIZE = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,5})")
OPENAI_QUALITIES = dict.fromkeys(("auto", "standard", "hd", "low", "medium"), "lossless")
# Where files go and what is profiled is the server's business.
NOT_OVER_HTTP = (
    "output_path output_file_name save_output return_frames profile num_profiled_timesteps".split()
)
UPLOADED = "image"
_INVISIBLE = ("Cc", "Cf", "Zs", "Zl", "Zp")  # Unicode's controls, marks of format, white space
MAX_LOGGED = 500  # characters of a value in the log


@dataclass(frozen=True)
class _Size(Text):
    """ "auto" (None: the model's own) or "WIDTHxHEIGHT", as (width, height) in pixels."""

    max_bytes: int = 64
    optional: bool = True

    def check(self, name: str, value: object) -> tuple[int, int] | None:
        if value is None or value == "auto":
            return None
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise rejected(name, value, "'auto' or WIDTHxHEIGHT in pixels, such as 1024x1024")
        return int(match[1]), int(match[2])


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """The fields of OpenAI's images API that are no sampling parameter."""

    model: str | None = setting(None, Text(200, optional=True), "name as in /v1/models")
    n: int | None = setting(None, Integer(1, MAX_IMAGES, optional=True), "pictures of each prompt")
    size: tuple[int, int] | None = setting(None, _Size(), "WIDTHxHEIGHT or auto")
    response_format: str = setting("url", Choice(("url", "b64_json")), "how pictures are handed on")
    stream: bool = setting(False, Flag(), "answer with server-sent events")
    partial_images: int = setting(0, Integer(0, 3), "previews of each picture, when streaming")
    background: str = setting("auto", Choice(("auto", "opaque")), "pictures are opaque")
    moderation: str = setting("auto", Choice(("auto", "low")), "no effect: nothing is moderated")
    style: str | None = setting(
        None, Choice(("vivid", "natural"), optional=True), "no effect: say it in the prompt"
    )
    input_fidelity: str | None = setting(
        None, Choice(("low", "high"), optional=True), "no effect: see strength"
    )
    user: str | None = setting(None, Text(512, optional=True), "accepted, not used")
    safety_identifier: str | None = setting(None, Text(512, optional=True), "accepted, not used")

    def __post_init__(self) -> None:
        normalise_fields(self)
        if self.partial_images and not self.stream:
            raise rejected("partial_images", self.partial_images, "0 without stream=true")


@dataclass(frozen=True)
class ImageJob:
    """A checked request: parameters that fit the model, and how to answer."""

    params: SamplingParams
    options: ImageOptions
    warnings: tuple[str, ...]  # a sentence for each parameter that cannot act

    def loggable(self) -> dict[str, Any]:
        """What was asked, for the log: no picture, and no prompt at length."""
        asked = {name: getattr(self.params, name) for name in SAMPLING_NAMES}
        asked["images_given"] = len(self.params.image or ())
        asked["stream"] = self.options.stream
        return {name: _short(value) for name, value in asked.items() if value is not None}


@dataclass(frozen=True)
class Served:
    """The model that answers, and the names that it answers to."""

    spec: ModelSpec
    name: str
    aliases: tuple[str, ...] = ()

    def check_name(self, asked: str | None) -> None:
        """Raise a 404 for the name of another model."""
        if asked is not None and asked not in (self.name, *self.aliases):
            text = f"the model {validation.show(asked)} does not exist; this server has {self.name}"
            raise ApiError(404, text, "model_not_found", "model")


def _short(value: object) -> object:
    return value if isinstance(value, int | float) else str(value)[:MAX_LOGGED]


OPTION_NAMES = tuple(field.name for field in fields(ImageOptions))
SAMPLING_NAMES = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name not in (*NOT_OVER_HTTP, "num_outputs_per_prompt", UPLOADED)
) + ("num_outputs_per_prompt",)


def read_job(
    body: Mapping[str, Any], served: Served, limits: HttpArgs, images: Iterable[bytes] | None = None
) -> ImageJob:
    """The job that a decoded body asks for; `images` are uploaded files, of an edit.

    Decodes pictures: run it off the event loop. Raises InvalidParameter naming the field as the
    client spelt it, or ApiError 404 for another model's name.
    """
    given = {name: value for name, value in body.items() if value is not None}
    _check_names(given)
    options = ImageOptions(**{k: v for k, v in given.items() if k in OPTION_NAMES})
    served.check_name(options.model)
    values = {k: v for k, v in given.items() if k in SAMPLING_NAMES}
    spelt = _merge_options(values, options)
    if images is not None:
        values[UPLOADED] = _checked_uploads(list(images), served)
    try:
        params = SamplingParams.from_kwargs(**_http_rules(values))
        warnings = params.ineffective(served.spec) + _unused(options)
        params = params.fit(served.spec)
        _check_limits(params, limits)
    except InvalidParameter as error:
        raise _as_spelt(error, spelt) from None
    return ImageJob(params, options, tuple(warnings))


def _check_names(given: Mapping[str, Any]) -> None:
    for name in given:
        if name in NOT_OVER_HTTP:
            raise InvalidParameter(name, "is not accepted over HTTP: the server decides it")
        if name == UPLOADED:
            advice = "upload the file to /v1/images/edits; addresses are never fetched"
            raise InvalidParameter(name, f"is not accepted here; {advice}")
    check_known_keys(given, (*OPTION_NAMES, *SAMPLING_NAMES))
    if "prompt" not in given:
        raise InvalidParameter("prompt", "is missing; expected a text that says what to draw")


def _merge_options(values: dict[str, Any], options: ImageOptions) -> dict[str, str]:
    """Write `n` and `size` into sampling fields. Returns field -> name that the client gave."""
    spelt = {}
    if options.n is not None:
        if "num_outputs_per_prompt" in values:
            raise InvalidParameter("n", "given beside num_outputs_per_prompt; give one of the two")
        values["num_outputs_per_prompt"] = options.n
        spelt["num_outputs_per_prompt"] = "n"
    if options.size is not None:
        if "width" in values or "height" in values:
            raise InvalidParameter("size", "given beside width or height; give one of the two")
        values["width"], values["height"] = options.size
        spelt |= {"width": "size", "height": "size"}
    return spelt


def _http_rules(values: dict[str, Any]) -> dict[str, Any]:
    """Values with OpenAI's words for quality replaced. A prompt is one text that is not blank."""
    rule = quality_rule()
    if "quality" in values:
        values = {**values, "quality": rule.check("quality", values["quality"])}
    prompt = values["prompt"]
    if not isinstance(prompt, str):
        raise rejected("prompt", prompt, "one text", "send a request for each prompt")
    if all(unicodedata.category(character) in _INVISIBLE for character in prompt):
        raise rejected("prompt", prompt, "a text that says what to draw")
    return values


def quality_rule() -> Choice:
    """SamplingParams' rule for quality, with OpenAI's further words."""
    rule = SamplingParams.__dataclass_fields__["quality"].metadata["rule"]
    return replace(rule, aliases={**rule.aliases, **OPENAI_QUALITIES})


def _check_limits(params: SamplingParams, limits: HttpArgs) -> None:
    """What this server allows, on the values that will run."""
    if params.num_images > limits.max_images:
        expected = f"at most {limits.max_images} pictures a request on this server"
        raise rejected("num_outputs_per_prompt", params.num_images, expected)
    if params.width * params.height > limits.max_pixels:
        size = f"got {params.width}x{params.height}"
        raise InvalidParameter(
            "width", f"{size}, expected at most {limits.max_pixels} pixels on this server"
        )
    if params.num_inference_steps > limits.max_steps:
        expected = f"at most {limits.max_steps} on this server"
        raise rejected("num_inference_steps", params.num_inference_steps, expected)


def _checked_uploads(images: list[bytes], served: Served) -> list[bytes]:
    """Refuse before anything is decoded what this model cannot take."""
    spec = served.spec
    if spec.edits is None:
        raise InvalidParameter(
            UPLOADED, f"the model {served.name} makes pictures from text alone, it cannot edit"
        )
    if not 1 <= len(images) <= spec.max_condition_images:
        expected = f"1 to {spec.max_condition_images} for the model {served.name}"
        raise InvalidParameter(UPLOADED, f"got {len(images)} files, expected {expected}")
    return images


def _unused(options: ImageOptions) -> list[str]:
    inert = ("style", "input_fidelity")
    return [f"{name} has no effect on this server" for name in inert if getattr(options, name)]


def _as_spelt(error: InvalidParameter, spelt: Mapping[str, str]) -> InvalidParameter:
    name, reason = error.args
    if error.field not in spelt:
        return error
    what = "" if error.field == "num_outputs_per_prompt" else f"{error.field} "
    return InvalidParameter(spelt[error.field], what + reason)
