"""Which CI suite a test file belongs to, said by the file itself.

A test file calls `register_cpu_ci` and / or `register_cuda_ci` at its top level with literal
arguments. `test/run_suite.py` reads the calls from the source by AST, so collecting a suite
imports no test (and no torch); at run time the calls only record what they were given.
"""

import ast
import inspect
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Registration:
    """One file in one suite. `est_time` is in seconds, on the suite's own kind of machine."""

    backend: str  # "cpu" | "cuda"
    suite: str
    est_time: float
    runner_config: str

    def __post_init__(self) -> None:
        if self.est_time <= 0:
            raise ValueError(f"est_time is {self.est_time}; give the file's run time in seconds")


RECORDED: list[Registration] = []


def register_cpu_ci(est_time: float, suite: str) -> Registration:
    """Put the calling test file into the CPU suite `suite`; `est_time` in seconds."""
    return _record(Registration("cpu", suite, est_time, runner_config="cpu"))


def register_cuda_ci(est_time: float, stage: str, runner_config: str) -> Registration:
    """Put the calling test file into the GPU suite named `stage`; `est_time` in seconds.

    `runner_config` names the machine that the file needs, e.g. "1-gpu-large".
    """
    return _record(Registration("cuda", stage, est_time, runner_config))


def _record(registration: Registration) -> Registration:
    RECORDED.append(registration)
    return registration


REGISTRARS = {call.__name__: call for call in (register_cpu_ci, register_cuda_ci)}


def registrations_in(path: Path) -> list[Registration]:
    """The registrations that the source of `path` spells out, without importing it.

    Raises ValueError, naming file and line, for a file that registers nowhere, a call that is
    not a top-level statement, an argument that is not a literal, or wrong arguments.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    top_level = {id(node.value) for node in tree.body if isinstance(node, ast.Expr)}
    calls = [node for node in ast.walk(tree) if _registrar_name(node) in REGISTRARS]
    if not calls:
        raise ValueError(
            f"{path}: registers in no suite; call register_cpu_ci(est_time=…, suite=…) or "
            "register_cuda_ci(est_time=…, stage=…, runner_config=…) at its top level"
        )
    for call in calls:
        if id(call) not in top_level:
            raise ValueError(f"{path}:{call.lineno}: a registration must be a top-level statement")
    return [_evaluate(call, path) for call in calls]


def _registrar_name(node: ast.AST) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    return getattr(node.func, "id", getattr(node.func, "attr", None))


def _evaluate(call: ast.Call, path: Path) -> Registration:
    registrar = REGISTRARS[_registrar_name(call)]
    try:
        args = [ast.literal_eval(arg) for arg in call.args]
        kwargs = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        bound = inspect.signature(registrar).bind(*args, **kwargs).arguments
        if registrar is register_cpu_ci:
            return Registration("cpu", bound["suite"], bound["est_time"], "cpu")
        return Registration("cuda", bound["stage"], bound["est_time"], bound["runner_config"])
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path}:{call.lineno}: {registrar.__name__} takes literal arguments "
            f"{inspect.signature(registrar)} only, so that suites can be read without "
            f"importing tests; got {ast.unparse(call)} ({error})"
        ) from error
