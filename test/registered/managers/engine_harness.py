"""Engines with a worker process of their own, for tests that are not coroutines."""

import asyncio
import contextlib
import hashlib
import time

import pytest

from sglang.multimodal_gen import SamplingParams
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.managers.engine_client import EngineClient

READY_S = 120  # on a busy machine the imports alone take a while
PICTURE = dict(prompt="a fox", width=64, height=64, num_inference_steps=2)
LONG = {**PICTURE, "num_inference_steps": 1000}


class Served:
    """An engine in an event loop of its own, which turns while `run` or `until` does."""

    def __init__(self, folder=None, device="cpu", num_gpus=1, **settings):
        self.runner = asyncio.Runner()
        path = None if folder is None else str(folder)  # None: the bundled model
        args = ServerArgs(model_path=path, device=device, num_gpus=num_gpus, log_level="warning")
        settings = {"max_queue": 8, "request_timeout": 60, **settings}
        self.engine = EngineClient(args, **settings)

    def run(self, coroutine, timeout=READY_S):
        return self.runner.run(asyncio.wait_for(coroutine, timeout))

    def start(self):
        self.run(self.engine.start())
        return self

    def until(self, condition, timeout=READY_S):
        """Let the loop turn until `condition()`; returns the seconds it took."""

        async def poll():
            begin = time.perf_counter()
            while not condition():
                await asyncio.sleep(0.005)
            return time.perf_counter() - begin

        return self.run(poll(), timeout)

    def close(self):
        self.run(self.engine.close())
        self.runner.close()

    def params(self, **changes):
        return SamplingParams(**{**PICTURE, **changes}).fit(self.engine.spec)

    async def ask(self, **changes):
        """The reply to one request that is the only one."""
        return await self.engine.submit(self.params(**changes), request_id="asked").result()

    def sha(self, **changes):
        return self.run(self.ask(**changes)).reports[0]["sha256"]


async def begun(handle):
    """Wait until the worker is in the denoising loop; returns the first step's event."""
    async for event in handle.events():
        if event.label.startswith("denoise"):
            return event


def sha_of(pixels):
    return hashlib.sha256(pixels.tobytes()).hexdigest()


@contextlib.contextmanager
def serving(folder=None, **settings):
    """An engine whose worker computes like this process: with one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        served = Served(folder, **settings)
        try:
            yield served.start()
        finally:
            served.close()
