"""Pictures to edit: what is decoded, how, and what is refused by name before it costs anything."""

import io
import os
import struct
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sglang.multimodal_gen.configs.condition_image import (
    MAX_FILE_BYTES,
    MAX_IMAGES_GIVEN,
    MAX_PIXELS,
    decode_image,
)
from sglang.multimodal_gen.configs.model_specs import model_spec
from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.configs.validation import InvalidParameter
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

VAE = {"block_out_channels": [8] * 4}
PLAIN = replace(
    model_spec("FluxPipeline", transformer_config={}, vae_config=VAE),
    edits=None,
    strength=None,
    width=96,  # of the shape of `ramp`
    height=64,
)
IMG2IMG = replace(PLAIN, edits="img2img", strength=0.6)
CONDITION = replace(PLAIN, edits="condition", max_condition_images=3)
RAMP = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(4, 6, 3) * 3


def encoded(image, format="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def ramp(mode="RGB"):
    return Image.fromarray(RAMP).convert(mode)


def pixels(value):
    return np.asarray(decode_image("image", value).to_pil())


def png_header(width, height, depth=8, colour=2):
    def chunk(kind, body):
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def tiff_pages(count, tags):
    """A TIFF of 1x1 pages that all have `tags` (number, value)."""
    page = struct.pack("<H", len(tags))
    page += b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    ends = (16 + (len(page) + 4) * (i + 1) for i in range(count))
    links = [struct.pack("<I", end) for end in ends]
    first = struct.pack("<2sHI8x", b"II", 42, 16)
    return first + b"".join(page + link for link in links) + b"\0" * 6


# width, height, bits, black is zero, offset, bytes
PAGE = [(256, 1), (257, 1), (258, 8), (262, 1), (273, 8), (279, 1)]

# What is taken


def test_every_kind_of_value_gives_the_same_picture(tmp_path):
    data = encoded(ramp())
    path = tmp_path / "ä picture.png"
    path.write_bytes(data)
    values = (data, bytearray(data), memoryview(data), path, str(path), ramp())
    decoded = [decode_image("image", value) for value in values]
    assert all(one == decoded[0] and hash(one) == hash(decoded[0]) for one in decoded)
    assert np.array_equal(pixels(data), RAMP) and (decoded[0].width, decoded[0].height) == (6, 4)
    assert len(repr(decoded[0])) < 80


@pytest.mark.parametrize("format", ["PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_lossless_formats_keep_every_pixel(format):
    options = {"lossless": True} if format == "WEBP" else {}
    assert np.array_equal(pixels(encoded(ramp(), format, **options)), RAMP)


def test_jpeg_and_cmyk_are_close():
    smooth = Image.fromarray(np.full((16, 16, 3), (200, 100, 50), np.uint8))
    for image in (smooth, smooth.convert("CMYK")):
        got = pixels(encoded(image, "JPEG", quality=100))
        assert np.abs(got.astype(int) - np.asarray(smooth)).max() <= 3


def test_sixteen_bits_are_rounded_not_clipped():
    deep = np.array([[0, 128, 129, 257, 32768, 65535]], dtype=np.uint16)
    for value in (encoded(Image.fromarray(deep)), Image.fromarray(deep)):
        assert pixels(value)[0, :, 0].tolist() == [0, 0, 1, 1, 128, 255]


def test_a_palette_gives_its_colours():
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    assert pixels(encoded(image)).tolist() == [[[255, 0, 0], [0, 0, 255]]]


def test_transparency_lies_over_white():
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    assert pixels(encoded(image)).tolist() == [[[255, 0, 0], [255, 255, 255]]]
    palette = encoded(Image.new("P", (1, 1)), transparency=0)
    assert pixels(palette).tolist() == [[[255, 255, 255]]]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGBA", "RGBa", "RGBX", "YCbCr"])
def test_every_accepted_mode_becomes_rgb(mode):
    grey = Image.new("L", (4, 4), 255).convert("RGBA" if mode == "RGBa" else mode)
    assert pixels(grey.convert(mode)).tolist() == np.full((4, 4, 3), 255).tolist()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation):
    image = ramp()
    exif = image.getexif()
    exif[0x0112] = orientation
    turned = decode_image("image", encoded(image, exif=exif))
    assert (turned.width, turned.height) == ((6, 4) if orientation < 5 else (4, 6))
    corner = {
        1: (0, 0),
        2: (0, 5),
        3: (3, 5),
        4: (3, 0),
        5: (0, 0),
        6: (3, 0),
        7: (3, 5),
        8: (0, 5),
    }
    assert np.array_equal(np.asarray(turned.to_pil())[0, 0], RAMP[corner[orientation]])


# What is refused

ANIMATED = [ramp(), ramp().rotate(180)]
REFUSED = {
    "a number": (3, "a path, the bytes of an image file, a PIL image"),
    "an array": (RAMP, "a path, the bytes of an image file, a PIL image"),
    "a nested list": ([[ramp()]], "a PIL image"),
    "an empty list": ([], "got 0 pictures, expected 1 to 16"),
    "too many": ([ramp()] * (MAX_IMAGES_GIVEN + 1), "got 17 pictures"),
    "no bytes": (b"", "got 0 bytes"),
    "other bytes": (b"<svg/>", "one of the formats PNG, JPEG"),
    "a program": (b"%!PS-Adobe-3.0 EPSF-3.0\n", "one of the formats"),
    "cut short": (encoded(ramp().resize((64, 64)))[:-60], "corrupt or cut short"),
    "cut in the header": (encoded(ramp())[:20], "one of the formats|corrupt or cut short"),
    "a jpeg cut short": (encoded(ramp().resize((99, 99)), "JPEG")[:-90], "corrupt or cut short"),
    "a bomb": (png_header(65535, 65535), f"expected 1 to {MAX_PIXELS} pixels"),
    "just too large": (png_header(8192, 4097), "got a picture of 8192x4097"),
    "no pixels": (Image.new("RGB", (0, 4)), "got a picture of 0x4"),
    "a gif that moves": (
        encoded(ANIMATED[0], "GIF", save_all=True, append_images=ANIMATED[1:]),
        "an animated GIF, expected a still picture",
    ),
    "a png that moves": (
        encoded(ANIMATED[0], save_all=True, append_images=ANIMATED[1:]), "an animated PNG"
    ),
    "a tiff of many pages": (tiff_pages(30_000, PAGE), "an animated TIFF"),
    "a tiff with an empty second page": (tiff_pages(1, PAGE), "corrupt or cut short"),
    "floats": (Image.new("F", (4, 4)), "got 'F', expected 8 or 16 bits"),
    "32 bits": (Image.new("I", (4, 4)), "got 'I', expected 8 or 16 bits"),
    "a missing file": ("no/such.png", "can be read .No such file.*; check the path"),
    "an address": ("http://127.0.0.1/x.png", "addresses on the web are not fetched"),
    "a folder": (os.curdir, "not a folder or a device|can be read"),
    "a device": ("/dev/zero", "not a folder or a device"),
    "a path with NUL": ("a\0b", "no NUL character"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_plain_picture_is_refused_by_name(case):
    value, words = REFUSED[case]
    start = time.perf_counter()
    with pytest.raises(InvalidParameter, match=words) as caught:
        SamplingParams(prompt="a", image=value)
    assert caught.value.field == "image" and len(str(caught.value)) < 320
    assert "\n" not in str(caught.value) and time.perf_counter() - start < 2


def test_a_pipe_without_a_writer_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(InvalidParameter, match="not a folder or a device"):
        decode_image("image", tmp_path / "pipe.png")


def test_a_file_too_large_is_not_read(tmp_path):
    path = tmp_path / "big.png"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(InvalidParameter, match=f"got {MAX_FILE_BYTES + 1} bytes"):
        decode_image("image", path)


def test_a_place_in_the_list_is_named():
    with pytest.raises(InvalidParameter, match=r"^image\[1\]: got 0 bytes"):
        SamplingParams(prompt="a", image=[ramp(), b""])


@pytest.mark.filterwarnings("ignore:Corrupt EXIF", "ignore:Truncated File")
def test_every_cut_of_a_file_is_a_picture_or_refused():
    moving = encoded(ANIMATED[0], "GIF", save_all=True, append_images=ANIMATED[1:])
    for data in (encoded(ramp()), encoded(ramp(), "WEBP"), encoded(ramp(), "TIFF"), moving):
        for end in range(len(data)):
            try:
                assert decode_image("image", data[:end]).width == 6
            except InvalidParameter as error:
                assert error.field == "image"


# With a model


def test_resolved_pictures_are_kept_and_not_decoded_again():
    params = SamplingParams(prompt="a", image=ramp())
    resolved = params.resolve(IMG2IMG)
    assert resolved.image[0] is params.image[0] and resolved.strength == 0.6
    assert hash(params) == hash(SamplingParams(prompt="a", image=encoded(ramp())))
    assert len(repr(resolved)) < 1200


def test_a_model_that_cannot_edit_says_so_by_name():
    with pytest.raises(InvalidParameter, match="image: got one picture, .*FluxPipeline") as caught:
        SamplingParams(prompt="a", image=ramp()).fit(PLAIN)
    assert caught.value.field == "image"


def test_a_model_takes_so_many_pictures():
    three = SamplingParams(prompt="a", image=[ramp()] * 3)
    assert len(three.fit(CONDITION).image) == 3
    with pytest.raises(InvalidParameter, match="got 3 pictures, expected at most 1 for this model"):
        three.fit(IMG2IMG)


@pytest.mark.parametrize(
    "spec,given,words",
    [
        (IMG2IMG, {"strength": 0.5}, "strength has no effect without image"),
        (PLAIN, {"strength": 0.6}, "strength has no effect without image"),
        (CONDITION, {"strength": 0.5, "image": ramp()}, "reads the image as a condition"),
    ],
)
def test_a_strength_that_cannot_act_gives_one_warning(spec, given, words, caplog):
    caplog.set_level("WARNING", logger="sglang")
    SamplingParams(prompt="a", **given).resolve(spec)
    assert [words in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("spec", [IMG2IMG, CONDITION, PLAIN])
def test_no_warning_when_nothing_was_asked(spec, caplog):
    caplog.set_level("WARNING", logger="sglang")
    for given in ({}, {"image": ramp()} if spec.edits else {}):
        SamplingParams(prompt="a", **given).resolve(spec).resolve(spec)
    assert caplog.records == []


def test_a_path_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x.png").write_bytes(encoded(ramp()))
    assert pixels("~/x.png").shape == pixels(Path("~/x.png")).shape == (4, 6, 3)
