"""The worker process on a GPU: warm when ready, byte-equal, stopped in a step, alive after OOM."""

import statistics

import pytest
from engine_harness import begun, serving, sha_of

from sglang.multimodal_gen import DiffGenerator
from sglang.multimodal_gen.runtime.managers.errors import EngineFailed, RequestCancelled
from sglang.multimodal_gen.runtime.managers.messages import Preview
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=90, stage="base-b-kernel-unit", runner_config="1-gpu-large")
pytestmark = pytest.mark.cuda

LARGE = dict(width=1024, height=1024)
MEMORY_FRACTION = 0.02  # room for LARGE, on a GPU of 80 GiB too, but not for 4096x4096


@pytest.fixture(scope="module")
def served():
    """The bundled model on the GPU, with a part of its memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"per_process_memory_fraction:{MEMORY_FRACTION}")
        with serving(device="cuda", request_timeout=120) as served:
            served.run(served.engine.wait_ready())
            yield served


@pytest.fixture(scope="module")
def local():
    with DiffGenerator.from_pretrained(device="cuda", log_level="warning") as generator:
        yield generator


def test_ready_means_that_kernels_are_built_and_sites_verified(served):
    before = served.engine.snapshot()
    replies = [served.run(served.ask(width=None, height=None)) for _ in range(2)]
    assert before.device == "cuda:0"
    assert states(before.sites) == states(replies[1].reports[0]["sites"])
    assert "verified" in states(before.sites).values()
    assert replies[0].seconds < 2 * replies[1].seconds + 0.1  # the first pays for nothing


def states(sites):
    return {site["op"]: site["status"] for site in sites}


@pytest.mark.parametrize("quality", ["lossless", "high"])
@pytest.mark.parametrize("size", [{}, LARGE])
def test_the_bytes_are_those_of_the_generator(served, local, quality, size):
    asked = dict(prompt="a fox", num_inference_steps=6, quality=quality, **size)
    expected = local.generate(**asked).report["sha256"]

    async def previewed():
        sizes = {"width": None, "height": None, **asked}
        handle = served.engine.submit(served.params(**sizes), request_id="p", previews=3)
        events = [event async for event in handle.events()]
        return [e for e in events if isinstance(e, Preview)], await handle.result()

    previews, reply = served.run(previewed())
    assert [preview.step for preview in previews] == [2, 3, 5]
    assert sha_of(reply.images[0].pixels) == reply.reports[0]["sha256"] == expected
    assert served.sha(**{"width": None, "height": None, **asked}) == expected


def test_a_cancel_takes_a_step_and_leaves_no_trace(served):
    size = dict(num_inference_steps=4, **LARGE)
    reply = served.run(served.ask(**size))
    step_s = statistics.median(reply.reports[0]["step_seconds"])

    async def work():
        params = served.params(num_inference_steps=1000, **LARGE)
        handle = served.engine.submit(params, request_id="b")
        await begun(handle)
        handle.cancel()
        with pytest.raises(RequestCancelled):
            await handle.result()

    served.run(work())
    free_after = served.until(lambda: not served.engine.snapshot().running, timeout=30)
    assert free_after < 3 * step_s + 0.25  # the host is at most a step ahead of the GPU
    assert served.sha(**size) == reply.reports[0]["sha256"]


def test_out_of_memory_is_an_error_and_the_next_picture_is_the_same(served):
    sha, pid = served.sha(), served.engine.worker_pid
    with pytest.raises(EngineFailed, match="out of memory.*smaller picture") as failed:
        served.sha(width=4096, height=4096, num_inference_steps=1)
    assert failed.value.kind == "oom"
    assert served.sha() == sha
    assert served.sha(**LARGE) and served.engine.worker_pid == pid
