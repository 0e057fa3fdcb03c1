"""What one request asks: checked once, here, for Python, the command line and HTTP alike."""

import logging
import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.configs.condition_image import ConditionImage, ConditionImages
from sglang.multimodal_gen.configs.fields import build_from_kwargs, normalise_fields, setting
from sglang.multimodal_gen.configs.rules import (
    Choice,
    FileName,
    Flag,
    Folder,
    Integer,
    Number,
    Text,
)
from sglang.multimodal_gen.configs.validation import InvalidParameter, rejected

if TYPE_CHECKING:
    from sglang.multimodal_gen.configs.model_specs import ModelSpec

logger = logging.getLogger(__name__)

MAX_SEED = 2**63 - 1  # what torch.Generator takes
MAX_SIDE = 8192  # pixels
MAX_AREA = 4096 * 4096  # pixels
MAX_IMAGES = 256  # prompts x num_outputs_per_prompt
MAX_PROMPT_BYTES = 65536
DEFAULT_OUTPUT_PATH = "outputs"
DEFAULT_PROFILED_TIMESTEPS = 5
STRETCH_WORTH_A_WORD = 1.1  # a change of the sides' ratio that is seen
MIN_STRENGTH = 0.001  # of the most steps that there can be, one
FORMAT_OF_EXTENSION = {"png": "png", "jpg": "jpeg", "jpeg": "jpeg", "webp": "webp"}


@dataclass(frozen=True)
class _Seeds(Integer):
    """One seed for the whole request, or a list with one seed per image."""

    repeatable = True

    def check(self, name: str, value: object) -> int | tuple[int, ...]:
        if isinstance(value, list | tuple):
            check = super().check
            return tuple(check(f"{name}[{i}]", seed) for i, seed in enumerate(value))
        return super().check(name, value)


@dataclass(frozen=True)
class ImageRequest:
    """One picture of a request, with the seed that alone remakes it."""

    index: int
    prompt: str
    negative_prompt: str | None
    seed: int


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """A request. None stands for "the model's default"; `resolve` fills it in.

    Lists are stored as tuples. Raises InvalidParameter (a ValueError) that names the field.
    """

    prompt: str | tuple[str, ...] = setting(
        None, Text(MAX_PROMPT_BYTES, many=True), "what to draw; repeat for several pictures"
    )
    negative_prompt: str | None = setting(
        None, Text(MAX_PROMPT_BYTES, optional=True), "what to avoid; needs true-cfg-scale > 1"
    )
    width: int | None = setting(None, Integer(16, MAX_SIDE, optional=True), "pixels")
    height: int | None = setting(None, Integer(16, MAX_SIDE, optional=True), "pixels")
    num_inference_steps: int | None = setting(
        None, Integer(1, 1000, optional=True), "denoising steps"
    )
    guidance_scale: float | None = setting(
        None, Number(0, 100, optional=True), "embedded guidance (FLUX.1-dev), or true-cfg-scale"
    )
    true_cfg_scale: float | None = setting(
        None, Number(0, 100, optional=True), "classifier-free guidance; acts above 1"
    )
    seed: int | tuple[int, ...] = setting(
        42, _Seeds(0, MAX_SEED), "picture i uses seed + i; repeat to give one a picture"
    )
    num_outputs_per_prompt: int = setting(1, Integer(1, 64), "pictures of each prompt")
    quality: str = setting(
        "lossless",
        Choice(("lossless", "high"), {"exact": "lossless", "extra-high": "high"}),
        "high: small rounding differences, faster",
    )
    generator_device: str = setting("cpu", Choice(("cpu", "cuda")), "where noise is drawn")
    max_sequence_length: int | None = setting(
        None, Integer(1, 4096, optional=True), "text tokens of the long encoder"
    )
    use_pe: bool | None = setting(
        None, Flag(optional=True), "rewrite prompts by the checkpoint's prompt enhancer"
    )
    image: tuple[ConditionImage, ...] | None = setting(
        None, ConditionImages(), "picture to start from, where the model edits; repeat for several"
    )
    strength: float | None = setting(
        None, Number(MIN_STRENGTH, 1, optional=True), "how far to leave the image; 1: entirely"
    )
    output_path: str = setting(DEFAULT_OUTPUT_PATH, Folder(), "folder of the pictures")
    output_file_name: str | None = setting(
        None, FileName(optional=True), "name in that folder; an existing file is replaced"
    )
    save_output: bool = setting(False, Flag(), "write the pictures to the folder")
    output_format: str = setting("png", Choice(("png", "jpeg", "webp")), "file format")
    output_compression: int | None = setting(
        None, Integer(0, 100, optional=True), "quality of jpeg and webp, 100 is best"
    )
    return_frames: bool = setting(False, Flag(), "also return the pixels as an array")
    profile: bool = setting(False, Flag(), "write a torch profiler trace and a kernel table")
    num_profiled_timesteps: int = setting(
        DEFAULT_PROFILED_TIMESTEPS, Integer(1, 1000), "denoising steps to profile"
    )

    def __post_init__(self) -> None:
        normalise_fields(self)
        self._check_area()
        self._check_image_count()
        self._check_seeds()
        self._check_extension()

    @property
    def first_step(self) -> int:
        """The first step that runs, of a resolved request: 0, or as `strength` says."""
        steps = self.num_inference_steps
        return 0 if self.strength is None else int(steps - min(steps * self.strength, steps))

    @classmethod
    def from_kwargs(cls, **values: Any) -> "SamplingParams":
        """A request from keywords; an unknown one is an error that names the nearest valid one."""
        return build_from_kwargs(cls, values)

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompts, one entry also when a single text was given."""
        return self.prompt if isinstance(self.prompt, tuple) else (self.prompt,)

    @property
    def num_images(self) -> int:
        """How many pictures the request asks for."""
        return len(self.prompts) * self.num_outputs_per_prompt

    def resolve(self, spec: "ModelSpec") -> "SamplingParams":
        """`fit`, after one logged warning for each given parameter that cannot act."""
        resolved = self.fit(spec)
        for warning in self.ineffective(spec):
            logger.warning(warning)
        return resolved

    def fit(self, spec: "ModelSpec") -> "SamplingParams":
        """The same request for one model: its defaults filled in, its limits checked.

        Raises InvalidParameter for a size that is not a multiple of what the model needs, for too
        many text tokens, for pictures to edit that the model cannot take, and for a prompt enhancer
        or a second guidance that the model lacks.
        """
        missing = {
            field.name: getattr(spec, field.name)
            for field in fields(self)
            if getattr(self, field.name) is None and hasattr(spec, field.name)
        }
        if spec.guidance_scale_is_cfg:
            missing |= self._one_guidance(spec)
        if self.image is None or spec.edits != "img2img":
            missing["strength"] = None
        resolved = replace(self, **missing)
        for name in ("width", "height"):
            _check_multiple(name, getattr(resolved, name), spec.size_multiple)
        if resolved.max_sequence_length > spec.max_sequence_length_limit:
            expected = f"at most {spec.max_sequence_length_limit} for this model"
            raise rejected("max_sequence_length", resolved.max_sequence_length, expected)
        if resolved.use_pe and not spec.has_prompt_enhancer:
            expected = "False or None: this checkpoint has no prompt enhancer (`pe`)"
            raise rejected("use_pe", resolved.use_pe, expected)
        if self.image is not None:
            _check_edit(self.image, spec)
        return resolved

    def _cfg_scale(self, spec: "ModelSpec") -> float:
        given = self.true_cfg_scale
        if given is None and spec.guidance_scale_is_cfg:
            given = self.guidance_scale
        return spec.true_cfg_scale if given is None else given

    def _one_guidance(self, spec: "ModelSpec") -> dict[str, float]:
        scale = self._cfg_scale(spec)
        if self.guidance_scale not in (None, scale):
            expected = f"true_cfg_scale={scale}, of which it is another name for this model"
            raise rejected("guidance_scale", self.guidance_scale, expected, "give one of the two")
        return {"guidance_scale": scale, "true_cfg_scale": scale}

    def ineffective(self, spec: "ModelSpec") -> list[str]:
        """One sentence for each given parameter that cannot act on this model or request, or acts
        unlike it seems to."""
        scale = self._cfg_scale(spec)
        guidance_acts = spec.has_guidance_embedding or spec.guidance_scale_is_cfg
        guidance_is_inert = not guidance_acts and self.guidance_scale is not None
        has_negative = self.negative_prompt is not None or spec.negative_prompt is not None
        lacks_negative = spec.cfg_needs_negative_prompt and not has_negative
        asks_for_cfg = self.true_cfg_scale is not None and scale > 1
        checks = {
            f"guidance_scale={self.guidance_scale} has no effect: this model has no guidance "
            "embedding": guidance_is_inert and self.guidance_scale != spec.guidance_scale,
            f"negative_prompt has no effect at true_cfg_scale={scale}; give one above 1": (
                self.negative_prompt is not None and scale <= 1
            ),
            f"true_cfg_scale={scale} has no effect without negative_prompt; give one, it may be "
            "empty": asks_for_cfg and lacks_negative,
            "strength has no effect without image": (
                self.strength is not None and self.image is None
            ),
            "strength has no effect: this model reads the image as a condition": (
                self.strength is not None and self.image is not None and spec.edits == "condition"
            ),
            "output_compression has no effect on png, which is lossless": (
                self.output_compression is not None and self.output_format == "png"
            ),
            "output_file_name has no effect without save_output=True": (
                self.output_file_name is not None and not self.save_output
            ),
            "output_path has no effect without save_output=True": (
                self.output_path != DEFAULT_OUTPUT_PATH and not self.save_output
            ),
            "num_profiled_timesteps has no effect without profile=True": (
                self.num_profiled_timesteps != DEFAULT_PROFILED_TIMESTEPS and not self.profile
            ),
        }
        acting = [sentence for sentence, applies in checks.items() if applies]
        for name in spec.untaken:
            acting = [sentence for sentence in acting if not sentence.startswith(name)]
            if getattr(self, name) not in (None, getattr(spec, name)):
                acting.append(f"{name} has no effect: {spec.pipeline_class} does not take it")
        return acting + self._stretches(spec)

    def _stretches(self, spec: "ModelSpec") -> list[str]:
        pictures = self.image or () if spec.edits == "img2img" else ()
        width, height = self.width or spec.width, self.height or spec.height
        return [
            f"image is stretched from {picture.width}x{picture.height} to {width}x{height}; ask for"
            " a width and height of its shape"
            for picture in pictures
            if not 1 / STRETCH_WORTH_A_WORD
            < picture.width * height / (picture.height * width)
            < STRETCH_WORTH_A_WORD
        ]

    def expand(self) -> list[ImageRequest]:
        """One entry per picture, in prompt order; picture i has seed + i or the i-th given seed."""
        prompts = [text for text in self.prompts for _ in range(self.num_outputs_per_prompt)]
        given = self.seed if isinstance(self.seed, tuple) else None
        seeds = given or range(self.seed, self.seed + len(prompts))
        return [
            ImageRequest(index=i, prompt=prompt, negative_prompt=self.negative_prompt, seed=seed)
            for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]

    def _check_area(self) -> None:
        if self.width and self.height and self.width * self.height > MAX_AREA:
            size = f"{self.width}x{self.height}"
            raise InvalidParameter(
                "width", f"got {size}, expected at most {MAX_AREA} pixels; ask for less"
            )

    def _check_image_count(self) -> None:
        if self.num_images > MAX_IMAGES:
            reason = f"got {len(self.prompts)} prompts x {self.num_outputs_per_prompt} pictures"
            raise InvalidParameter(
                "num_outputs_per_prompt", f"{reason}, expected at most {MAX_IMAGES} in all"
            )

    def _check_seeds(self) -> None:
        if isinstance(self.seed, tuple):
            if len(self.seed) != self.num_images:
                expected = f"{self.num_images}, one for each picture"
                raise InvalidParameter(
                    "seed", f"got {len(self.seed)} seeds, expected {expected}; or give one integer"
                )
        elif self.seed + self.num_images - 1 > MAX_SEED:
            last = f"seed + {self.num_images - 1} (the last picture's seed) at most {MAX_SEED}"
            raise rejected("seed", self.seed, last)

    def _check_extension(self) -> None:
        extension = (self.output_file_name or "").rpartition(".")[2].lower()
        implied = FORMAT_OF_EXTENSION.get(extension, self.output_format)
        if "." in (self.output_file_name or "") and implied != self.output_format:
            advice = f"set output_format={implied!r} or leave the extension out"
            expected = f"a name that fits output_format={self.output_format!r}"
            raise rejected("output_file_name", self.output_file_name, expected, advice)


def _check_multiple(name: str, value: int, multiple: int) -> None:
    if value % multiple:
        below = value // multiple * multiple
        options = [size for size in (below, below + multiple) if 16 <= size <= MAX_SIDE]
        advice = "use " + " or ".join(map(str, options))
        raise rejected(name, value, f"a multiple of {multiple} for this model", advice)


def _check_edit(images: tuple[ConditionImage, ...], spec: "ModelSpec") -> None:
    count = "one picture" if len(images) == 1 else f"{len(images)} pictures"
    if spec.edits is None:
        cannot = f"this model ({spec.pipeline_class}) makes pictures from text alone"
        raise InvalidParameter("image", f"got {count}, expected None: {cannot}")
    if len(images) > spec.max_condition_images:
        expected = f"at most {spec.max_condition_images} for this model ({spec.pipeline_class})"
        raise InvalidParameter("image", f"got {count}, expected {expected}")
    for picture in images:
        short, long = sorted((picture.width, picture.height))
        got = f"got a picture of {picture.width}x{picture.height}"
        if short < spec.min_condition_side:
            expected = f"sides of at least {spec.min_condition_side} pixels for this model"
            raise InvalidParameter("image", f"{got}, expected {expected}")
        if long > short * (spec.max_condition_ratio or math.inf):
            expected = f"sides of at most {spec.max_condition_ratio:g} to 1 for this model"
            raise InvalidParameter("image", f"{got}, expected {expected}; crop it")
