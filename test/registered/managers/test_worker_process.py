"""Where the worker process comes from and when it goes: no orphan, no hang, no torch outside it."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_harness import begun, serving

from sglang.multimodal_gen.runtime.managers.engine_state import EngineState
from sglang.multimodal_gen.runtime.managers.errors import (
    EngineUnavailable,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="base-a-test-cpu")

# A parent that says who its worker is and when it is ready, and never closes it.
PARENT = """
import asyncio, sys
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.runtime.managers.engine_client import EngineClient

async def main():
    args = ServerArgs(model_path=sys.argv[1], device="cpu", log_level="error")
    engine = EngineClient(args, max_queue=1, request_timeout=60)
    await engine.start()
    await asyncio.sleep(0)
    print(engine.worker_pid, flush=True)
    if sys.argv[2] == "leave":
        return
    await engine.wait_ready()
    print("ready", "torch" in sys.modules, flush=True)
    await asyncio.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # a dead one that nobody waits for is no worker


def gone_after(pid, timeout):
    begin = time.perf_counter()
    while alive(pid):
        if time.perf_counter() - begin > timeout:
            os.kill(pid, signal.SIGKILL)
            pytest.fail(f"the worker still lived after {timeout} s")
        time.sleep(0.01)


@pytest.fixture
def parent(folder, tmp_path):
    """Start PARENT with one word more; yields the function and ends what is left."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    started = []

    def start(word):
        command = [sys.executable, str(script), str(folder), word]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1], int(started[-1].stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("ready", [True, False])
def test_a_killed_parent_leaves_no_worker(parent, ready):
    process, pid = parent("stay")
    if ready:
        assert process.stdout.readline().split() == ["ready", "False"]
    else:
        assert alive(pid)
    process.kill()
    gone_after(pid, 5)


def test_a_parent_that_forgets_to_close_neither_hangs_nor_leaves_a_worker(parent):
    process, pid = parent("leave")
    assert process.wait(timeout=20) == 0
    gone_after(pid, 5)


def test_the_worker_outlives_signals_meant_for_the_parent_and_drains(folder):
    with serving(folder) as served:
        engine = served.engine
        served.run(engine.wait_ready())
        pid = engine.worker_pid
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert b"OMP_WAIT_POLICY=passive" in environment
        expected = served.sha(num_inference_steps=30)

        async def work():
            params = served.params(num_inference_steps=30)
            handles = [engine.submit(params, request_id=str(i)) for i in range(3)]
            await begun(handles[0])
            for name in (signal.SIGINT, signal.SIGTERM):
                os.kill(pid, name)
            draining = asyncio.create_task(engine.drain(30))
            await asyncio.sleep(0)
            state = engine.state
            with pytest.raises(EngineUnavailable, match="last requests"):
                engine.submit(params, request_id="late")
            await draining
            return state, [(await h.result()).reports[0]["sha256"] for h in handles]

        assert served.run(work()) == (EngineState.DRAINING, [expected] * 3)
        assert engine.state is EngineState.STOPPED and not alive(pid)
        with pytest.raises(EngineUnavailable, match="closed"):
            engine.submit(served.params(), request_id="after")


def test_a_model_that_cannot_be_loaded_stops_the_engine_with_the_reason(folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    weights = next((broken / "vae").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100])
    with serving(broken) as served:
        with pytest.raises(EngineUnavailable) as refused:
            served.run(served.engine.wait_ready())
        assert served.engine.state is EngineState.STOPPED
        assert served.engine.detail == refused.value.detail != ""
        assert refused.value.__cause__.__notes__[0].startswith("Traceback")
