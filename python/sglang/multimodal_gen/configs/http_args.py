"""What the HTTP server is: where it listens, whom it answers, and what it bounds."""

import re
from dataclasses import dataclass, field
from typing import Any

from sglang.multimodal_gen import environ
from sglang.multimodal_gen.configs.fields import build_from_kwargs, normalise_fields, setting
from sglang.multimodal_gen.configs.rules import Flag, Folder, Integer, Number, Text
from sglang.multimodal_gen.configs.validation import rejected

MAX_PORT = 65535
_ORIGIN = re.compile(r"https?://(\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+)(:\d{1,5})?")
_NAME = re.compile(r"[A-Za-z0-9._:/@+-]+")
_KEY = re.compile(r"[!-~]+")  # what can stand in a header


@dataclass(frozen=True)
class _Origins(Text):
    """Origins of web pages as browsers send them, or "*" for any; always a tuple."""

    max_bytes: int = 256
    many: bool = True
    metavar: str = "ORIGIN"

    def check(self, name: str, value: object) -> tuple[str, ...]:
        values = value if isinstance(value, list | tuple) else (value,)
        return tuple(self._check_one(name, one) for one in values)

    def _check_one(self, name: str, value: object) -> str:
        text = super()._check_one(name, value)
        if text != "*" and not _ORIGIN.fullmatch(text):
            raise rejected(name, text, "an origin such as https://example.org:8080, or *")
        return text


@dataclass(frozen=True)
class _Word(Text):
    """A text of some characters only."""

    pattern: re.Pattern[str] = field(default=_NAME, kw_only=True)
    expected: str = field(default="letters, digits and ._:/@+-", kw_only=True)

    def _check_one(self, name: str, value: object) -> str:
        text = super()._check_one(name, value)
        if not self.pattern.fullmatch(text):
            raise rejected(name, text, self.expected)
        return text


@dataclass(frozen=True)
class _Secret(_Word):
    """A word that no message shows."""

    def check(self, name: str, value: object) -> str | None:
        good = isinstance(value, str) and self.pattern.fullmatch(value)
        if value is not None and not (good and len(value) <= self.max_bytes):
            raise rejected(name, "a key", f"1 to {self.max_bytes} {self.expected}")
        return value


@dataclass(frozen=True, kw_only=True)
class HttpArgs:
    """Settings of `sglang serve` beside those of the engine.

    Raises InvalidParameter (a ValueError) for a bad value. Without `api_key` the environment's
    SGLANG_DIFFUSION_API_KEY counts, which process lists do not show.
    """

    host: str = setting("127.0.0.1", _Word(255), "address to listen on; 0.0.0.0: all")
    port: int = setting(30000, Integer(0, MAX_PORT), "port to listen on; 0: a free one")
    api_key: str | None = setting(
        None,
        _Secret(512, optional=True, pattern=_KEY, expected="visible ASCII characters"),
        "key that clients must send; or SGLANG_DIFFUSION_API_KEY",
    )
    served_model_name: str | None = setting(
        None, _Word(200, optional=True), "name in /v1/models; default: the model's"
    )
    max_queue: int = setting(32, Integer(1, 10_000), "requests that may wait; more get a 429")
    request_timeout: float = setting(
        600.0, Number(0.1, 86_400), "seconds a request may wait and run"
    )
    drain_timeout: float = setting(
        60.0, Number(0, 86_400), "seconds to finish requests after SIGTERM"
    )
    max_images: int = setting(10, Integer(1, 256), "pictures a request may ask for")
    max_pixels: int = setting(3840 * 2160, Integer(256, 4096 * 4096), "pixels of a picture")
    max_steps: int = setting(200, Integer(1, 1000), "denoising steps of a picture")
    retention: int = setting(200, Integer(1, 1_000_000), "pictures kept for download")
    image_folder: str | None = setting(
        None, Folder(optional=True), "where they are kept; default: a private temporary one"
    )
    allowed_origins: tuple[str, ...] = setting(
        (), _Origins(), "web page that may call from a browser; repeat for several"
    )
    log_requests: bool = setting(False, Flag(), "log what requests ask, prompts included")

    def __post_init__(self) -> None:
        normalise_fields(self)
        if self.api_key is None and environ.API_KEY.get() is not None:
            key = self.__dataclass_fields__["api_key"].metadata["rule"]
            checked = key.check("api_key", environ.API_KEY.get())
            object.__setattr__(self, "api_key", checked)
        if self.retention < self.max_images:
            expected = f"at least max_images={self.max_images}, else an answer's urls are dead"
            raise rejected("retention", self.retention, expected, "change one of the two")

    @classmethod
    def from_kwargs(cls, **values: Any) -> "HttpArgs":
        """Settings from keywords; an unknown one is an error that names the nearest valid one."""
        return build_from_kwargs(cls, values)
