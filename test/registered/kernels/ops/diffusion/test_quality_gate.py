"""The high tier's switch: all-or-nothing mounts, reject reasons, one log line."""

import copy
import logging

import pytest
from torch import nn

from sglang.kernels.ops.diffusion.quality_gate import QualityGatedFusion
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

LOGGER = "sglang.kernels.ops.diffusion.quality_gate"


@pytest.fixture
def fusion():
    return QualityGatedFusion(name="toy fusion", marker_attr="_toy", enabled_attr="_toy_on")


@pytest.fixture
def model(fusion):
    root = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))
    fusion.mark(root[0], linear_name="first")
    fusion.mark(root[2][0], linear_name="second")
    return root


@pytest.fixture(autouse=True)
def log_info(caplog):
    caplog.set_level(logging.INFO, logger=LOGGER)


def enabled(fusion, root):
    return [fusion.is_enabled(site) for site in fusion.iter_sites(root)]


def test_sites_start_unmounted_and_keep_their_metadata(fusion, model):
    assert enabled(fusion, model) == [False, False]
    assert fusion.metadata(model[0]) == {"linear_name": "first"}
    assert list(fusion.iter_sites(model)) == [model[0], model[2][0]]
    assert not fusion.is_enabled(model[1])


def test_the_root_itself_can_be_a_site(fusion):
    root = nn.Linear(2, 2)
    fusion.mark(root)
    assert fusion.mount(root) and fusion.is_enabled(root)


def test_metadata_of_an_unmarked_module_raises(fusion, model):
    with pytest.raises(ValueError, match="ReLU is not marked as a site of toy fusion"):
        fusion.metadata(model[1])


def test_marking_leaves_the_state_dict_alone(fusion, model):
    assert set(model.state_dict()) == {"0.weight", "0.bias", "2.0.weight", "2.0.bias"}


def test_mount_enables_all_and_logs_one_line(fusion, model, caplog):
    assert fusion.mount(model) is True
    assert enabled(fusion, model) == [True, True]
    assert [record.getMessage() for record in caplog.records] == [
        "Mounted toy fusion for quality=high"
    ]
    assert fusion.last_reject is None


def test_mounting_twice_logs_once(fusion, model, caplog):
    assert fusion.mount(model) and fusion.mount(model)
    assert enabled(fusion, model) == [True, True] and len(caplog.records) == 1


def test_a_new_mount_after_unmount_logs_again(fusion, model, caplog):
    fusion.mount(model)
    fusion.unmount(model)
    assert enabled(fusion, model) == [False, False]
    fusion.mount(model)
    assert len(caplog.records) == 2


def test_the_mount_message_can_be_given(caplog):
    fusion = QualityGatedFusion(
        name="x", marker_attr="_x", enabled_attr="_x_on", mount_message="Mounted x (why)"
    )
    root = nn.Linear(2, 2)
    fusion.mark(root)
    fusion.mount(root)
    assert caplog.records[0].getMessage() == "Mounted x (why)"


def test_a_root_without_sites_is_not_mounted(fusion, caplog):
    assert fusion.mount(nn.Sequential(nn.ReLU())) is False
    assert fusion.last_reject == "no module is marked for toy fusion" and not caplog.records


def test_one_rejected_site_leaves_all_unmounted(fusion, model, caplog):
    def reject_second(site, metadata):
        return "weight is int8" if metadata["linear_name"] == "second" else None

    assert fusion.mount(model, reject_second) is False
    assert enabled(fusion, model) == [False, False]
    assert fusion.last_reject == "2.0: weight is int8" and not caplog.records


def test_the_reject_reason_sees_site_and_metadata(fusion, model):
    seen = []
    fusion.mount(model, lambda site, metadata: seen.append((site, metadata["linear_name"])))
    assert seen == [(model[0], "first"), (model[2][0], "second")]


def test_a_rejected_remount_unmounts(fusion, model):
    fusion.mount(model)
    assert fusion.mount(model, lambda site, metadata: "offloaded") is False
    assert enabled(fusion, model) == [False, False]
    assert fusion.mount(model) and fusion.last_reject is None


def test_an_exception_in_the_reject_reason_leaves_nothing_enabled(fusion, model):
    fusion.mount(model)

    def broken(site, metadata):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fusion.mount(model, broken)
    assert enabled(fusion, model) == [False, False]


def test_two_fusions_on_one_module_are_independent(fusion, model):
    other = QualityGatedFusion(name="other", marker_attr="_other", enabled_attr="_other_on")
    other.mark(model[0])
    other.mount(model)
    assert other.is_enabled(model[0]) and enabled(fusion, model) == [False, False]


def test_a_copy_of_a_model_mounts_on_its_own(fusion, model):
    twin = copy.deepcopy(model)
    fusion.mount(twin)
    assert enabled(fusion, twin) == [True, True] and enabled(fusion, model) == [False, False]
