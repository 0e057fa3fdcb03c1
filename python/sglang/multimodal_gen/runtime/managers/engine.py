"""What the server asks of an engine: one worker process, or many of them on Ray Serve."""

from typing import Protocol

from sglang.multimodal_gen.configs.model_specs import ModelSpec
from sglang.multimodal_gen.configs.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.managers.engine_state import EngineSnapshot, EngineState
from sglang.multimodal_gen.runtime.managers.request_handle import RequestHandle


class Engine(Protocol):
    """Belongs to one event loop; `EngineClient` documents each method."""

    @property
    def state(self) -> EngineState: ...

    @property
    def detail(self) -> str: ...

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def worker_pid(self) -> int | None: ...

    async def start(self) -> None: ...

    async def wait_ready(self) -> None: ...

    def submit(
        self, params: SamplingParams, *, request_id: str, previews: int = 0
    ) -> RequestHandle: ...

    def snapshot(self) -> EngineSnapshot: ...

    async def drain(self, timeout_s: float) -> None: ...

    async def close(self) -> None: ...
