"""Temporary folders that go away even when their process had no time to remove them."""

import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

LOCK = ".lock"


class PrivateFolder:
    """A new folder of this user's under the one for temporary files; `remove` ends it.

    So does the end of the process. One that is killed leaves its folder behind, but not the lock
    that it had in it: the next folder with the same prefix is then made in its place.
    """

    def __init__(self, prefix: str) -> None:
        """Raises OSError where no folder can be made."""
        _remove_ownerless(prefix)
        lock = None
        while lock is None:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            lock = _locked(self.path, os.O_CREAT)
        self.remove = weakref.finalize(self, _remove, self.path, lock)


def _remove_ownerless(prefix: str) -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        lock = _locked(path, 0)
        if lock is not None:
            _remove(path, lock)


def _locked(folder: Path, flags: int) -> int | None:
    """The descriptor of the folder's lock, which is now ours; None where it is another's, or where
    there is none (any more)."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    if (folder / LOCK).exists():
        return lock
    os.close(lock)  # its folder was taken for one without owner between the two calls
    return None


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # a link to a folder is left as it is
    os.close(lock)
