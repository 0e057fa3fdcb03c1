"""Private folders end with their process, or with the next folder of the same kind."""

import os
import signal
import subprocess
import sys
import tempfile

import pytest

from sglang.multimodal_gen.utils.private_folder import PrivateFolder
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

CHILD = """
import os, signal, sys
from sglang.multimodal_gen.utils.private_folder import PrivateFolder
folder = PrivateFolder("kind-")
print(folder.path, flush=True)
os.kill(os.getpid(), int(sys.argv[1])) if sys.argv[1] != "0" else None
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def made_by_a_child(ending):
    command = [sys.executable, "-c", CHILD, str(int(ending))]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.strip()


def test_it_ends_with_remove_and_with_its_process(temporary):
    folder = PrivateFolder("kind-")
    assert folder.path.parent == temporary and folder.path.stat().st_mode & 0o777 == 0o700
    assert made_by_a_child(0) and os.listdir(temporary) == [folder.path.name]
    folder.remove()
    folder.remove()
    assert os.listdir(temporary) == []


def test_a_killed_owners_folder_goes_with_the_next_one(temporary):
    living, other = PrivateFolder("kind-"), PrivateFolder("other-")
    left = made_by_a_child(signal.SIGKILL)
    assert os.path.isdir(left)
    new = PrivateFolder("kind-")
    kept = {living.path.name, other.path.name, new.path.name}
    assert set(os.listdir(temporary)) == kept and not os.path.exists(left)


def test_what_is_not_a_private_folder_stays(temporary):
    (temporary / "kind-of").mkdir()
    (temporary / "kind-file").touch()
    (temporary / "elsewhere").mkdir()
    (temporary / "elsewhere" / ".lock").touch()
    (temporary / "kind-link").symlink_to(temporary / "elsewhere")
    PrivateFolder("kind-").remove()
    assert set(os.listdir(temporary)) == {"kind-of", "kind-file", "kind-link", "elsewhere"}
    assert (temporary / "elsewhere" / ".lock").exists()
