"""Run one suite of the registered tests, each file in its own pytest process.

    python test/run_suite.py --suite base-a-test-cpu
    python test/run_suite.py --suite base-b-kernel-unit --json kernel_tests.json

Files say which suites they are in (`sglang.test.ci.ci_register`); collecting reads them by AST.
A separate process per file keeps one file's crash, hang or process-wide switch from the others.
"""

import argparse
import concurrent.futures
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benchmark")]

from environment import check_result_file, kernels_tree, write_result_file  # noqa: E402

from sglang.test.ci.ci_register import Registration, registrations_in  # noqa: E402

REGISTERED = ROOT / "test" / "registered"
GRACE_S = 60
NO_TESTS_RAN = 5  # pytest's exit code
SLOWEST_SHOWN = 5
OUTPUT_LINES_SHOWN = 60
LIVE: set[subprocess.Popen] = set()  # killed when the run is interrupted


@dataclass(frozen=True)
class TestOutcome:
    """One test: `name` is its pytest id, `outcome` one of passed, failed, skipped."""

    name: str
    outcome: str
    seconds: float


@dataclass(frozen=True)
class FileResult:
    """One file's run; `output` is pytest's, shown when something failed."""

    file: str
    tests: tuple[TestOutcome, ...]
    seconds: float
    output: str

    def count(self, outcome: str) -> int:
        return sum(test.outcome == outcome for test in self.tests)


SuiteFile = tuple[Path, Registration]


def collect(folder: Path) -> dict[str, list[SuiteFile]]:
    """Every suite's files, found under `folder`; raises ValueError listing all bad files."""
    suites: dict[str, list[SuiteFile]] = {}
    problems = []
    for path in sorted(folder.rglob("test_*.py")):
        try:
            for registration in registrations_in(path):
                suites.setdefault(registration.suite, []).append((path, registration))
        except SyntaxError as error:
            problems.append(f"{path}:{error.lineno}: {error.msg}")
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    return suites


def run_file(path: Path, registration: Registration, alone: bool) -> FileResult:
    """Run one file under a time limit derived from its est_time."""
    limit_s = GRACE_S + 5 * registration.est_time  # est_time is for an idle machine
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        exit_code, output = _run_pytest(path, registration, report, limit_s, alone)
        tests = _read_report(report, _relative(path))
    failed = any(test.outcome == "failed" for test in tests)
    seconds = time.monotonic() - begin
    if exit_code != 0 and not failed or not tests:
        tests += (TestOutcome(f"{_relative(path)}::<{_why(exit_code, limit_s)}>", "failed", 0.0),)
    return FileResult(_relative(path), tests, seconds, output)


def _run_pytest(
    path: Path, registration: Registration, report: Path, limit_s: float, alone: bool
) -> tuple[int | None, str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    command += [f"--junitxml={report}", "-o", "junit_family=xunit1"]
    if registration.backend == "cpu":
        command += ["-m", "not cuda"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=_environment(alone),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that a kill takes the test's own children along
    )
    LIVE.add(process)
    try:
        output = process.communicate(timeout=limit_s)[0]
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]
    finally:
        LIVE.discard(process)


def _environment(alone: bool) -> dict[str, str]:
    paths = [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return environment if alone else environment | {"OMP_NUM_THREADS": "1"}


def _read_report(report: Path, file: str) -> tuple[TestOutcome, ...]:
    if not report.exists():  # killed, or pytest could not start
        return ()
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return tuple(_outcome(case, file) for case in cases)


def _outcome(case: ElementTree.Element, file: str) -> TestOutcome:
    tags = {child.tag for child in case}
    outcome = "failed" if tags & {"failure", "error"} else "passed"
    if outcome == "passed" and "skipped" in tags:
        outcome = "skipped"
    # classname is the dotted path of the file, then the names of the classes around the test
    class_name = f".{case.get('classname')}.".partition(f".{Path(file).stem}.")[2].strip(".")
    name = "::".join(filter(None, (file, class_name, case.get("name"))))
    return TestOutcome(name, outcome, round(float(case.get("time", 0)), 3))


def _why(exit_code: int | None, limit_s: float) -> str:
    if exit_code is None:
        return f"killed after {limit_s:.0f} s"
    if exit_code in (0, NO_TESTS_RAN):
        return "no test ran; a GPU suite needs a GPU"
    return f"pytest exited with {exit_code}"


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()


def run_suite(files: list[SuiteFile], jobs: int) -> list[FileResult]:
    """Run the files, `jobs` at a time, longest first; print a line as each one ends."""
    files = sorted(files, key=lambda item: -item[1].est_time)
    results = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        pending = [pool.submit(run_file, *item, jobs == 1) for item in files]
        try:
            for done in concurrent.futures.as_completed(pending):
                results.append(done.result())
                _print_file(results[-1], f"[{len(results)}/{len(files)}]")
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in tuple(LIVE):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return results


def _print_file(result: FileResult, position: str) -> None:
    passed, failed, skipped = (result.count(name) for name in ("passed", "failed", "skipped"))
    verdict = "FAIL" if failed else "ok  "
    counts = f"{passed} passed, {failed} failed, {skipped} skipped, {result.seconds:.1f} s"
    print(f"{position} {verdict} {result.file}: {counts}", flush=True)
    if failed:
        print("\n".join(result.output.splitlines()[-OUTPUT_LINES_SHOWN:]), flush=True)


def _print_summary(results: list[FileResult], totals: Counter) -> None:
    print("\nslowest files:")
    for result in sorted(results, key=lambda result: -result.seconds)[:SLOWEST_SHOWN]:
        print(f"  {result.seconds:7.1f} s  {result.file}")
    failed = [test.name for result in results for test in result.tests if test.outcome == "failed"]
    if failed:
        print("failed:\n  " + "\n  ".join(failed))
    print("{passed} passed, {failed} failed, {skipped} skipped".format(**totals), flush=True)


def _write_json(path: Path, suite: str, results: list[FileResult], totals: Counter) -> None:
    tests = [test for result in sorted(results, key=lambda r: r.file) for test in result.tests]
    body = {"suite": suite, "kernels_tree": kernels_tree(), **totals}
    write_result_file(path, body | {"tests": [asdict(test) for test in tests]})


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", required=True, help="e.g. base-a-test-cpu")
    parser.add_argument("--filter", default="", help="only files whose path has this text")
    parser.add_argument("--jobs", type=int, help="files at a time (CPU suites: 2, GPU suites: 1)")
    parser.add_argument("--json", type=Path, help="write every test's outcome to this file")
    parser.add_argument("--list", action="store_true", help="print the files and stop")
    parser.add_argument(
        "--without-gpu", action="store_true", help="run a GPU suite's CPU tests; no --json"
    )
    parser.add_argument("--folder", type=Path, default=REGISTERED, help="where to look for tests")
    arguments = parser.parse_args()
    if arguments.jobs is not None and arguments.jobs < 1:
        parser.error(f"--jobs: got {arguments.jobs}, expected at least 1")
    if arguments.json and arguments.without_gpu:
        parser.error("--json: got it with --without-gpu, expected a run on a GPU")
    return arguments


def _require_gpu() -> None:
    """Raise ValueError on a machine where every test of a GPU suite would be left out."""
    import torch  # not at the top: listing a suite must not wait for it

    if not torch.cuda.is_available():
        raise ValueError(
            "got no CUDA GPU, expected one for this suite; --without-gpu runs its CPU tests alone"
        )


def _select(arguments: argparse.Namespace) -> list[SuiteFile]:
    suites = collect(arguments.folder.resolve())
    if arguments.suite not in suites:
        known = ", ".join(sorted(suites)) or "none"
        raise ValueError(f"no suite named {arguments.suite!r} is registered; there are: {known}")
    files = [item for item in suites[arguments.suite] if arguments.filter in _relative(item[0])]
    if not files:
        raise ValueError(f"no file of {arguments.suite} has {arguments.filter!r} in its path")
    return files


def main() -> int:
    arguments = _parse_arguments()
    try:
        files = _select(arguments)
        if files[0][1].backend == "cuda" and not (arguments.list or arguments.without_gpu):
            _require_gpu()
        if arguments.json:
            check_result_file(arguments.json)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.list:
        print("\n".join(f"{_relative(path)}  est {reg.est_time} s" for path, reg in files))
        return 0
    jobs = arguments.jobs or (1 if files[0][1].backend == "cuda" else 2)
    results = run_suite(files, jobs)
    totals = Counter({"passed": 0, "failed": 0, "skipped": 0})
    totals.update(test.outcome for result in results for test in result.tests)
    _print_summary(results, totals)
    if arguments.json:
        _write_json(arguments.json, arguments.suite, results, totals)
    return 1 if totals["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
