import json
import re
from pathlib import Path

import pytest

from launcher.base.errors import ConfigError, JobError
from launcher.contract.job import RunConfig
from launcher.runs import store
from launcher.runs.resume import put_back, resumed_directory, set_aside_newer
from launcher.runs.store import RunDirectory, new_directory, saved_steps


@pytest.fixture(autouse=True)
def fixed_time(monkeypatch):
    monkeypatch.setattr(store, "_stamp", lambda: "20250102-030405")


def settings(directory):
    return RunConfig(dir=str(directory), root="runs", timeout_s=1.0, start_timeout_s=1.0)


def plan(num_steps=40, **config):
    return {"config": {"train": {"num_steps": num_steps}, **config}, "stages": [{"num_layers": 4}]}


@pytest.fixture
def interrupted(tmp_path):
    """A run of 40 steps that was stopped after 20."""
    directory = new_directory(settings(tmp_path / "mine"), "x")
    directory.write("plan.json", json.dumps(plan(seed=0, parallel={"tp": 1})))
    directory.write_status("cancelled", exit_code=130)
    (directory.path / "checkpoints" / "step-00000020").mkdir(parents=True)
    (directory.path / "checkpoints" / "step-00000040.unfinished").mkdir()
    (directory.path / "exit" / "rank-0.json").write_text("{}")
    directory.release()
    return directory


def resume(directory, **config):
    return taken(directory, plan(**config))


def taken(path, new):
    """The directory, prepared for a start that has ended by now."""
    directory = resumed_directory(settings(path), json.dumps(new))
    directory.release()
    return directory


def test_resume_takes_the_directory_and_sets_the_last_attempt_aside(interrupted):
    directory = resume(interrupted.path, seed=0, parallel={"tp": 1})
    assert directory == RunDirectory(interrupted.path)
    assert list((directory.path / "exit").iterdir()) == []
    assert (directory.path / "exit.20250102-030405" / "rank-0.json").is_file()


def test_resume_with_other_settings_names_them_with_both_values(interrupted):
    with pytest.raises(
        ConfigError,
        match=r"run\.dir=.*/mine: cannot resume: settings that change what is trained differ: "
        r"seed \(0 -> null\), train\.num_steps \(40 -> 30\)\. Give those",
    ):
        resume(interrupted.path, num_steps=30, parallel={"tp": 2})


def test_the_layout_may_change_and_the_records_of_other_ranks_are_set_aside(interrupted):
    (interrupted.path / "metrics" / "rank-00001.jsonl").write_text("{}")
    new = plan(seed=0, parallel={"tp": 2}, batch={"micro_size": 4}) | {"mesh": {"tp": 2}, "stages": []}
    directory = taken(interrupted.path, new)
    assert list((directory.path / "metrics").iterdir()) == []
    assert (directory.path / "metrics.20250102-030405" / "rank-00001.jsonl").is_file()


def test_under_the_same_layout_the_records_are_continued(interrupted):
    (interrupted.path / "metrics" / "rank-00001.jsonl").write_text("{}")
    directory = resume(interrupted.path, seed=0, parallel={"tp": 1})
    assert (directory.path / "metrics" / "rank-00001.jsonl").is_file()


@pytest.mark.parametrize(
    "free",
    [
        {"run": {"dir": "./mine/", "timeout_s": 60}},
        {"report": {"baseline": "none", "warmup_steps": 1}},
        {"site": {"time_limit": "24:00:00"}},
        {"executor": {"name": "slurm"}},
        {"name": "again"},
        {"data": {"cache_dir": "/elsewhere"}},
        {"train": {"num_steps": 40, "eval_interval": 5, "eval_batches": 2, "checkpoint_interval": 9}},
    ],
)
def test_where_a_run_is_kept_and_how_it_is_started_may_change(interrupted, free):
    assert resume(interrupted.path, seed=0, parallel={"tp": 1}, **free).path == interrupted.path


def test_predictions_may_change(interrupted):
    new = plan(seed=0, parallel={"tp": 1}) | {"memory": [1], "notes": ["so"], "schedule": {"step_s": 2.0}}
    assert taken(interrupted.path, new).path == interrupted.path


def test_a_copy_that_was_moved_is_resumed_where_it_is(interrupted):
    copy = interrupted.path.rename(interrupted.path.with_name("copy"))
    assert resume(copy, seed=0, parallel={"tp": 1}, run={"dir": str(copy)}).path == copy


def test_resume_of_nothing_is_refused(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"run\.dir=.*/none: holds no plan\.json, so there is nothing to resume\. "
        r"Give run\.dir the directory of an earlier run, or leave out --resume\.",
    ):
        resume(tmp_path / "none")


@pytest.mark.parametrize("name", ["n" * 300, "a\0b"])
def test_resume_of_a_name_that_no_file_can_have_is_refused_alike(tmp_path, name):
    with pytest.raises(ConfigError, match=r"holds no plan\.json"):
        resume(tmp_path / name)


@pytest.mark.parametrize("data", [b"", b"garbage", b"\xff\x00", b"[]", b"{}", b'{"config": 3}', b"null"])
def test_a_damaged_plan_is_refused_without_a_traceback(interrupted, data):
    interrupted.plan.write_bytes(data)
    with pytest.raises(
        ConfigError,
        match=r"its plan\.json is damaged, .*\. Start again with --overwrite, or with another run\.dir\.",
    ):
        resume(interrupted.path)


def test_resume_without_a_checkpoint_says_how_to_have_one(interrupted):
    (interrupted.path / "checkpoints" / "step-00000020").rmdir()
    with pytest.raises(
        JobError, match=r"no checkpoint to resume from\. Set train\.checkpoint_interval and start"
    ):
        resume(interrupted.path, seed=0, parallel={"tp": 1})


def with_checkpoints(directory, *steps):
    for step in steps:
        (directory.path / "checkpoints" / f"step-{step:08d}").mkdir(exist_ok=True)
    return directory


def resume_at(directory, step, **config):
    new = json.dumps(plan(seed=0, parallel={"tp": 1}, **config))
    return resumed_directory(settings(directory.path), new, step=step)


def test_a_step_without_a_checkpoint_is_refused_with_those_that_have_one(interrupted):
    with_checkpoints(interrupted, 10, 30)
    with pytest.raises(
        JobError,
        match=r"^--resume=15: .*/mine has no checkpoint after step 15\. Those that it has are after step 10, "
        r"20, 30\.$",
    ):
        resume_at(interrupted, 15)
    assert saved_steps(interrupted.path) == [10, 20, 30]


@pytest.mark.parametrize("step", [10, 20])
def test_a_finished_run_goes_back_to_a_step_that_is_named(interrupted, step):
    with_checkpoints(interrupted, 10, 40).write_status("succeeded", exit_code=0)
    assert resume_at(interrupted, step) == interrupted


def test_behind_its_last_step_there_is_nothing_to_go_on_with(interrupted):
    with_checkpoints(interrupted, 40)
    with pytest.raises(JobError, match=r"is finished: 40 of 40 steps"):
        resume_at(interrupted, 40)


def test_newer_checkpoints_leave_the_line_and_are_kept(interrupted):
    with_checkpoints(interrupted, 10, 30, 40)
    aside = interrupted.path / "checkpoints.20250102-030405"
    assert set_aside_newer(interrupted, 20) == ([30, 40], aside)
    assert saved_steps(interrupted.path) == [10, 20]
    assert sorted(path.name for path in aside.iterdir()) == ["step-00000030", "step-00000040"]
    assert set_aside_newer(interrupted, 20) == ([], None)


def test_newer_checkpoints_are_put_back_where_they_were(interrupted):
    with_checkpoints(interrupted, 10, 30, 40)
    newer, aside = set_aside_newer(interrupted, 20)
    assert aside is not None
    put_back(interrupted, newer, aside)
    assert saved_steps(interrupted.path) == [10, 20, 30, 40]
    assert not list(interrupted.path.glob("checkpoints.*"))


def test_a_line_that_is_cut_off_while_it_is_set_aside_has_no_gap(interrupted, monkeypatch):
    with_checkpoints(interrupted, 10, 30, 40)
    rename, moved = Path.rename, list[str]()

    def once(path, target):
        if moved:
            raise KeyboardInterrupt
        moved.append(path.name)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", once)
    with pytest.raises(KeyboardInterrupt):
        set_aside_newer(interrupted, 10)
    assert saved_steps(interrupted.path) == [10, 20, 30]


def finish_by_status(directory):
    directory.write_status("succeeded", exit_code=0)


def finish_by_checkpoint(directory):
    (directory.path / "checkpoints" / "step-00000040").mkdir()


@pytest.mark.parametrize("finish", [finish_by_status, finish_by_checkpoint])
def test_a_finished_run_is_not_started_for_no_step(interrupted, finish):
    finish(interrupted)
    with pytest.raises(
        JobError, match=r"/mine is finished: 40 of 40 steps\. See it with: trireme report .*/mine$"
    ):
        resume(interrupted.path, seed=0, parallel={"tp": 1})
    assert (interrupted.path / "exit" / "rank-0.json").is_file()
    assert interrupted.status().phase == "succeeded", "its state says so from then on, too"


COSINE = {"decay": "cosine", "decay_steps": None}


@pytest.mark.parametrize("finish", [lambda directory: None, finish_by_status, finish_by_checkpoint])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"decay": "constant"}, {"decay": "constant"}),
        (COSINE | {"decay_steps": 90}, COSINE | {"decay_steps": 90}),
        (COSINE, COSINE | {"decay_steps": 40}),
        ({"decay": "linear"}, {"decay": "linear", "decay_steps": 40}),
    ],
)
def test_more_steps_are_made_where_the_learning_rates_before_stay(interrupted, before, after, finish):
    interrupted.write("plan.json", json.dumps(plan(optim=before)))
    finish(interrupted)
    assert resume(interrupted.path, num_steps=50, optim=after) == interrupted


@pytest.mark.parametrize(
    ("before", "after", "num_steps", "told"),
    [
        (COSINE, COSINE, 50, "train.num_steps (40 -> 50; optim.decay_steps=40 keeps the learning rates)"),
        (COSINE, COSINE | {"decay_steps": 50}, 50, "train.num_steps (40 -> 50; optim.decay_steps=40 keeps"),
        (COSINE | {"decay_steps": 90}, COSINE | {"decay_steps": 80}, 50, "optim.decay_steps (90 -> 80)"),
        (COSINE, COSINE | {"decay_steps": 41}, 40, "optim.decay_steps (40 -> 41)"),
        ({"decay": "constant"}, {"decay": "constant"}, 39, "train.num_steps (40 -> 39)"),
        ({"decay": "constant"}, COSINE, 50, "optim.decay (constant -> cosine)."),
    ],
)
def test_steps_that_change_the_learning_rates_before_are_another_training(
    interrupted, before, after, num_steps, told
):
    interrupted.write("plan.json", json.dumps(plan(optim=before)))
    with pytest.raises(ConfigError, match=rf"is trained differ: .*{re.escape(told)}"):
        resume(interrupted.path, num_steps=num_steps, optim=after)


WSD = {
    **{"name": "adamw", "lr": 1.0, "weight_decay": 0.0, "clip_norm": None, "warmup_steps": 2, "decay": "wsd"},
    **{"min_lr_fraction": 0.0, "decay_steps": None, "cooldown_steps": 5},
}


@pytest.mark.parametrize(
    ("after", "num_steps"),
    [(WSD, 50), (WSD | {"cooldown_steps": 9}, 40), (WSD | {"decay_steps": 45}, 60)],
    ids=["more steps", "a longer cooldown", "another end"],
)
def test_a_decay_that_has_not_begun_may_be_moved(interrupted, after, num_steps):
    interrupted.write("plan.json", json.dumps(plan(optim=WSD)))
    assert resume(interrupted.path, num_steps=num_steps, optim=after) == interrupted


@pytest.mark.parametrize(
    ("cooldown", "after", "num_steps", "told"),
    [
        (35, {"cooldown_steps": 35}, 50, "train.num_steps (40 -> 50; optim.decay_steps=40 keeps"),
        (35, {"cooldown_steps": 12}, 40, "optim.cooldown_steps (35 -> 12)"),
        (5, {"cooldown_steps": 36}, 40, "optim.cooldown_steps (5 -> 36)"),
    ],
)
def test_a_decay_that_has_begun_stays_where_it_is(interrupted, cooldown, after, num_steps, told):
    interrupted.write("plan.json", json.dumps(plan(optim=WSD | {"cooldown_steps": cooldown})))
    with pytest.raises(ConfigError, match=rf"is trained differ: .*{re.escape(told)}"):
        resume(interrupted.path, num_steps=num_steps, optim=WSD | after)


@pytest.mark.parametrize("is_exact", [True, False])
def test_the_architecture_may_change_where_both_compute_what_one_device_computes(interrupted, is_exact):
    old = plan(architecture={"name": "decentralized"}) | {"exact": True}
    new = plan(architecture={"name": "parameter_server", "servers": 2}) | {"exact": is_exact}
    interrupted.write("plan.json", json.dumps(old))
    if is_exact:
        assert taken(interrupted.path, new) == interrupted
        return
    with pytest.raises(ConfigError, match=r"architecture\.name \(decentralized -> parameter_server\)"):
        taken(interrupted.path, new)
