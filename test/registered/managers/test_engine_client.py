"""Requests through the worker process: the bytes, the order, previews, ends before the end."""

import asyncio
import time
from pathlib import Path
from random import Random

import pytest
from engine_harness import LONG, begun, sha_of

from sglang.multimodal_gen import SamplingParams
from sglang.multimodal_gen.configs.validation import InvalidParameter
from sglang.multimodal_gen.runtime.managers.engine_state import EngineState
from sglang.multimodal_gen.runtime.managers.errors import QueueFull, RequestCancelled
from sglang.multimodal_gen.runtime.managers.messages import Preview, Progress
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=45, suite="base-a-test-cpu")


def test_the_bytes_are_those_of_the_generator(served, local):
    results = local.generate(**served_request(), return_frames=True)
    reply = served.run(served.ask(**served_request()))
    assert [sha_of(image.pixels) for image in reply.images] == [
        sha_of(result.frames) for result in results
    ]
    assert [image.seed for image in reply.images] == [7, 8, 9, 10]
    assert [image.prompt for image in reply.images] == ["a", "a", "b", "b"]


def served_request():
    return dict(
        prompt=["a", "b"],
        num_outputs_per_prompt=2,
        seed=7,
        width=96,
        height=64,
        num_inference_steps=2,
    )


def test_the_report_is_that_of_the_generator(served, local):
    mine = served.run(served.ask()).reports[0]
    theirs = local.generate(prompt="a fox", width=64, height=64, num_inference_steps=2).report
    differs = {key for key in theirs if mine[key] != theirs[key]}
    assert mine.keys() == theirs.keys()
    assert differs <= {"stage_seconds", "step_seconds", "peak_memory_mb"}


def test_requests_run_in_the_order_they_came(served):
    async def work():
        done, handles = [], []
        for seed in range(5):
            params = served.params(seed=seed)
            handles.append(served.engine.submit(params, request_id=str(seed)))
        snapshot = served.engine.snapshot()

        async def note(handle):
            reply = await handle.result()
            done.append((handle.request_id, reply.reports[0]["sha256"]))

        await asyncio.gather(*map(note, reversed(handles)))
        return snapshot, done

    snapshot, done = served.run(work())
    assert (snapshot.running, snapshot.queue_depth) == (1, 4)
    assert [name for name, _ in done] == ["0", "1", "2", "3", "4"]
    assert [sha for _, sha in done] == [served.sha(seed=seed) for seed in range(5)]
    assert served.engine.snapshot().running == served.engine.snapshot().queue_depth == 0


def test_a_full_queue_refuses_and_says_when_to_come_back(served):
    async def work():
        handles = [served.engine.submit(served.params(**LONG), request_id=str(i)) for i in range(9)]
        with pytest.raises(QueueFull) as refused:
            served.engine.submit(served.params(), request_id="one too many")
        for handle in handles:
            handle.cancel()
        return refused.value

    error = served.run(work())
    assert error.waiting == 8 and 1 <= error.retry_after_s <= 60
    served.until(lambda: not served.engine.snapshot().running, timeout=10)


def test_progress_has_one_event_a_step(served):
    async def work():
        params = served.params(num_inference_steps=6, num_outputs_per_prompt=2)
        handle = served.engine.submit(params, request_id="x")
        return [event async for event in handle.events()]

    events = served.run(work())
    assert all(isinstance(event, Progress) for event in events)
    for image in ("denoise 1/2", "denoise 2/2"):
        steps = [(event.done, event.total) for event in events if event.label == image]
        assert steps == [(i, 6) for i in range(1, 7)]


@pytest.mark.parametrize("count, steps", [(1, [3]), (3, [2, 3, 5]), (9, [1, 2, 3, 4, 5])])
def test_previews_are_spaced_and_change_nothing(served, count, steps):
    async def work():
        params = served.params(num_inference_steps=6, num_outputs_per_prompt=2)
        handle = served.engine.submit(params, request_id="p", previews=count)
        events = [event async for event in handle.events()]
        return [event for event in events if isinstance(event, Preview)], await handle.result()

    previews, reply = served.run(work())
    for index in (0, 1):
        assert [p.step for p in previews if p.image_index == index] == steps
    assert {(p.request_id, p.total, p.pixels.shape) for p in previews} == {("p", 6, (64, 64, 3))}
    shas = [report["sha256"] for report in reply.reports]
    plain = served.run(served.ask(num_inference_steps=6, num_outputs_per_prompt=2))
    assert shas == [report["sha256"] for report in plain.reports]
    assert not set(shas) & {sha_of(preview.pixels) for preview in previews}


def test_a_cancelled_request_leaves_no_trace(served):
    before = served.sha(), served.sha(quality="high")

    async def work(quality):
        handle = served.engine.submit(served.params(**LONG, quality=quality), request_id="b")
        first = await begun(handle)
        handle.cancel()
        with pytest.raises(RequestCancelled):
            await handle.result()
        handle.cancel()  # again, and nothing happens
        return first

    for quality in ("lossless", "high"):
        assert served.run(work(quality)).total == 1000
        free_after = served.until(lambda: not served.engine.snapshot().running, timeout=10)
        assert free_after < 1  # of 1000 steps that would take several seconds
        assert (served.sha(), served.sha(quality="high")) == before


def test_a_cancelled_request_in_the_queue_is_never_begun(served):
    async def work():
        first = served.engine.submit(served.params(num_inference_steps=20), request_id="1")
        second = served.engine.submit(served.params(**LONG), request_id="2")
        third = served.engine.submit(served.params(), request_id="3")
        second.cancel()
        with pytest.raises(RequestCancelled):
            await second.result()
        depth = served.engine.snapshot().queue_depth
        events = [event async for event in second.events()]
        await first.result()
        return depth, events, (await third.result()).reports[0]["sha256"]

    begin = time.perf_counter()
    depth, events, sha = served.run(work())
    assert (depth, events) == (1, [])
    assert sha == served.sha() and time.perf_counter() - begin < 10


def test_one_id_twice_is_no_confusion(served):
    """Clients choose ids: cancelling one request must not reach the next of the same name."""

    async def work():
        first = served.engine.submit(served.params(**LONG), request_id="same")
        second = served.engine.submit(served.params(), request_id="same")
        await begun(first)
        first.cancel()
        return (await second.result()).reports[0]["sha256"]

    assert served.run(work()) == served.sha()


def test_the_workers_refusal_keeps_its_type_and_field(served):
    async def work():
        params = served.params(generator_device="cuda")
        await served.engine.submit(params, request_id="x").result()

    with pytest.raises(InvalidParameter, match="generator_device: got 'cuda'") as refused:
        served.run(work())
    assert refused.value.field == "generator_device"
    assert served.engine.state is EngineState.READY


def test_a_callers_own_cancellation_leaves_the_request_running(served):
    async def work():
        handle = served.engine.submit(served.params(num_inference_steps=20), request_id="x")
        waiter = asyncio.create_task(handle.result())
        await begun(handle)
        waiter.cancel()
        await asyncio.wait([waiter])
        return waiter.cancelled(), (await handle.result()).reports[0]["sha256"]

    cancelled, sha = served.run(work())
    assert cancelled and sha == served.sha(num_inference_steps=20)


def test_a_mixed_load_loses_and_changes_nothing(served):
    """Requests of several shapes, some with previews, some cancelled in the queue or at work."""
    random, shapes = Random(0), [(64, 64), (96, 64), (64, 128)]
    asked = [
        dict(seed=i % 4, width=w, height=h, num_inference_steps=random.choice([1, 3]))
        for i in range(40)
        for w, h in [random.choice(shapes)]
    ]
    alone = {key_of(request): served.sha(**request) for request in asked}
    places = asyncio.Semaphore(8)

    async def client(request, previews, wait):
        async with places:
            params = served.params(**request)
            handle = served.engine.submit(params, request_id="x", previews=previews)
            if wait is not None:
                await asyncio.sleep(wait)
                handle.cancel()
            try:
                reply = await handle.result()
            except RequestCancelled:
                return "cancelled"
            return reply.reports[0]["sha256"] == alone[key_of(request)]

    waits = [random.choice([None, None, 0, 0.02, 0.1]) for _ in asked]

    async def work():
        previews = [random.choice([0, 2]) for _ in asked]
        return await asyncio.gather(*map(client, asked, previews, waits))

    for outcome, wait in zip(served.run(work()), waits, strict=True):
        assert outcome is True or (outcome == "cancelled" and wait is not None)
        assert outcome == "cancelled" or wait != 0
    served.until(lambda: not served.engine.snapshot().running, timeout=10)
    assert served.sha(**asked[0]) == alone[key_of(asked[0])]


def key_of(request):
    return tuple(request.items())


def test_figures_add_up(served):
    before = served.engine.snapshot()
    reply = served.run(served.ask(num_outputs_per_prompt=2))
    after = served.engine.snapshot()
    assert after.requests["finished"] == before.requests["finished"] + 1  # two images, one request
    took = reply.reports[0]["stage_seconds"]["DenoisingStage"]
    grown = after.stage_seconds["DenoisingStage"] - before.stage_seconds["DenoisingStage"]
    assert grown == pytest.approx(took, rel=1e-9)
    assert list(after.sites) == reply.reports[0]["sites"]
    assert after.restarts == 0 and after.device == "cpu" and after.peak_memory_mb > 100


def test_memory_stays_flat(served):
    size = dict(width=256, height=256, num_inference_steps=1)

    async def work(count):
        for _ in range(count):
            params = SamplingParams(prompt="a fox", **size).fit(served.engine.spec)
            handle = served.engine.submit(params, request_id="x", previews=1)
            await handle.result()

    def least_mb():
        """The allocator keeps a buffer of 10 to 30 MB for a while now and then; a leak would raise
        the least of some readings as it would each of them."""
        readings = []
        for _ in range(8):
            served.run(work(1))
            readings.append(resident_mb(served.engine.worker_pid))
        return min(readings)

    served.run(work(20))
    before = least_mb()
    served.run(work(50))
    # 50 pictures of 192 KiB would be 9.4 MiB, their latents and activations far more.
    assert least_mb() - before < 5


def resident_mb(pid):
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * 4096 / 2**20
