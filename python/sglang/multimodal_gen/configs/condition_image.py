"""Pictures that a request starts from, decoded in one place: whole and plain, or refused by name.

A picture comes as a path, as bytes of a file, or from PIL. It is bounded before it is decoded, and
becomes 8-bit RGB as a viewer shows it: turned as its EXIF says, transparency over white.
"""

import io
import os
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang.multimodal_gen.configs.rules import Folder
from sglang.multimodal_gen.configs.validation import InvalidParameter, rejected

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGES_GIVEN = 16
MAX_PIXELS = 8192 * 4096  # 100 MB decoded
MAX_FILE_BYTES = 50 * 2**20
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")
OPAQUE = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr")
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_ACCEPTED = "a path, the bytes of an image file, a PIL image, or a list of these"


@dataclass(frozen=True)
class ConditionImage:
    """A decoded picture; equal ones have equal pixels. Crosses processes as plain bytes."""

    width: int
    height: int
    rgb: bytes = field(repr=False)  # uint8 [height, width, 3]

    def to_pil(self) -> "Image":
        """The picture in mode RGB."""
        from PIL import Image

        return Image.frombytes("RGB", (self.width, self.height), self.rgb)


@dataclass(frozen=True)
class ConditionImages:
    """The rule of a field of pictures: None, or a tuple of `ConditionImage`."""

    metavar: str = "PATH"
    repeatable = True

    def check(self, name: str, value: object) -> tuple[ConditionImage, ...] | None:
        """One picture or a list of them, decoded. Raises InvalidParameter(name) with the reason."""
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            return (decode_image(name, value),)
        if not 1 <= len(value) <= MAX_IMAGES_GIVEN:
            raise InvalidParameter(
                name, f"got {len(value)} pictures, expected 1 to {MAX_IMAGES_GIVEN}"
            )
        return tuple(decode_image(f"{name}[{i}]", item) for i, item in enumerate(value))

    def from_text(self, text: str) -> str:
        """The word itself: a path."""
        return text


def decode_image(name: str, value: object) -> ConditionImage:
    """One picture of any accepted kind. Raises InvalidParameter(name) for what is none, is cut
    short, is animated, is too large, or has a pixel format without one meaning in 8-bit RGB."""
    if isinstance(value, ConditionImage):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return _decode_bytes(name, bytes(value))
    if isinstance(value, str | os.PathLike):
        return _decode_bytes(name, _read_file(name, Folder().check(name, value)))
    from PIL import Image

    if not isinstance(value, Image.Image):
        raise rejected(name, value, _ACCEPTED)
    return _convert(name, value)


def _read_file(name: str, path: str) -> bytes:
    try:
        # Without O_NONBLOCK, opening a pipe that nobody writes to would wait for ever.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise rejected(name, path, "an image file, not a folder or a device")
            _check_bytes(name, status.st_size)
            return file.read(MAX_FILE_BYTES)
    except OSError as error:
        advice = "check the path; addresses on the web are not fetched"
        expected = f"an image file that can be read ({error.strerror})"
        raise rejected(name, path, expected, advice) from error


def _check_bytes(name: str, size: int) -> None:
    if not 0 < size <= MAX_FILE_BYTES:
        expected = f"an image file of 1 to {MAX_FILE_BYTES} bytes"
        raise InvalidParameter(name, f"got {size} bytes, expected {expected}")


def _decode_bytes(name: str, data: bytes) -> ConditionImage:
    from PIL import Image, UnidentifiedImageError

    _check_bytes(name, len(data))
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)  # reads the header alone
    except UnidentifiedImageError as error:
        expected = f"an image file of one of the formats {', '.join(FORMATS)}"
        raise rejected(name, data[:16], expected) from error
    except Image.DecompressionBombError as error:
        raise InvalidParameter(name, f"{error}; {_size_limit()}") from error
    except Exception as error:  # decoders raise whatever a corrupt file leads them to
        raise _corrupt(name, error) from error
    with image:
        return _convert(name, image)


def _convert(name: str, image: "Image") -> ConditionImage:
    from PIL import ImageOps

    _check_size(name, image.size)
    _check_still(name, image)
    if image.mode not in (*WITH_ALPHA, *OPAQUE, *SIXTEEN_BITS):
        expected = "8 or 16 bits of grey, colour, CMYK or a palette"
        raise rejected(name, image.mode, expected, "convert the picture to RGB")
    try:
        image.load()
        plain = _to_rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # as above
        raise _corrupt(name, error) from error
    return ConditionImage(*plain.size, plain.tobytes())


def _check_still(name: str, image: "Image") -> None:
    """Looks for a second frame only: PIL takes minutes to count those of a file of some MB."""
    if image.format == "MPO":  # photos with a depth map
        return
    try:
        shown = image.tell()
        image.seek(1)
        image.seek(shown)
    except EOFError:
        return
    except Exception as error:  # as above
        raise _corrupt(name, error) from error
    what = f"an animated {image.format}"
    raise InvalidParameter(name, f"got {what}, expected a still picture; save one frame of it")


def _to_rgb(image: "Image") -> "Image":
    from PIL import Image

    if image.mode in SIXTEEN_BITS:
        return _eight_bits(image).convert("RGB")
    if image.mode not in WITH_ALPHA and "transparency" not in image.info:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")


def _eight_bits(image: "Image") -> "Image":
    """16 bits of grey, rounded to 8: PIL's own conversion clips them."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))


def _check_size(name: str, size: tuple[int, int]) -> None:
    width, height = size
    if width * height > MAX_PIXELS or not min(size):
        raise InvalidParameter(name, f"got a picture of {width}x{height}; {_size_limit()}")


def _size_limit() -> str:
    return f"expected 1 to {MAX_PIXELS} pixels; scale the picture down"


def _corrupt(name: str, error: Exception) -> InvalidParameter:
    reason = " ".join(str(error).split())[:120] or type(error).__name__
    return InvalidParameter(
        name, f"the picture is corrupt or cut short ({reason}); expected a whole image file"
    )
