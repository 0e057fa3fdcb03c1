"""Pictures as files: exact, safely named, whole or not there at all."""

import concurrent.futures
import errno
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.validation import InvalidParameter
from sglang.multimodal_gen.runtime.entrypoints import image_files
from sglang.multimodal_gen.runtime.entrypoints.image_files import (
    OutputError,
    check_writable_folder,
    default_stem,
    save_image,
    save_images,
    write_atomically,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

PIXELS = np.random.default_rng(0).integers(0, 256, (48, 32, 3), dtype=np.uint8)
PICTURE = Image.fromarray(PIXELS)


def save(folder, name=None, fmt="png", compression=None, picture=PICTURE, stem="stem"):
    return save_image(
        picture,
        output_path=folder,
        output_file_name=name,
        output_format=fmt,
        output_compression=compression,
        default_stem=stem,
    )


def files(folder):
    return sorted(path.name for path in folder.rglob("*"))


def fail_with(code):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return fail


def test_a_decoded_png_is_the_array(tmp_path):
    path = save(tmp_path / "new" / "folder")
    assert path.name == "stem.png"
    assert np.array_equal(np.asarray(Image.open(path)), PIXELS)


@pytest.mark.parametrize("fmt,kind", [("jpeg", "JPEG"), ("webp", "WEBP")])
def test_compression_is_the_quality_of_lossy_formats(tmp_path, fmt, kind):
    worst, best, default = (save(tmp_path, fmt=fmt, compression=c) for c in (0, 100, None))
    assert Image.open(best).format == kind and best.suffix == image_files.EXTENSIONS[fmt]
    assert worst.stat().st_size < default.stat().st_size < best.stat().st_size
    error = np.abs(np.asarray(Image.open(best)).astype(int) - PIXELS).mean()
    assert error < np.abs(np.asarray(Image.open(worst)).astype(int) - PIXELS).mean()


def test_alpha_is_dropped_only_where_the_format_has_none(tmp_path):
    assert Image.open(save(tmp_path, fmt="jpeg", picture=PICTURE.convert("RGBA"))).mode == "RGB"


def test_a_derived_name_never_replaces_a_file(tmp_path):
    (tmp_path / "stem.png").write_bytes(b"mine")
    names = [save(tmp_path).name for _ in range(2)]
    assert names == ["stem_1.png", "stem_2.png"]
    assert (tmp_path / "stem.png").read_bytes() == b"mine"


def test_threads_that_choose_the_same_name_all_keep_their_picture(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: save(tmp_path), range(24)))
    assert len(set(paths)) == 24 and files(tmp_path) == sorted(path.name for path in paths)


def test_a_folder_without_hard_links_works_alike(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", fail_with(errno.EPERM))
    assert [save(tmp_path).name for _ in range(3)] == ["stem.png", "stem_1.png", "stem_2.png"]
    assert np.array_equal(np.asarray(Image.open(tmp_path / "stem_1.png")), PIXELS)


def test_an_explicit_name_is_the_users_wish_and_replaces(tmp_path):
    (tmp_path / "apple.png").write_bytes(b"old")
    assert save(tmp_path, "apple").name == "apple.png"
    assert save(tmp_path, "apple.png").name == "apple.png"
    assert save(tmp_path, "v1.2").name == "v1.2.png"
    assert save(tmp_path, "a.JPEG", fmt="jpeg").name == "a.JPEG"
    assert np.array_equal(np.asarray(Image.open(tmp_path / "apple.png")), PIXELS)


def test_a_link_of_that_name_is_replaced_and_not_followed(tmp_path):
    outside = tmp_path / "outside.png"
    outside.write_bytes(b"keep")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").symlink_to(outside)
    assert not save(tmp_path / "in", "a").is_symlink()
    assert outside.read_bytes() == b"keep"


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "..", ".", "", "a\0b", "a\\b", "x" * 300])
def test_a_name_that_leaves_the_folder_is_refused(tmp_path, name):
    (tmp_path / "in").mkdir()
    with pytest.raises(InvalidParameter, match="output_file_name"):
        save(tmp_path / "in", name)
    assert files(tmp_path) == ["in"]


@pytest.mark.parametrize(
    "prompt",
    ["", "/", "../../etc/passwd", "a\0b\n", "красное яблоко", "🍎", "x" * 70000, "CON", ".hidden"],
)
def test_derived_stems_are_short_safe_and_tell_prompts_apart(tmp_path, prompt):
    stem = default_stem(prompt, 2**63 - 1)
    assert len(stem.encode()) <= 60 + 1 + 19 + 1 + 8
    assert save(tmp_path, stem=stem).parent == tmp_path and not stem.startswith((".", "-"))
    assert len({stem, default_stem(prompt, 0), default_stem(prompt + "!", 2**63 - 1)}) == 3
    assert default_stem("A red apple!", 42).startswith("a-red-apple_42_")


def test_several_pictures_of_one_name_are_numbered(tmp_path):
    for name, expected in (
        ("x", "x_{}.png"),
        ("y.png", "y_{}.png"),
        ("n" * 200, "n" * 200 + "_{}.png"),
    ):
        params = SamplingParams(
            prompt=["a", "b"], output_path=tmp_path, output_file_name=name, save_output=True
        )
        paths = save_images([PICTURE] * 2, params.expand(), params)
        assert [path.name for path in paths] == [expected.format(i) for i in range(2)]


def test_pictures_without_a_name_are_named_after_prompt_and_seed(tmp_path):
    params = SamplingParams(prompt=["a cat", "a dog"], seed=[7, 0], output_path=tmp_path)
    paths = save_images([PICTURE] * 2, params.expand(), params)
    assert [path.name[:8] for path in paths] == ["a-cat_7_", "a-dog_0_"]


@pytest.mark.parametrize("name", [None, "a"])
@pytest.mark.parametrize("step", ["fsync", "link", "replace"])
def test_a_full_disk_leaves_no_half_file_and_keeps_the_old_one(tmp_path, monkeypatch, name, step):
    (tmp_path / "a.png").write_bytes(b"old")
    if step != {None: "replace", "a": "link"}[name]:  # the other way's step is not taken
        monkeypatch.setattr(os, step, fail_with(errno.ENOSPC))
        with pytest.raises(OutputError, match="cannot write .*No space left.*free space"):
            save(tmp_path, name)
    assert (tmp_path / "a.png").read_bytes() == b"old" and files(tmp_path) == ["a.png"]


def test_ctrl_c_in_mid_write_leaves_no_half_file(tmp_path, monkeypatch):
    def interrupt(descriptor):
        assert len(files(tmp_path)) == 1  # the partial file is there now
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    for name in (None, "a"):
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, name)
        assert files(tmp_path) == []


@pytest.mark.parametrize("name", [None, "a"])
def test_a_folder_that_is_a_file_is_an_output_error(tmp_path, name):
    (tmp_path / "file").write_bytes(b"x")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OutputError, match="cannot write") as caught:
            save(folder, name)
        assert caught.value.results == () and isinstance(caught.value, OSError)


def test_a_name_that_is_a_folder_is_an_output_error(tmp_path):
    (tmp_path / "a.png").mkdir()
    with pytest.raises(OutputError, match="a.png"):
        save(tmp_path, "a")
    assert files(tmp_path) == ["a.png"]


def test_files_have_the_users_permissions(tmp_path):
    before = os.umask(0o027)
    try:
        modes = [save(tmp_path, name).stat().st_mode & 0o777 for name in (None, "a")]
    finally:
        os.umask(before)
    assert modes == [0o640, 0o640]


def test_bytes_are_written_as_they_are(tmp_path):
    target = write_atomically(tmp_path / "new" / "report.json", b"{}")
    assert target.read_bytes() == b"{}" and files(tmp_path / "new") == ["report.json"]


def test_the_early_check_writes_nothing(tmp_path, monkeypatch):
    check_writable_folder("output_path", tmp_path / "a" / "b")
    monkeypatch.chdir(tmp_path)
    check_writable_folder("output_path", Path("relative/b"))
    assert files(tmp_path) == []
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for folder in ("file", "file/x", "dangling"):
        with pytest.raises(InvalidParameter, match="output_path: got .* expected a folder"):
            check_writable_folder("output_path", tmp_path / folder)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as root everything is writable
    with pytest.raises(InvalidParameter, match="a folder that can be written"):
        check_writable_folder("output_path", tmp_path / "a")
