"""Settings of several engines, and what is said where Ray is missing."""

import subprocess
import sys

import pytest

from sglang.multimodal_gen.configs.replica_args import ReplicaArgs
from sglang.multimodal_gen.configs.validation import InvalidParameter
from sglang.multimodal_gen.runtime.managers.replica_cluster import require_ray
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")


@pytest.mark.parametrize(
    "given,wanted,bounds",
    [
        ({}, False, (1, 1)),
        ({"replica_cpus": 4}, False, (1, 1)),
        ({"replicas": 1}, True, (1, 1)),
        ({"replicas": 3}, True, (3, 3)),
        ({"replicas": 2, "max_replicas": 4}, True, (2, 4)),
        ({"max_replicas": 4}, True, (1, 4)),
        ({"ray_address": "auto"}, True, (1, 1)),
        ({"ray_address": "head.example:6379"}, True, (1, 1)),
        ({"ray_address": "[::1]:6379"}, True, (1, 1)),
    ],
)
def test_when_ray_is_used_and_with_how_many(given, wanted, bounds):
    args = ReplicaArgs.from_kwargs(**given)
    assert args.wanted is wanted and (args.least, args.most) == bounds


@pytest.mark.parametrize(
    "given,field",
    [
        ({"replicas": 0}, "replicas"),
        ({"replicas": 2.5}, "replicas"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas"),
        ({"replica_cpus": 0}, "replica_cpus"),
        ({"ray_address": "http://head:6379"}, "ray_address"),
        ({"ray_address": "head"}, "ray_address"),
        ({"replica": 2}, "replica"),
    ],
)
def test_a_bad_setting_is_named(given, field):
    with pytest.raises(InvalidParameter) as raised:
        ReplicaArgs.from_kwargs(**given)
    assert raised.value.field == field


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    with pytest.raises(InvalidParameter, match=r"replicas: .*pip install .*\[ray\]"):
        require_ray()


def test_a_server_without_replicas_imports_no_ray():
    code = (
        "import sys\n"
        "from sglang.multimodal_gen.runtime.entrypoints import server_loop\n"
        "assert not {'ray', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
