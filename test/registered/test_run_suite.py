"""The suite runner and the registrations it reads: outcomes, exit codes, JSON, tree hash."""

import json
import subprocess
import sys
import textwrap

import pytest
import run_suite
from run_suite import REGISTERED, ROOT, collect, run_file

from sglang.test.ci import ci_register
from sglang.test.ci.ci_register import (
    Registration,
    register_cpu_ci,
    registrations_in,
)

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

HEADER = "from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci\n"
TOY = 'register_cpu_ci(est_time=1, suite="toy")\n'
TOY_REGISTRATION = Registration("cpu", "toy", 1, "cpu")


@pytest.fixture
def write(tmp_path):
    def write_file(name, body, registration=TOY):
        path = tmp_path / name
        path.write_text(HEADER + registration + textwrap.dedent(body))
        return path

    return write_file


def command(*arguments):
    script = [sys.executable, str(ROOT / "test" / "run_suite.py"), *map(str, arguments)]
    return subprocess.run(script, capture_output=True, text=True, timeout=120)


def outcomes(result):
    return [(test.name.partition("::")[2], test.outcome) for test in result.tests]


# registrations


def test_a_call_records_what_it_was_given():
    assert Registration("cpu", "base-a-test-cpu", 40, "cpu") in ci_register.RECORDED
    record_cuda = ci_register.REGISTRARS["register_cuda_ci"]  # by name it would register this file
    cuda = record_cuda(est_time=3, stage="s", runner_config="1-gpu-large")
    assert cuda == Registration("cuda", "s", 3, "1-gpu-large")
    assert ci_register.RECORDED.pop() == cuda


def test_both_registrations_of_a_file_are_read(write):
    both = TOY + 'register_cuda_ci(60, stage="gpu", runner_config="1-gpu-large")\n'
    assert registrations_in(write("test_x.py", "", both)) == [
        TOY_REGISTRATION,
        Registration("cuda", "gpu", 60, "1-gpu-large"),
    ]


@pytest.mark.parametrize(
    "registration, complaint",
    [
        ("", "registers in no suite"),
        ('SUITE = "toy"\nregister_cpu_ci(est_time=1, suite=SUITE)\n', "x.py:3: .* takes literal"),
        ('register_cpu_ci(est_time=1, suit="toy")\n', "suit"),
        ('register_cpu_ci(suite="toy")\n', "est_time"),
        ('register_cpu_ci(est_time=0, suite="toy")\n', "est_time is 0"),
        ('if True:\n    register_cpu_ci(est_time=1, suite="toy")\n', "top-level statement"),
        ('x = register_cpu_ci(est_time=1, suite="toy")\n', "top-level statement"),
        ('register_cpu_ci(**{"est_time": 1, "suite": "toy"})\n', "literal"),
    ],
)
def test_what_cannot_be_read_is_an_error(write, registration, complaint):
    with pytest.raises(ValueError, match=complaint):
        registrations_in(write("test_x.py", "", registration))


def test_all_bad_files_are_named_at_once(write, tmp_path):
    write("test_a.py", "", "")
    write("test_b.py", "", "register_cpu_ci(est_time=n, suite='toy')\n")
    write("test_c.py", "def broken(:\n")
    with pytest.raises(ValueError) as error:
        collect(tmp_path)
    assert all(name in str(error.value) for name in ("test_a.py", "test_b.py", "test_c.py"))


def test_every_test_file_of_the_project_is_registered():
    suites = collect(REGISTERED)
    assert {"base-a-test-cpu", "base-b-kernel-unit"} <= set(suites)


# one file


def test_outcomes_and_names(write):
    body = """
        import pytest
        def test_pass(): pass
        def test_fail(): assert False
        @pytest.mark.skip
        def test_skip(): pass
        @pytest.fixture
        def broken(): raise RuntimeError
        def test_error(broken): pass
        class TestClass:
            @pytest.mark.parametrize("v", [1, 2])
            def test_method(self, v): pass
        """
    result = run_file(write("test_x.py", body), TOY_REGISTRATION, alone=True)
    assert outcomes(result) == [
        ("test_pass", "passed"),
        ("test_fail", "failed"),
        ("test_skip", "skipped"),
        ("test_error", "failed"),
        ("TestClass::test_method[1]", "passed"),
        ("TestClass::test_method[2]", "passed"),
    ]
    assert "assert False" in result.output


@pytest.mark.parametrize(
    "body, name",
    [
        ("import os\ndef test_x(): os._exit(3)", "<pytest exited with 3>"),
        ("import os, signal\ndef test_x(): os.kill(os.getpid(), 11)", "<pytest exited with -11>"),
        ("def helper(): pass", "<no test ran; a GPU suite needs a GPU>"),
    ],
)
def test_a_file_that_reports_nothing_failed(write, body, name):
    result = run_file(write("test_x.py", body), TOY_REGISTRATION, alone=True)
    assert outcomes(result) == [(name, "failed")]


def test_an_import_error_failed(write):
    result = run_file(write("test_x.py", "import no_such_module"), TOY_REGISTRATION, alone=True)
    assert result.count("failed") == 1 and result.count("passed") == 0
    assert "no_such_module" in result.output


def test_a_hanging_file_is_killed_with_its_children(write, monkeypatch):
    body = """
        import subprocess, time
        def test_hang():
            subprocess.Popen(["sleep", "300"])
            time.sleep(300)
        """
    monkeypatch.setattr(run_suite, "GRACE_S", 1)
    registration = Registration("cpu", "toy", 0.4, "cpu")
    # the sleep holds pytest's output pipe: this returns only if the sleep died too
    result = run_file(write("test_x.py", body), registration, alone=True)
    assert outcomes(result) == [("<killed after 3 s>", "failed")]
    assert result.seconds < 30


def test_a_cpu_suite_leaves_gpu_tests_out(write):
    body = """
        import pytest
        def test_cpu(): pass
        @pytest.mark.cuda
        def test_gpu(): assert False
        """
    result = run_file(write("test_x.py", body), TOY_REGISTRATION, alone=True)
    assert outcomes(result) == [("test_cpu", "passed")]


@pytest.mark.parametrize("alone", [True, False])
def test_files_run_in_parallel_get_one_thread(write, monkeypatch, alone):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    expected = "7" if alone else "1"
    body = f"import os\ndef test_x(): assert os.environ['OMP_NUM_THREADS'] == '{expected}'"
    result = run_file(write("test_x.py", body), TOY_REGISTRATION, alone)
    assert outcomes(result) == [("test_x", "passed")]


# the command


def test_a_clean_run_exits_0_and_ends_with_the_totals(write, tmp_path):
    write("test_a.py", "def test_1(): pass\ndef test_2(): pass\n")
    write("test_b.py", "def test_3(): pass\n")
    done = command("--suite", "toy", "--folder", tmp_path)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "3 passed, 0 failed, 0 skipped"


def test_a_failure_exits_1_shows_why_and_is_in_the_json(write, tmp_path, monkeypatch):
    monkeypatch.setenv("PACKAGE_COMMIT", "0123abc")
    write("test_a.py", "def test_1(): assert 'apple' == 'pear'\n")
    write("test_b.py", "def test_2(): pass\n")
    target = tmp_path / "new" / "kernel_tests.json"
    done = command("--suite", "toy", "--folder", tmp_path, "--json", target)
    assert done.returncode == 1 and "apple" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 passed, 1 failed, 0 skipped"
    content = json.loads(target.read_text())
    assert (content["passed"], content["failed"], content["skipped"]) == (1, 1, 0)
    assert [set(test) for test in content["tests"]] == [{"name", "outcome", "seconds"}] * 2
    assert [test["outcome"] for test in content["tests"]] == ["failed", "passed"]
    assert content["header"]["package_commit"] == "0123abc" and content["header"]["torch"]
    assert len(content["kernels_tree"]) == 40


def test_filter_and_list_choose_files(write, tmp_path):
    write("test_a.py", "def test_1(): pass\n")
    write("test_b.py", "def test_2(): pass\n")
    done = command("--suite", "toy", "--folder", tmp_path, "--filter", "test_b", "--list")
    assert done.returncode == 0
    assert "test_b.py" in done.stdout and "test_a.py" not in done.stdout


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--suite", "toi"], "there are: toy"),
        (["--suite", "toy", "--filter", "zz"], "'zz'"),
        (["--suite", "toy", "--jobs", "-1"], "--jobs: got -1, expected at least 1"),
        (["--suite", "toy", "--json", "/proc/none/x.json"], "expected a folder that can be"),
        (["--suite", "toy", "--json", "/proc"], "got '/proc', expected a file name"),
    ],
)
def test_a_wrong_choice_exits_2_before_any_test(write, tmp_path, arguments, complaint):
    write("test_a.py", "def test_1(): pass\n")
    done = command("--folder", tmp_path, *arguments)
    assert done.returncode == 2 and complaint in done.stderr and not done.stdout


# the tree hash


def test_the_tree_hash_is_gits(tmp_path):
    """The expected value is what git gave for this tree: git add -A && git write-tree."""
    from environment import git_tree_hash  # run_suite has put benchmark/ on the path

    files = {"b.py": "x = 1\n", "b/c.txt": "", "b-d": "é\n", "__pycache__/b.pyc": "cached"}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (tmp_path / "empty").mkdir()
    (tmp_path / "b-d").chmod(0o755)
    assert git_tree_hash(tmp_path).hex() == "bb60ae2d78dc038e9c0f1f81f62945c85cc1f3ff"
