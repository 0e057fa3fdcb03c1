"""The header object of every result file: which machine, which versions, which commit."""

import datetime
import functools
import hashlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COMMIT_VARIABLE = "PACKAGE_COMMIT"
IGNORED_NAMES = {"__pycache__", ".pytest_cache", ".ruff_cache"}


def header(num_gpus: int | None = None) -> dict[str, Any]:
    """Facts of this process and machine; ceilings are measured here (about two seconds).

    `num_gpus` is how many GPUs the measurement used; None means all visible ones. GPU fields
    are None on a machine without a GPU. Raises ValueError when the commit cannot be told.
    """
    import torch  # not at the top: collecting a suite must not wait for it

    has_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "num_gpus": (num_gpus or torch.cuda.device_count()) if has_gpu else 0,
        "driver": _driver_version() if has_gpu else None,
        "torch": torch.__version__,
        "triton": _triton_version(),
        "cuda": torch.version.cuda,
        "package_commit": package_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "ceilings": _ceilings() if has_gpu else None,
    }


def write_result_file(path: Path, body: dict[str, Any], num_gpus: int | None = None) -> None:
    """Write a result file: a `header` object, then `body`; a failed write leaves no half file."""
    content = {"header": header(num_gpus)} | body
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def check_result_file(path: Path) -> None:
    """Raise ValueError where `write_result_file` would fail; comes before the work, not after."""
    from sglang.multimodal_gen.runtime.entrypoints.image_files import check_output_file

    package_commit()
    check_output_file("--json", path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass  # permissions alone do not tell: /proc has them, and takes no file
    except OSError as error:
        raise ValueError(
            f"--json: got {path}, expected a folder that can be written to ({error.strerror})"
        ) from error


def package_commit() -> str:
    """The commit of this tree; `-dirty` is appended when python/ differs from it.

    A copy of the tree without its .git takes the commit from the variable PACKAGE_COMMIT.
    """
    given = os.environ.get(COMMIT_VARIABLE)
    if given:
        return given
    commit = _git("rev-parse", "HEAD")
    return commit + ("-dirty" if _git("status", "--porcelain", "--", "python") else "")


def kernels_tree() -> str:
    """What `git rev-parse HEAD:python/sglang/kernels` would give if the files on disk were HEAD.

    Computed from the files, so it names what ran, and works in a copy without .git.
    """
    return git_tree_hash(ROOT / "python" / "sglang" / "kernels").hex()


def git_tree_hash(folder: Path) -> bytes:
    """Git's SHA-1 of the tree object of `folder` (caches and empty folders left out)."""
    entries = []
    for path in folder.iterdir():
        if path.name in IGNORED_NAMES or path.is_dir() and not _has_files(path):
            continue
        # git sorts a folder as if its name ended in "/"
        sort_key = path.name.encode() + (b"/" if path.is_dir() else b"")
        entries.append((sort_key, _tree_entry(path)))
    return _git_object_hash(b"tree", b"".join(entry for _, entry in sorted(entries)))


def _tree_entry(path: Path) -> bytes:
    if path.is_dir():
        mode, digest = b"40000", git_tree_hash(path)
    else:
        mode = b"100755" if os.access(path, os.X_OK) else b"100644"
        digest = _git_object_hash(b"blob", path.read_bytes())
    return mode + b" " + path.name.encode() + b"\0" + digest


def _git_object_hash(kind: bytes, body: bytes) -> bytes:
    return hashlib.sha1(kind + b" %d\0" % len(body) + body).digest()


def _has_files(folder: Path) -> bool:
    return any(
        path.is_file() and IGNORED_NAMES.isdisjoint(path.parts) for path in folder.rglob("*")
    )


def _git(*arguments: str) -> str:
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()
        raise ValueError(
            f"the package commit is not known: git {' '.join(arguments)} failed ({reason}); "
            f"set {COMMIT_VARIABLE}=<commit of this tree>"
        ) from error
    return result.stdout.strip()


@functools.cache  # rows are written after every arm, and the tool takes a while
def _driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def _ceilings() -> dict[str, float]:
    from timing import bf16_matmul_ceiling_tflops, copy_ceiling_tbps, sdpa_ceiling

    return {
        "copy_tbps": round(copy_ceiling_tbps(), 3),
        "bf16_tflops": round(bf16_matmul_ceiling_tflops(), 1),
        "sdpa_tflops": round(sdpa_ceiling(), 1),
    }
