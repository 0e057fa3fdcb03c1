"""What the tests of the q and k head kernels share: inputs, views, comparisons, graphs, streams."""

import torch

BF16, FP16 = torch.bfloat16, torch.float16
STRIDED_VIEWS = (
    lambda x: x.transpose(1, 2)[:, :, :40],
    lambda x: x[:1].expand(3, -1, -1, -1),
    lambda x: x[:, :, :1].expand(-1, -1, 4, -1),
    lambda x: x[:, 3::7],
    lambda x: x[:, :, 1::2],
    lambda x: x[..., 64:],
    lambda x: x[1:, 299:, 3:],
)  # of [2, 300, 4, 128]


def stream(batch, tokens, heads, head_dim, dtype=BF16, device="cuda", seed=0, chunks=1):
    """q, k, q_weight, k_weight; `chunks` > 1: q and k are views of a packed GEMM output."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    width = heads * head_dim
    if chunks == 1:
        q, k = normal(batch, tokens, width), normal(batch, tokens, width)
    else:
        q, k = normal(batch, tokens, chunks * width).chunk(chunks, dim=-1)[-2:]
    q, k = (x.unflatten(-1, (heads, head_dim)) for x in (q, k))
    return q, k, 1 + 0.5 * normal(head_dim), 1 + 0.5 * normal(head_dim)


def assert_same(actual, expected):
    """Every bit equal, NaN payloads aside."""
    for got, want in zip(actual, expected, strict=True):
        assert got.is_contiguous() and got.shape == want.shape and got.dtype == want.dtype
        assert torch.equal(got.isnan(), want.isnan())
        wrong = int(
            (got.nan_to_num(0).view(torch.int16) != want.nan_to_num(0).view(torch.int16)).sum()
        )
        assert wrong == 0, f"{wrong} of {want.numel()} values differ"


def check_replays(fused, reference, static, rest, fresh):
    """A captured graph reads new q and k from where the captured ones were."""
    fused(*static, *rest)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = fused(*static, *rest)
    for values in fresh:
        for tensor, value in zip(static, values, strict=True):
            tensor.copy_(value)
        for out in outputs:
            out.fill_(float("nan"))
        graph.replay()
        assert_same(outputs, reference(*static, *rest))


def check_two_streams(fused, reference, cases):
    """Calls that run at the same time do not disturb each other."""
    expected = [reference(*case) for case in cases]
    torch.cuda.synchronize()
    queues, results = [torch.cuda.Stream() for _ in cases], [None for _ in cases]
    for _ in range(5):
        for number, (queue, case) in enumerate(zip(queues, cases, strict=True)):
            with torch.cuda.stream(queue):
                results[number] = fused(*case)
    torch.cuda.synchronize()
    for got, want in zip(results, expected, strict=True):
        assert_same(got, want)


def far_apart(batch, tokens, heads, head_dim):
    """q and k of 2 tokens, more than 2^31 elements apart, to be filled."""
    assert (batch, tokens) == (1, 2)
    buffer = torch.empty(2**31 + 2**20, dtype=BF16, device="cuda")
    shape, strides = (batch, tokens, heads, head_dim), (8, 2**31, head_dim, 1)
    return buffer.as_strided(shape, strides), buffer.as_strided(shape, strides, 2**19)


# Of the two ops with a half-split rotation: whether they take a head size, and what they reject.
HALF_SPLIT_DIMS = [(8, False), (16, True), (24, False), (32, True), (40, False), (64, True),
                   (96, False), (128, True), (136, False), (256, False)]  # fmt: skip


def rejected_heads(q, k):
    """{why: (q, k)} that neither takes, made from ones that they take."""
    shifted = torch.empty(q.numel() + 1, dtype=BF16, device=q.device)[1:].view(q.shape)
    return {
        "float32": (q.float(), k.float()),
        "two dtypes": (q, k.half()),
        "three axes": (q[0], k[0]),
        "no batch": (q[:0], k[:0]),
        "unaligned": (shifted, shifted),
        "two layouts": (q, k.transpose(0, 1).contiguous().transpose(0, 1)),
        "two shapes": (q, k[:, 1:]),
        "129 heads": tuple(x[:, :, :1].expand(-1, -1, 129, -1) for x in (q, k)),
        "every other channel": (q[..., ::2], k[..., ::2]),
        "channels of k apart": (q, k.repeat_interleave(2, -1)[..., ::2]),
    }
