"""Finished pictures kept for download: a folder of the newest `retention` ones, by secret id.

An id is looked up among those handed out and never becomes a path, so no id can leave the folder.
Methods block on the disk; call them off the event loop. They may be called from several threads.
"""

import os
import re
import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from sglang.multimodal_gen.runtime.entrypoints.image_files import (
    EXTENSIONS,
    OutputError,
    check_writable_folder,
)
from sglang.multimodal_gen.utils.private_folder import PrivateFolder

ID_BYTES = 16
PROBE_BYTES = 65536  # a disk with less room than this is full
_KEPT = re.compile(r"[0-9a-f]{32}(\.png|\.jpg|\.webp)")
_MEDIA_TYPES = {ext: f"image/{name}" for name, ext in EXTENSIONS.items()}


@dataclass(frozen=True)
class StoredImage:
    """A picture's file bytes and what they are, such as "image/png"."""

    data: bytes
    media_type: str


class ImageStore:
    """Keeps `retention` pictures in `folder`, or in a private temporary one that `close` removes.

    Pictures that an earlier server left in `folder` are served on and count. Raises
    InvalidParameter("image_folder") for a folder that cannot be made or written.
    """

    def __init__(self, folder: str | None, retention: int) -> None:
        self._private = PrivateFolder("sglang-images-") if folder is None else None
        if folder is not None:
            check_writable_folder("image_folder", Path(folder))
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = Path(folder) if self._private is None else self._private.path
        self._retention = retention
        self._lock = threading.Lock()
        self._names: OrderedDict[str, str] = OrderedDict()  # id -> file name, oldest first
        self._names.update(self._found())
        self._evict()

    def __len__(self) -> int:
        return len(self._names)

    def check_writable(self) -> None:
        """Raise OutputError when a picture could not be kept now: no folder, no right, no room."""
        self._remove(self._write_hidden(bytes(PROBE_BYTES)))

    def keep(self, data: bytes, output_format: str) -> str:
        """Keep a picture and return its id; the oldest one beyond the limit goes.

        Raises OutputError when the file cannot be written.
        """
        image_id = secrets.token_hex(ID_BYTES)
        name = image_id + EXTENSIONS[output_format]
        hidden = self._write_hidden(data)
        try:
            os.replace(hidden, self.folder / name)
        except OSError as error:
            self._remove(hidden)
            raise _not_kept(error) from error
        with self._lock:
            self._names[image_id] = name
        self._evict()
        return image_id

    def get(self, image_id: str) -> StoredImage | None:
        """The picture, or None for an id never handed out, evicted, or whose file is gone.

        Raises OutputError when the file is there and cannot be read.
        """
        name = self._names.get(image_id)
        if name is None:
            return None
        try:
            data = (self.folder / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise OutputError(f"the picture cannot be read: {error.strerror or error}") from error
        return StoredImage(data, _MEDIA_TYPES[Path(name).suffix])

    def close(self) -> None:
        """Remove the temporary folder; a folder of the user's keeps its pictures."""
        if self._private is not None:
            self._private.remove()

    def _write_hidden(self, data: bytes) -> Path:
        """A whole file under a name that is never served. No fsync: after a crash of the machine
        there is no server that would hand the picture out."""
        path = self.folder / f".{secrets.token_hex(8)}.part"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # cleaners empty /tmp
            path.write_bytes(data)
        except OSError as error:
            self._remove(path)
            raise _not_kept(error) from error
        return path

    def _found(self) -> list[tuple[str, str]]:
        files = [path for path in self.folder.iterdir() if _KEPT.fullmatch(path.name)]
        files.sort(key=lambda path: path.stat().st_mtime_ns)
        return [(path.stem, path.name) for path in files]

    def _evict(self) -> None:
        with self._lock:
            excess = len(self._names) - self._retention
            names = [self._names.popitem(last=False)[1] for _ in range(max(0, excess))]
        for name in names:
            self._remove(self.folder / name)

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError:  # the folder went away or became read-only: nothing is left to free
            return


def _not_kept(error: OSError) -> OutputError:
    return OutputError(f"pictures cannot be kept: {error.strerror or error}")
