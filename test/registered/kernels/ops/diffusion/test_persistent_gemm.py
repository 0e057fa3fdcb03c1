"""The GEMMs' tiles, their time, and tensor maps; no GPU is needed."""

import ctypes

import pytest
import torch
from cuda.bindings import driver
from elementwise_checks import OnGpu, on_gpu

from sglang.kernels.ops.diffusion import persistent_gemm
from sglang.kernels.ops.diffusion.persistent_gemm import (
    TILES,
    best_tile,
    fills_device,
    is_matrix,
    matrix_map,
)
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")
register_cuda_ci(est_time=10, stage="base-b-kernel-unit", runner_config="1-gpu-large")

WIDE, NARROW = TILES
BF16, FP16 = torch.bfloat16, torch.float16
H200_MULTIPROCESSORS, SHARED_BYTES_OF_A_BLOCK = 132, 227 * 1024


@pytest.fixture(autouse=True)
def h200(monkeypatch):
    monkeypatch.setattr(persistent_gemm, "multiprocessors", lambda device: H200_MULTIPROCESSORS)


# --- tiles ---


def test_tiles_fit_shared_memory():
    # 4 stages of 128 and 256 rows of 64 two-byte values, 5 of 128 and 192; 1024 bytes to align
    assert WIDE.shared_bytes == 4 * (384 * 128 + 16) + 1024 == 197_696
    assert NARROW.shared_bytes == 5 * (320 * 128 + 16) + 1024 == 205_904
    assert all(tile.shared_bytes <= SHARED_BYTES_OF_A_BLOCK for tile in TILES)


@pytest.mark.parametrize(
    "rows, columns, tile, pairs, time",
    [
        (4608, 12288, NARROW, 18 * 64, 18 * 192),  # FLUX.1's joint stream: 1152 pairs in 18 waves
        (4096, 12288, WIDE, 16 * 48, 12 * 256),  # its image stream; the narrow tile ties
        (4096, 16384, WIDE, 16 * 64, 16 * 256),  # GLM-Image; 192 does not divide it
    ],
)
def test_the_tile_of_a_models_shape(rows, columns, tile, pairs, time):
    assert best_tile(rows, columns, 0) is tile and fills_device(rows, columns, 0)
    assert tile.pairs(rows, columns) == pairs
    assert tile.time(rows, columns, 0) == time
    assert tile.blocks(rows, columns, 0) == H200_MULTIPROCESSORS


@pytest.mark.parametrize(
    "columns, tile", [(3840, WIDE), (2496, NARROW), (768, NARROW), (128, None), (320, None)]
)
def test_the_tile_divides_the_columns(columns, tile):
    assert best_tile(1024, columns, 0) is tile


def test_few_tiles_launch_few_blocks():
    assert WIDE.pairs(1, 256) == WIDE.pairs(256, 256) == 1 and WIDE.pairs(257, 256) == 2
    assert [WIDE.blocks(rows, 256, 0) for rows in (1, 257, 66 * 256, 67 * 256)] == [2, 4, 132, 132]


def test_an_odd_number_of_multiprocessors_leaves_one_idle(monkeypatch):
    monkeypatch.setattr(persistent_gemm, "multiprocessors", lambda device: 61)
    assert WIDE.blocks(4096, 4096, 0) == 60
    assert WIDE.time(256, 30 * 256, 0) == 256 and WIDE.time(256, 31 * 256, 0) == 512


def test_time_counts_whole_waves():
    assert [WIDE.time(256, 256 * pairs, 0) for pairs in (1, 66, 67, 132)] == [256, 256, 512, 512]


@pytest.mark.parametrize(
    "rows, columns, expected",
    [
        (1024, 12288, True), (1023, 12288, False), (1025, 12288, False),  # 97 %, few rows, 78 %
        (1100, 12288, False), (1152, 12288, True),  # 83 % and 87 % of 5 waves of 192 columns
        (1024, 3840, True), (1024, 3584, False),  # 60 pairs of 66, and 56: 91 % and 84.8 %
        (4096, 128, False), (4096, 0, False),
    ],
)  # fmt: skip
def test_an_output_that_leaves_the_gpu_idle_is_not_worth_it(rows, columns, expected):
    assert fills_device(rows, columns, 0) is expected


# --- matrices ---


def test_depth_is_whole_blocks_and_enough_of_them():
    for depth in (0, 64, 960, 1023, 1024, 1056, 1088, 3072, 4096):
        expected = depth >= 1024 and depth % 64 == 0
        assert is_matrix(on_gpu(5, depth), BF16, 0) == expected, depth


def test_a_matrix_is_contiguous_aligned_and_of_its_kind():
    assert is_matrix(on_gpu(2, 3, 1024, dtype=FP16, address=16), FP16, 0)
    assert not is_matrix(on_gpu(5, 1024), FP16, 0)
    assert not is_matrix(on_gpu(5, 1024, device=1), BF16, 0)
    assert not is_matrix(on_gpu(5, 1024, address=8), BF16, 0)
    meta = torch.empty(6, 2048, dtype=BF16, device="meta")
    for view in (meta[:, :1024], meta[::2], meta[:, ::2], meta[:1].expand(6, 2048)):
        assert not is_matrix(OnGpu(view), BF16, 0), view.stride()
    assert is_matrix(OnGpu(meta[2:]), BF16, 0)


# --- devices ---


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_only_hopper_has_the_instructions(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert persistent_gemm.is_hopper.__wrapped__(0) is (capability == (9, 0))


def test_without_a_gpu_there_is_no_hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert persistent_gemm.is_hopper.__wrapped__(0) is False


# --- tensor maps ---


class Encoder:
    """Stands for the driver's encoder: keeps its arguments, numbers the maps that it makes."""

    def __init__(self):
        self.calls, self.status, self.maps = [], 0, []

    def __call__(self, *arguments):
        self.calls.append(arguments)
        self.maps.append(ctypes.create_string_buffer(bytes([len(self.calls)]) * 128, 128))
        return self.status, self

    def getPtr(self):  # noqa: N802 - the driver's name
        return ctypes.addressof(self.maps[-1])


@pytest.fixture
def encoder(monkeypatch):
    fake = Encoder()
    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", fake)
    persistent_gemm._encode_map.cache_clear()
    yield fake
    persistent_gemm._encode_map.cache_clear()  # no made-up map may reach a kernel


def test_what_a_map_says(encoder):
    assert matrix_map(on_gpu(2, 3, 1024, address=4096), 96) == b"\1" * 128
    ((dtype, axes, address, sizes, strides, box, steps, *_),) = encoder.calls
    assert dtype.name == "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16" and (axes, address) == (2, 4096)
    assert [int(n) for n in sizes] == [1024, 6] and [int(n) for n in strides] == [2048]
    assert [int(n) for n in box] == [64, 96] and [int(n) for n in steps] == [1, 1]


def test_a_map_is_made_once_for_what_it_says(encoder):
    shape = (3, 2048)
    first = matrix_map(on_gpu(*shape, address=4096), 128)
    assert matrix_map(on_gpu(1, *shape, address=4096), 128) is first
    others = [
        matrix_map(on_gpu(*shape, address=8192), 128),
        matrix_map(on_gpu(4, 2048, address=4096), 128),
        matrix_map(on_gpu(6, 1024, address=4096), 128),
        matrix_map(on_gpu(*shape, address=4096, dtype=FP16), 128),
        matrix_map(on_gpu(*shape, address=4096), 96),
    ]
    assert len({first, *others}) == 6 == len(encoder.calls)
    assert encoder.calls[4][0].name == "CU_TENSOR_MAP_DATA_TYPE_FLOAT16"


def test_a_map_that_the_driver_refuses_is_an_error_each_time(encoder):
    encoder.status = 1
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no tensor map of 3 x 1024 FLOAT16 at 0x1000: 1"):
            matrix_map(on_gpu(3, 1024, address=4096, dtype=FP16), 128)
