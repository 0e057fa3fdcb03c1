"""8-bit RGB pixels as a PNG file, compressed on several threads.

PIL's encoder needs 435 ms for a noisy 1024x1024 picture on one core (1498 KiB; 87 ms and 1724 KiB
at its fastest level); this one 33 ms (1514 KiB), and its strips run side by side. Flat drawings
become up to a fifth larger. The bytes depend on the pixels alone.
"""

import functools
import os
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

SIGNATURE = b"\x89PNG\r\n\x1a\n"
UP_FILTER = 2  # each byte minus the one above
ROWS_A_STRIP = 64  # fixed, so that the bytes do not depend on the machine
LEVEL, STRATEGY, MEMORY = 1, zlib.Z_RLE, 9  # filtered photographs have runs, but few repeats
ZLIB_HEADER = b"\x78\x01"
MAX_THREADS = 8


def encode_png(pixels: np.ndarray) -> bytes:
    """The file of `pixels` [height, width, 3] uint8, both sides at least 1."""
    assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3, (
        f"got {pixels.dtype} {list(pixels.shape)}, expected uint8 [height, width, 3]"
    )
    height, width, _ = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = _compress(_filter_up(pixels))
    chunks = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    return SIGNATURE + b"".join(_chunk(kind, content) for kind, content in chunks)


def _filter_up(pixels: np.ndarray) -> np.ndarray:
    """Rows of [height, 1 + 3 * width] bytes: the filter's number, then differences modulo 256."""
    height, width, _ = pixels.shape
    flat = pixels.reshape(height, 3 * width)
    rows = np.empty((height, 1 + 3 * width), np.uint8)
    rows[:, 0] = UP_FILTER
    rows[0, 1:] = flat[0]
    np.subtract(flat[1:], flat[:-1], out=rows[1:, 1:])
    return rows


def _compress(rows: np.ndarray) -> bytes:
    """One zlib stream, of strips that were compressed each by itself."""
    starts = range(0, len(rows), ROWS_A_STRIP)
    strips = [rows[start : start + ROWS_A_STRIP] for start in starts]
    last = [False] * (len(strips) - 1) + [True]
    run = map if len(strips) == 1 else _threads().map
    checksum = struct.pack(">I", zlib.adler32(rows))
    return ZLIB_HEADER + b"".join(run(_compress_strip, strips, last)) + checksum


def _compress_strip(rows: np.ndarray, last: bool) -> bytes:
    deflate = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS, MEMORY, STRATEGY)
    # A full flush ends at a byte, and the next strip refers to nothing before it.
    return deflate.compress(rows) + deflate.flush(zlib.Z_FINISH if last else zlib.Z_FULL_FLUSH)


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(content, zlib.crc32(kind))
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "sglang-png")
