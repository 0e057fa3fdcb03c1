"""Pictures as files: safe names inside one folder, written whole or not at all.

Derived names never replace a file. A name that the user gave is the user's wish: it replaces one.
"""

import contextlib
import errno
import hashlib
import io
import itertools
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.multimodal_gen.configs.rules import MAX_COMPONENT_BYTES, FileName
from sglang.multimodal_gen.configs.sampling_params import (
    FORMAT_OF_EXTENSION,
    ImageRequest,
    SamplingParams,
)
from sglang.multimodal_gen.configs.validation import rejected

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = {"png": ".png", "jpeg": ".jpg", "webp": ".webp"}
DEFAULT_COMPRESSION = 95  # quality of jpeg and webp, of 100
MAX_SLUG_BYTES = 60
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class OutputError(OSError):
    """A picture or report could not be written; `results` holds what was made, in memory."""

    results: Sequence[Any] = ()


def save_images(
    images: Sequence["Image"], requests: Sequence[ImageRequest], params: SamplingParams
) -> list[Path]:
    """Write the pictures of one request and return their paths, in order.

    Raises OutputError when the folder or a file cannot be written; earlier pictures stay.
    """
    return [
        save_image(
            image,
            output_path=params.output_path,
            output_file_name=_numbered(params.output_file_name, request.index, len(requests)),
            output_format=params.output_format,
            output_compression=params.output_compression,
            default_stem=default_stem(request.prompt, request.seed),
        )
        for image, request in zip(images, requests, strict=True)
    ]


def save_image(
    image: "Image",
    *,
    output_path: str | Path,
    output_file_name: str | None,
    output_format: str,
    output_compression: int | None,
    default_stem: str,
) -> Path:
    """Write one picture into the folder `output_path`, which is made when missing.

    With `output_file_name` (extension optional) an existing file of that name is replaced; without,
    the name is `default_stem`, with "_1", "_2", ... when taken. Raises InvalidParameter for a name
    that leaves the folder, OutputError when writing fails; then no part of a file stays.
    """
    extension = EXTENSIONS[output_format]
    data = encode_image(image, output_format, output_compression)
    folder = Path(output_path)
    if output_file_name is None:
        return _write_new(folder, default_stem, extension, data)
    return write_atomically(_explicit_target(folder, output_file_name, extension), data)


def encode_image(image: "Image", output_format: str, output_compression: int | None) -> bytes:
    """The picture as file bytes; `output_compression` 0..100 is the quality of jpeg and webp."""
    quality = DEFAULT_COMPRESSION if output_compression is None else output_compression
    if output_format == "png" and image.mode == "RGB":
        import numpy as np  # 0.1 s, which commands that are refused need not pay

        from sglang.multimodal_gen.runtime.entrypoints.png_file import encode_png

        return encode_png(np.asarray(image))
    options = {} if output_format == "png" else {"quality": quality}
    buffer = io.BytesIO()
    (image if output_format == "png" else image.convert("RGB")).save(
        buffer, format=output_format, **options
    )
    return buffer.getvalue()


def default_stem(prompt: str, seed: int) -> str:
    """A short, safe, telling file stem: words of the prompt, the seed, a hash of both."""
    words = re.sub(r"[^a-z0-9]+", "-", prompt[:1000].lower()).strip("-")
    slug = words[:MAX_SLUG_BYTES].rstrip("-") or "image"
    digest = hashlib.sha256(f"{seed} {prompt}".encode()).hexdigest()[:8]
    return f"{slug}_{seed}_{digest}"


def write_atomically(target: Path, data: bytes) -> Path:
    """Write `data` to `target`, replacing it in one step; the folder is made when missing."""
    with _output_errors(target), _partial_file(target.parent, data) as partial:
        os.replace(partial, target)
    return target


def write_file(target: Path, data: bytes) -> None:
    """Write a report: atomically into a regular or new file, straight through to anything else (a
    device, a pipe). A link keeps pointing where it did."""
    if target.exists() and not target.is_file():
        with _output_errors(target):
            target.write_bytes(data)
        return
    write_atomically(Path(os.path.realpath(target)), data)


def check_output_file(name: str, target: Path) -> None:
    """Raise InvalidParameter(name) when a file of that name could not be written."""
    check_writable_folder(name, target.parent)
    if target.is_dir() or len(os.fsencode(target.name)) > MAX_COMPONENT_BYTES:
        raise rejected(name, str(target), "a file name, not a folder, of at most 255 bytes")


def check_writable_folder(name: str, folder: Path) -> None:
    """Raise InvalidParameter(name) when `folder` cannot be written or made. Writes nothing."""
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise rejected(name, str(folder), f"a folder; {existing} is none", "choose another")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise rejected(name, str(folder), "a folder that can be written", "choose another")


def _write_new(folder: Path, stem: str, extension: str, data: bytes) -> Path:
    with _output_errors(folder / (stem + extension)), _partial_file(folder, data) as partial:
        for suffix in itertools.chain([""], (f"_{i}" for i in itertools.count(1))):
            target = folder / (stem + suffix + extension)
            if _publish_new(partial, target):
                return target


def _publish_new(partial: Path, target: Path) -> bool:
    """Give the finished file its name in one step; False when another file has that name."""
    try:
        os.link(partial, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        return _publish_reserved(partial, target)
    return True


def _publish_reserved(partial: Path, target: Path) -> bool:
    """`_publish_new` where the file system has no hard links (exFAT, some network drives)."""
    try:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    os.replace(partial, target)
    return True


@contextlib.contextmanager
def _partial_file(folder: Path, data: bytes) -> Iterator[Path]:
    """A hidden file in `folder` that holds all of `data`; gone afterwards, also on Ctrl-C."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{secrets.token_hex(8)}.part"
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # a full disk shows here, before an old file is replaced
        yield partial
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _output_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = f"cannot write {target}: {error.strerror or error}"
        raise OutputError(f"{why}; free space or choose another output folder") from error


def _explicit_target(folder: Path, name: str, extension: str) -> Path:
    name = FileName(max_bytes=MAX_COMPONENT_BYTES - 16).check("output_file_name", name)
    same_format = (".jpg", ".jpeg") if extension == ".jpg" else (extension,)
    target = folder / (name if name.lower().endswith(same_format) else name + extension)
    # A link of that name is replaced, not followed, so the parent is all that can be written.
    assert target.parent == folder, f"{target} would leave {folder}"
    return target


def _numbered(name: str | None, index: int, count: int) -> str | None:
    if name is None or count == 1:
        return name
    stem, dot, extension = name.rpartition(".")
    known = dot and extension.lower() in FORMAT_OF_EXTENSION
    return f"{stem}_{index}.{extension}" if known else f"{name}_{index}"
