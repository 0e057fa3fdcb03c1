"""What the tests of the elementwise CUDA kernels share: hard inputs, poison, comparisons."""

import torch

HALF_DTYPES = (torch.bfloat16, torch.float16)
WIDTHS = (64, 2048, 2240, 2560, 3072, 4096, 8192)
ROWS = (1, 7, 17, 300, 4216)
_BITS = {2: torch.int16, 4: torch.int32}


class OnGpu:
    """Stands for a CUDA tensor at `address`, so that predicates can be tried without a GPU."""

    def __init__(self, meta: torch.Tensor, address: int = 0, device: int = 0):
        self._meta, self._address, self._device = meta, address, device
        self.is_cuda = True

    def __getattr__(self, name):
        return getattr(self._meta, name)

    def get_device(self):
        return self._device

    def data_ptr(self):
        return self._address + self._meta.storage_offset() * self._meta.element_size()


def on_gpu(*shape, dtype=torch.bfloat16, address=0, device=0):
    """A stand-in for a contiguous CUDA tensor."""
    return OnGpu(torch.empty(shape, dtype=dtype, device="meta"), address, device)


def random_bits(*shape, dtype, device="cuda", seed=0):
    """Random bit patterns: every exponent, subnormals, infinities and NaNs."""
    generator = torch.Generator(device=device).manual_seed(seed)
    bits = _BITS[torch.empty(0, dtype=dtype).element_size()]
    info = torch.iinfo(bits)
    values = torch.randint(
        info.min, info.max, shape, generator=generator, dtype=bits, device=device
    )
    return values.view(dtype)


def poison(*shape, dtype, device="cuda"):
    """Fill the block that the allocator hands out next for this size with NaN."""
    torch.full(shape, float("nan"), dtype=dtype, device=device)


def assert_same_bits(actual, expected):
    """Equal shape, dtype and bits: NaN payloads and the signs of zeros too."""
    assert actual.shape == expected.shape, f"{actual.shape} is not {expected.shape}"
    assert actual.dtype == expected.dtype, f"{actual.dtype} is not {expected.dtype}"
    bits = _BITS[expected.element_size()]
    actual_bits, expected_bits = actual.contiguous().view(bits), expected.contiguous().view(bits)
    if not torch.equal(actual_bits, expected_bits):
        wrong = (actual_bits != expected_bits).flatten().nonzero().flatten()
        first = int(wrong[0])
        raise AssertionError(
            f"{len(wrong)} of {expected.numel()} values differ, first at {first}: "
            f"{float(actual.flatten()[first])!r} for {float(expected.flatten()[first])!r}"
        )


def every_value(dtype):
    """All 65536 values, as [1, 64, 1024]."""
    bits = torch.arange(-(2**15), 2**15, device="cuda", dtype=torch.int32).to(torch.int16)
    return bits.view(dtype).view(1, 64, 1024)


def check_replays(fused, reference, cases):
    """A graph captured on the first case gives the others' bits when they are copied into it."""
    static, *others = cases
    fused(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused(*static)
    for fresh in others:
        for tensor, value in zip(static, fresh, strict=True):
            tensor.copy_(value)
        out.fill_(float("nan"))
        graph.replay()
        assert_same_bits(out, reference(*fresh))


def check_two_streams(fused, reference, cases):
    """Calls that run at the same time do not disturb each other."""
    streams, outs = [torch.cuda.Stream() for _ in cases], []
    torch.cuda.synchronize()
    for _ in range(8):
        for stream, case in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                outs.append(fused(*case))
    torch.cuda.synchronize()
    for i, out in enumerate(outs):
        assert_same_bits(out, reference(*cases[i % len(cases)]))
