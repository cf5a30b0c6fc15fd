"""Whether this machine has the memory and the disk that a run on it needs."""

import pytest

from launcher.app import preflight
from launcher.app.launch import launch
from launcher.app.preflight import room_faults
from launcher.app.request import Request
from launcher.base.errors import ConfigError
from launcher.base.machine import free_disk_bytes

SAVES = "train.checkpoint_interval=10"


@pytest.fixture
def room(monkeypatch):
    """Has this machine have some memory and room on its disks."""

    def have(*, memory=10**12, disk=10**12):
        monkeypatch.setattr(preflight, "free_memory_bytes", lambda: memory)
        monkeypatch.setattr(preflight, "free_disk_bytes", lambda path: disk)

    return have


def test_ranks_that_need_more_memory_than_this_machine_has_left_are_refused(make_plan, room, tmp_path):
    plan = make_plan()
    needed = plan.node_memory_bytes(plan.world_size)
    room(memory=needed - 1)
    (fault,) = room_faults(plan, tmp_path)
    assert str(fault).startswith("device.memory_bytes=")
    assert "by prediction the ranks on this machine need " in str(fault)
    assert str(fault).endswith(" can be had. End other programs, or have the plan take less.")
    room(memory=needed)
    assert [*room_faults(plan, tmp_path)] == []
    room(memory=None)  # of a system that does not tell
    assert [*room_faults(plan, tmp_path)] == []


def test_who_is_only_warned_of_memory_may_start_all_the_same(make_plan, room, tmp_path):
    room(memory=0)
    assert [*room_faults(make_plan("device.memory_check=warn"), tmp_path)] == []


def test_a_run_directory_without_room_for_a_checkpoint_is_refused(make_plan, room, tmp_path):
    plan = make_plan(SAVES)
    room(disk=12 * plan.num_parameters - 1)
    (fault,) = room_faults(plan, tmp_path)
    assert str(fault).startswith(f"run.dir={tmp_path}: a checkpoint takes about ")
    assert str(fault).endswith(" can be had there. Set run.dir or run.root to another place.")
    room(disk=12 * plan.num_parameters)
    assert [*room_faults(plan, tmp_path)] == []


def test_a_run_that_saves_nothing_needs_no_room_for_a_checkpoint(make_plan, room, tmp_path):
    room(disk=0)
    assert [*room_faults(make_plan(), tmp_path)] == []


def test_a_run_without_room_does_not_start(room, tmp_path, stand_in_corpus):
    room(disk=0)
    words = (f"run.dir={tmp_path}/run", SAVES)
    with pytest.raises(ConfigError, match=r"run\.dir=.*: a checkpoint takes about .* 0 B can be had there"):
        launch(Request(recipe="quickstart", overrides=words))
    assert not (tmp_path / "run").exists()


def test_the_room_of_a_folder_that_is_not_there_yet_is_that_of_the_nearest_one(tmp_path):
    assert free_disk_bytes(f"{tmp_path}/a/b") == pytest.approx(free_disk_bytes(str(tmp_path)), rel=0.1)
