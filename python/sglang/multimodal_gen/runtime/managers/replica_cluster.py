"""Ray as a server sees it: start or join a cluster, deploy the replicas, ask one of them.

Ray Serve routes each request to the less busy of two replicas picked at random, checks their
health, replaces them, scales their number, and restarts them one after another.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.multimodal_gen import environ
from sglang.multimodal_gen.configs.replica_args import ReplicaArgs
from sglang.multimodal_gen.configs.server_args import ServerArgs
from sglang.multimodal_gen.configs.validation import InvalidParameter
from sglang.multimodal_gen.runtime.managers.errors import (
    EngineFailed,
    EngineUnavailable,
    WorkerDied,
)
from sglang.multimodal_gen.runtime.managers.messages import (
    GenerateReply,
    GenerateRequest,
    Preview,
    Progress,
)
from sglang.multimodal_gen.runtime.managers.replica import ONGOING, Replica, ReplicaInfo

logger = logging.getLogger(__name__)

EXTRA = "pip install 'sglang-multimodal-gen[ray]'"
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 1.0, 30.0  # Ray Serve gives a replica up after three failures
UPSCALE_DELAY_S, DOWNSCALE_DELAY_S = 5.0, 300.0
ROUTING_PAUSE_S = 0.25  # at most, between two looks for a free replica; each costs 1 ms of CPU
ABOUT_TIMEOUT_S = 10.0
JOIN_TIMEOUT_S = 10.0
CRASHES_OF_A_START = 3  # then the start has failed


@dataclass(frozen=True)
class ClusterStatus:
    """What Ray Serve says of the replicas."""

    states: dict[str, int]  # "running", "starting", "stopping", ... -> how many
    settled: bool  # all that are wanted run
    failed: bool  # the last deployment was given up
    message: str


class ReplicaCluster:
    """All but `ask` block, and belong to one thread that outlives the cluster: Linux ends what
    Ray started when the thread that started it ends.

    name: of the application on the cluster; a server of the same name takes it over.
    drain_timeout: seconds that a replica which is to end has for its requests.
    """

    def __init__(
        self,
        args: ServerArgs,
        replica_args: ReplicaArgs,
        *,
        name: str,
        request_timeout: float,
        drain_timeout: float,
    ) -> None:
        require_ray()
        self._args, self._replica_args = args, replica_args
        self._name = name
        self._request_timeout, self._drain_timeout = request_timeout, drain_timeout
        self._handle: Any = None

    def connect(self) -> None:
        """Start a cluster on this machine, or join the given one. Raises EngineUnavailable."""
        import ray
        from ray import serve

        joined = self._replica_args.ray_address
        if joined not in (None, "auto"):
            check_reachable(joined)
        own = {"include_dashboard": False, "num_cpus": self._own_cpus()}
        if self._args.device == "cpu":
            own["num_gpus"] = 0
        try:
            ray.init(
                joined or "local",
                logging_level=logging.ERROR,
                runtime_env={"env_vars": environ.given_to_replicas()} if joined else None,
                **({} if joined else own),
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = f"the Ray cluster at {joined}" if joined else "a Ray cluster on this machine"
            raise EngineUnavailable(f"cannot reach {where}: {error}") from error
        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # it warns of every full queue
        # This server is the only door.
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})

    def deploy(self) -> None:
        """Start the replicas; where they run already, replace them one after another. Returns at
        once. Raises EngineUnavailable, also for more replicas than there are GPUs for."""
        from ray import serve
        from ray.exceptions import RayError

        deployment = serve.deployment(Replica, **self._options(self._gpus()))
        application = deployment.bind(self._args, self._request_timeout)
        target = serve.RunTarget(application, name=self._name, route_prefix=None)
        try:
            serve.run_many([target], wait_for_applications_running=False)
            self._handle = serve.get_app_handle(self._name)
        except RayError as error:
            text = f"Ray Serve did not take the replicas: {_last_line(error)}"
            raise EngineUnavailable(text) from error

    def status(self) -> ClusterStatus:
        """How the replicas are."""
        from ray import serve
        from ray.exceptions import RayError

        try:
            application = serve.status().applications.get(self._name)
        except RayError as error:  # Ray replaces Serve's controller as well
            logger.warning("Ray Serve does not tell how the replicas are: %s", _last_line(error))
            return ClusterStatus({}, False, False, "Ray Serve does not answer")
        deployments = list(application.deployments.values()) if application else []
        if not deployments:
            return ClusterStatus({}, False, False, "not deployed yet")
        deployment = deployments[0]
        return ClusterStatus(
            {state.lower(): n for state, n in deployment.replica_states.items() if n},
            application.status.value == "RUNNING",
            application.status.value == "DEPLOY_FAILED",
            _last_line(deployment.message or application.message),
        )

    def about(self) -> list[ReplicaInfo]:
        """What each replica that answers says of itself."""
        from ray.serve.exceptions import RayServeException

        answers = self._handle.broadcast("about")
        try:
            told = answers.results(timeout_s=ABOUT_TIMEOUT_S, return_exceptions=True)
        except (RayServeException, TimeoutError) as error:  # none is known yet, or one hangs
            logger.info("the replicas do not tell of themselves: %s", _last_line(error))
            return []
        return [info for info in told if isinstance(info, ReplicaInfo)]

    async def ask(
        self, request: GenerateRequest, tell: Callable[[Progress | Preview], None]
    ) -> GenerateReply | Exception:
        """Have some replica answer a request; in the event loop. Returns the reply or one of
        ENGINE_ERRORS: WorkerDied when the replica is gone. Cancelled with the caller."""
        from ray.exceptions import RayError, RayTaskError
        from ray.serve.exceptions import RayServeException

        outcome: GenerateReply | Exception = WorkerDied("the replica ended without an answer")
        events = self._handle.options(stream=True).generate.remote(request)
        try:
            async for several in events:
                for event in several:
                    if isinstance(event, Progress | Preview):
                        tell(event)
                    else:
                        outcome = event
        except asyncio.CancelledError:
            events.cancel()
            raise
        except RayTaskError as error:  # a fault of the replica's own code
            return EngineFailed(_last_line(error), type(error.cause).__name__)
        except RayServeException as error:
            return EngineUnavailable(_last_line(error))
        except RayError as error:
            return WorkerDied(f"the replica is gone: {_last_line(error)}")
        return outcome

    def close(self) -> None:
        """End the replicas, and the cluster if it is this server's own. May be called twice."""
        import ray
        from ray import serve
        from ray.exceptions import RayError

        if not ray.is_initialized():
            return
        try:
            if self._replica_args.ray_address is not None:
                serve.delete(self._name)
        except RayError as error:  # the cluster went away first
            logger.warning("Ray Serve did not end the replicas: %s", _last_line(error))
        ray.shutdown()

    def _own_cpus(self) -> int:
        """Cores that an own cluster claims to have: the replicas asked for always fit."""
        return max(os.cpu_count() or 1, self._replica_args.most * self._replica_args.replica_cpus)

    def _gpus(self) -> int:
        """GPUs of one replica: 0 where they run on CPUs."""
        import ray

        there = int(ray.cluster_resources().get("GPU", 0))
        if self._args.device == "cpu" or (self._args.device == "auto" and not there):
            return 0
        needed = self._replica_args.least * self._args.num_gpus
        if needed > there and self._replica_args.ray_address is None:
            text = f"{self._replica_args.least} replicas need {needed} GPUs, found {there}"
            raise EngineUnavailable(f"{text}; ask for fewer --replicas or --num-gpus")
        return self._args.num_gpus

    def _options(self, gpus: int) -> dict[str, Any]:
        replicas = self._replica_args
        number: dict[str, Any] = {"num_replicas": replicas.least}
        if replicas.most > replicas.least:
            bounds = {"min_replicas": replicas.least, "max_replicas": replicas.most}
            delays = {"upscale_delay_s": UPSCALE_DELAY_S, "downscale_delay_s": DOWNSCALE_DELAY_S}
            number = {"autoscaling_config": bounds | delays | {"target_ongoing_requests": ONGOING}}
        return number | {
            "ray_actor_options": {"num_cpus": replicas.replica_cpus, "num_gpus": gpus},
            "max_ongoing_requests": ONGOING,
            "request_router_config": {"max_backoff_s": ROUTING_PAUSE_S},
            "health_check_period_s": HEALTH_PERIOD_S,
            "health_check_timeout_s": HEALTH_TIMEOUT_S,
            "graceful_shutdown_wait_loop_s": 0.2,
            "graceful_shutdown_timeout_s": self._drain_timeout,
            "max_constructor_retry_count": CRASHES_OF_A_START,
            "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        }


def require_ray() -> None:
    """Import Ray Serve, in the main thread, as its signal handlers want it. Raises
    InvalidParameter where it is not installed."""
    environ.set_for_ray()
    try:
        from ray import serve  # noqa: F401
    except ImportError as error:
        text = f"needs Ray Serve, which cannot be imported ({error}); {EXTRA}"
        raise InvalidParameter("replicas", text) from error


def check_reachable(address: str) -> None:
    """Raise EngineUnavailable where nothing listens at host:port: Ray itself would wait for
    minutes there, and hear no signal."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), JOIN_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        text = f"cannot reach the Ray cluster at {address}: {error}; is its head running there?"
        raise EngineUnavailable(text) from error


def _last_line(error: object) -> str:
    """What a traceback ends with; without the name, where the exception is this engine's."""
    line = str(error).strip().rpartition("\n")[2]
    return line.rpartition(f"{EngineUnavailable.__name__}: ")[2]
