import errno
import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.app import lifecycle
from launcher.app.launch import launch
from launcher.app.progress import reporting_records
from launcher.app.request import Request
from launcher.base import lock
from launcher.base.errors import ConfigError, JobError
from launcher.base.files import read_json
from launcher.cli.main import main
from launcher.contract.alarms.events import read_events
from launcher.contract.inputs.record import Inputs, write_inputs
from launcher.contract.inputs.text import file_digests
from launcher.contract.job import JobState
from launcher.runs.store import RunDirectory, saved_steps


@pytest.fixture
def run(tmp_path, monkeypatch, stand_in_corpus):
    """Runs the quickstart with the processes replaced by an outcome; notes every start."""
    outcome = SimpleNamespace(states=[], starts=[], at_start={})

    def follow(executor, script, stop, on_tick, warn):
        outcome.starts.append(script)
        assert (tmp_path / script.run_dir / "job.sh").is_file(), "the record comes before the first process"
        assert read_json(tmp_path / script.run_dir / "status.json")["phase"] == "running"
        outcome.at_start.get(len(outcome.starts) - 1, lambda: None)()
        on_tick()
        state = outcome.states.pop(0) if outcome.states else JobState(phase="succeeded", exit_code=0)
        if state.phase == "cancelled":
            stop.receive(signal.SIGINT, None)
        return state

    def start(*overrides, **flags):
        words = (f"run.root={tmp_path}/runs", *overrides)
        return launch(Request(recipe="quickstart", overrides=words, **flags)).exit_code

    monkeypatch.setattr(lifecycle, "follow", follow)
    monkeypatch.chdir(tmp_path)
    outcome.start = start
    return outcome


def stored(tmp_path):
    return sorted((tmp_path / "runs").iterdir(), key=lambda path: "baseline" in path.name)


def test_a_run_makes_its_baseline_first_and_names_it(run, tmp_path, capsys):
    assert run.start() == 0
    mine, base = stored(tmp_path)
    assert [script.run_dir for script in run.starts] == [str(base), str(mine)]
    assert read_json(mine / "job.json")["baseline"] == f"../{base.name}"
    assert read_json(base / "job.json")["world_size"] == 1
    assert [read_json(path / "status.json")["phase"] for path in (mine, base)] == ["succeeded"] * 2
    assert f"baseline: the same training on one device, in runs/{base.name}" in capsys.readouterr().out


def test_a_second_run_takes_the_stored_baseline(run, tmp_path, capsys):
    run.start()
    run.start("parallel.pp=4")
    assert len(run.starts) == 3
    assert "an earlier run of the same training on one device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "flags"),
    [(("report.baseline=none",), {}), ((), {"wants_baseline": False}), (("parallel.pp=1",), {})],
)
def test_a_run_that_needs_no_baseline_makes_none(run, tmp_path, overrides, flags):
    assert run.start(*overrides, **flags) == 0
    assert len(run.starts) == 1
    assert read_json(stored(tmp_path)[0] / "job.json")["baseline"] is None


def test_a_failed_rank_gives_exit_code_one_and_its_own_words(run, tmp_path, capsys):
    run.states = [JobState(phase="failed", exit_code=3, reason="ended with exit code 3", rank=1)]
    assert run.start(wants_baseline=False) == 1
    assert capsys.readouterr().err.startswith("rank 1 failed: ended with exit code 3")
    assert read_json(stored(tmp_path)[0] / "status.json")["phase"] == "failed"


KILLED = JobState(phase="failed", exit_code=-9, reason="killed by signal 9 (SIGKILL)", rank=1)
RESTARTS = ("train.checkpoint_interval=5", "executor.max_restarts=2")


def test_ranks_that_fail_are_started_again_from_what_is_saved_by_then(run, tmp_path, capsys):
    def save(step):
        (stored(tmp_path)[0] / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)

    run.states = [KILLED, KILLED, JobState(phase="succeeded", exit_code=0)]
    run.at_start = {1: lambda: save(5)}
    assert run.start(*RESTARTS, wants_baseline=False) == 0
    assert ["--resume" in script.argv for script in run.starts] == [False, False, True]
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("rank 1 killed by signal 9 (SIGKILL)")
    assert lines[first : first + 4] == [
        "rank 1 killed by signal 9 (SIGKILL)",
        "restart 1 of 2: restarts from scratch (no checkpoint)",
        "rank 1 killed by signal 9 (SIGKILL)",
        "restart 2 of 2: resumed after step 5",
    ]
    (path,) = stored(tmp_path)
    assert read_json(path / "status.json")["reason"] == "after 2 restarts"
    assert len(list(path.glob("logs.*"))) == len(list(path.glob("exit.*"))) == 2
    assert (path / "logs").is_dir()


def test_a_restart_says_how_many_steps_are_made_again(run, tmp_path, capsys):
    def make_steps():
        path = stored(tmp_path)[0]
        (path / "checkpoints" / "step-00000005").mkdir(parents=True)
        record = {"type": "step", "step": 11, "loss": 2.0, "num_tokens": 1, "duration_ns": 1}
        (path / "metrics" / "rank-00001.jsonl").write_text(json.dumps(record) + "\n")

    run.states, run.at_start = [KILLED], {0: make_steps}
    run.start(*RESTARTS, wants_baseline=False)
    assert "restart 1 of 2: resumed after step 5; 7 steps repeated\n" in capsys.readouterr().out


def test_a_run_that_fails_each_time_has_failed_after_its_last_restart(run, tmp_path, capsys):
    run.states = [KILLED] * 3
    assert run.start(*RESTARTS, wants_baseline=False) == 1
    assert len(run.starts) == 3
    error = capsys.readouterr().err
    assert error.startswith("rank 1 failed: killed by signal 9 (SIGKILL), after 2 restarts\n")


def test_a_run_that_is_stopped_is_not_started_again(run, tmp_path):
    run.states = [KILLED, JobState(phase="cancelled", exit_code=130, reason="SIGINT")]
    assert run.start(*RESTARTS, wants_baseline=False) == 130
    assert len(run.starts) == 2


def test_a_run_that_is_killed_behind_its_last_save_is_finished_and_not_started_again(run, tmp_path):
    run.states = [KILLED]
    run.at_start = {0: lambda: (stored(tmp_path)[0] / "checkpoints" / "step-00000040").mkdir(parents=True)}
    assert run.start(*RESTARTS, "train.num_steps=40", wants_baseline=False) == 0
    assert len(run.starts) == 1
    assert read_json(stored(tmp_path)[0] / "status.json")["phase"] == "succeeded"


def test_a_run_of_which_one_rank_is_told_to_stop_has_not_succeeded(run, tmp_path, capsys):
    def stop_all():
        (path,) = stored(tmp_path)
        (path / "checkpoints" / "step-00000028").mkdir(parents=True)
        (path / "exit" / "stopped.json").write_text('{"step": 28, "signal": "SIGTERM"}')

    run.at_start = {0: stop_all}
    assert run.start("train.checkpoint_interval=5", wants_baseline=False) == 143
    assert read_json(stored(tmp_path)[0] / "status.json")["phase"] == "cancelled"
    assert capsys.readouterr().err.startswith(
        "stopped by SIGTERM to a rank: all ranks have ended. Run directory"
    )


def test_weights_to_begin_with_that_are_not_there_are_refused_before_the_start(run, tmp_path, capsys):
    folder = tmp_path / "model"
    assert main(["run", "quickstart", f"train.init_from={folder}"]) == 2
    assert capsys.readouterr().err.startswith(f"train.init_from={folder}: has no config.json. Give a folder")
    folder.mkdir()
    (folder / "config.json").touch()
    assert main(["run", "quickstart", f"train.init_from={folder}"]) == 2
    assert "has no model.safetensors, and no model.safetensors.index.json. Give" in capsys.readouterr().err
    assert run.starts == []


def test_a_restart_without_checkpoints_is_refused(run, capsys):
    assert main(["run", "quickstart", "executor.max_restarts=2"]) == 2
    assert capsys.readouterr().err.startswith(
        "executor.max_restarts=2: a restart would have nothing to resume from, since "
        "train.checkpoint_interval is 0. Set train.checkpoint_interval=15, or executor.max_restarts=0."
    )


def test_a_failed_baseline_stops_the_run_and_says_how_to_go_without(run, tmp_path):
    run.states = [JobState(phase="failed", exit_code=1, reason="ended with exit code 1", rank=0)]
    with pytest.raises(JobError, match=r"the baseline failed; --no-baseline runs without it\nrank 0"):
        run.start()
    assert [read_json(path / "status.json")["phase"] for path in stored(tmp_path)] == ["failed"] * 2


def test_ctrl_c_says_where_things_are_and_what_is_saved(run, tmp_path, capsys):
    run.states = [JobState(phase="cancelled", exit_code=130, reason="SIGINT")]
    assert run.start(wants_baseline=False) == 130
    (path,) = stored(tmp_path)
    assert capsys.readouterr().err == (
        f"stopped by SIGINT: all ranks have ended. Run directory: runs/{path.name}\n"
        "Nothing is saved, as train.checkpoint_interval is 0.\n"
    )
    assert read_json(path / "status.json")["phase"] == "cancelled"


def test_ctrl_c_during_the_baseline_starts_nothing_more(run, tmp_path):
    run.states = [JobState(phase="cancelled", exit_code=130, reason="SIGINT")]
    assert run.start() == 130
    assert len(run.starts) == 1
    assert [read_json(path / "status.json")["phase"] for path in stored(tmp_path)] == ["cancelled"] * 2


def test_no_secret_of_the_environment_reaches_the_run_directory(run, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "abc123secret")
    run.start()
    texts = [path.read_text() for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert texts
    assert not any("abc123secret" in text for text in texts)


def test_a_secret_in_what_is_recorded_leaves_nothing_of_a_new_run_and_all_of_a_resumed_one(
    run, tmp_path, monkeypatch
):
    words = (f"run.dir={tmp_path}/mine", "train.checkpoint_interval=5")
    run.states = [JobState(phase="cancelled", exit_code=130, reason="SIGINT")]
    run.start(*words, wants_baseline=False)
    (tmp_path / "mine" / "checkpoints" / "step-00000005").mkdir(parents=True)
    monkeypatch.setenv("WANDB_API_KEY", "canary0123456789")
    for where in ((), words):
        with pytest.raises(JobError, match=r"plan\.json would hold the value of WANDB_API_KEY"):
            run.start(*where, "name=canary0123456789", resume=bool(where), wants_baseline=False)
    assert list((tmp_path / "runs").iterdir()) == []
    assert (tmp_path / "mine" / "checkpoints" / "step-00000005").is_dir()
    assert read_json(tmp_path / "mine" / "status.json")["phase"] == "failed"
    assert len(run.starts) == 1


def test_the_same_directory_twice_is_refused_then_moved_aside(run, tmp_path, capsys):
    directory = f"run.dir={tmp_path}/mine"
    assert run.start(directory, wants_baseline=False) == 0
    assert main(["run", "quickstart", directory, "--no-baseline"]) == 2
    assert "already exists; a run never overwrites a directory" in capsys.readouterr().err
    assert run.start(directory, overwrite=True, wants_baseline=False) == 0
    assert len(list(tmp_path.glob("mine.*"))) == 1


def test_resume_passes_the_flag_to_the_ranks(run, tmp_path):
    words = (f"run.dir={tmp_path}/mine", "train.checkpoint_interval=5")
    run.states = [JobState(phase="cancelled", exit_code=130, reason="SIGINT")]
    run.start(*words, wants_baseline=False)
    (tmp_path / "mine" / "checkpoints" / "step-00000005").mkdir(parents=True)
    assert run.start(*words, resume=True, wants_baseline=False) == 0
    assert ["--resume" in script.argv for script in run.starts] == [False, True]


@pytest.mark.parametrize("word", ["--resume=5", "--resume"])
def test_a_run_goes_on_from_the_step_that_is_named_else_from_the_newest(run, tmp_path, capsys, word):
    words = (f"run.dir={tmp_path}/mine", "train.checkpoint_interval=5")
    run.states = [JobState(phase="cancelled", exit_code=130, reason="SIGINT")]
    run.start(*words, wants_baseline=False)
    for step in (5, 10, 15):
        (tmp_path / "mine" / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    found = []
    run.at_start = {1: lambda: found.extend(saved_steps(tmp_path / "mine"))}
    assert main(["run", "quickstart", *words, word, "--no-baseline"]) == 0
    assert run.starts[1].argv[-1] == "--resume"
    assert found == ([5] if word == "--resume=5" else [5, 10, 15])
    aside = [path.name for path in tmp_path.glob("mine/checkpoints.*/*")]
    told = re.findall(
        r"note: The newer checkpoints after step 10, 15 went to \S*mine/checkpoints\.\S+; their steps are "
        r"made again, and whatever goes on from the newest checkpoint goes on from this line\.\n",
        capsys.readouterr().out,
    )
    assert (sorted(aside), len(told)) == (
        (["step-00000010", "step-00000015"], 1) if found == [5] else ([], 0)
    )


@pytest.mark.parametrize("given", ["x", "0", "-1", "1.5"])
def test_a_step_to_go_on_from_is_a_whole_number(given, capsys):
    assert main(["run", "quickstart", f"--resume={given}"]) == 2
    assert capsys.readouterr().err == (
        f"--resume={given}: must be the step of a checkpoint, a whole number from 1 on.\n"
    )


@pytest.fixture
def interrupted(run, tmp_path):
    """A run with a checkpoint that was stopped, and the words that start it; its text is ``corpus.txt``."""
    (tmp_path / "corpus.txt").write_text("some text " * 40_000)
    words = (f"run.dir={tmp_path}/mine", "data.source=corpus.txt", "train.checkpoint_interval=5")
    run.states = [JobState(phase="cancelled", exit_code=130, reason="SIGINT")]
    run.start(*words, wants_baseline=False)
    (tmp_path / "mine" / "checkpoints" / "step-00000005").mkdir(parents=True)
    files = [tmp_path / "corpus.txt"]  # which the ranks would have written down
    inputs = Inputs(data=file_digests(files, 256), code={}, num_blocks=256)
    write_inputs(tmp_path / "mine", inputs)
    return words


def test_a_run_whose_text_has_changed_is_resumed_when_told_to(run, interrupted, tmp_path, capsys):
    (tmp_path / "corpus.txt").write_text("text some " * 40_000)
    with pytest.raises(
        ConfigError, match=r"data corpus\.txt \(400000 bytes, \w{12} -> 400000 bytes, "
    ) as raised:
        run.start(*interrupted, resume=True, wants_baseline=False)
    assert len(run.starts) == 1
    assert not list(tmp_path.glob("mine/logs.*")), "nothing was moved aside"
    command = str(raised.value).partition("go on all the same: ")[2]
    words = f"run.root={tmp_path}/runs {' '.join(interrupted)}"
    assert command == f"trireme run quickstart {words} --resume --accept-changed-inputs"
    capsys.readouterr()
    assert main([*command.split()[1:], "--no-baseline"]) == 0
    assert run.starts[-1].argv[-1] == "--resume"
    (kept,) = tmp_path.glob("mine/inputs.json*")
    assert kept.name.startswith("inputs.json."), "the ranks write down what there is now"
    assert "inputs.json" not in capsys.readouterr().out


def test_a_run_whose_text_is_as_it_was_is_resumed_and_one_without_a_record_with_a_note(
    run, interrupted, tmp_path, capsys
):
    assert run.start(*interrupted, resume=True, wants_baseline=False) == 0
    assert "inputs.json" not in capsys.readouterr().out
    (tmp_path / "mine" / "inputs.json").unlink()
    RunDirectory(tmp_path / "mine").write_status("failed")
    run.start(*interrupted, resume=True, wants_baseline=False)
    assert "note: mine: the run has no inputs.json with the data and the code" in capsys.readouterr().out


def test_changed_inputs_and_settings_are_told_together(run, interrupted, tmp_path):
    (tmp_path / "corpus.txt").write_text("text some " * 40_000)
    with pytest.raises(ConfigError, match=r"(?s)2 faults:.*seed \(\d+ -> 77\).*data corpus\.txt "):
        run.start(*interrupted, "seed=77", resume=True, wants_baseline=False)


def test_to_accept_changes_without_a_resume_is_refused(capsys):
    assert main(["run", "quickstart", "--accept-changed-inputs"]) == 2
    assert capsys.readouterr().err == (
        "--accept-changed-inputs is about a run that is resumed. Give --resume, too.\n"
    )


def test_everything_that_cannot_be_started_is_refused_at_once_before_anything_is_made(run, tmp_path, capsys):
    words = ["data.source=no/such", "report.baseline=foo", "site=box", f"run.root={tmp_path}/runs"]
    assert main(["run", "quickstart", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("3 faults:\n")
    assert "site.name=box: has no effect on a run on this machine" in error
    assert "data.source=no/such: no such file, relative to" in error
    assert "Check the path. [override data.source=no/such]" in error
    assert "report.baseline=foo: must be auto, none, or the directory of a finished run" in error
    assert not (tmp_path / "runs").exists()


def test_every_setting_of_a_cluster_is_refused_where_nothing_is_reserved(capsys):
    assert main(["run", "quickstart", "site.partition=gpu", "+site.env.A=b"]) == 2
    error = capsys.readouterr().err
    assert "site.partition=gpu: has no effect on a run on this machine" in error
    assert "Leave out site.env, or use trireme submit." in error


SQUEUE = """#!/bin/bash
[ "$*" = '--noheader --jobs=41 --format=%L' ] && echo {left}
"""


@pytest.mark.parametrize(
    ("left", "words", "note"),
    [
        ("0:02", (), "Set train.checkpoint_interval, so that --resume can go on, or ask for a longer time."),
        ("0:02", ("train.checkpoint_interval=5",), "Go on with --resume, or ask for a longer time."),
        ("1:00:00", (), None),
        ("UNLIMITED", (), None),
    ],
)
def test_a_run_that_outlasts_the_allocation_it_is_started_in_is_told_so(
    run, tmp_path, monkeypatch, capsys, left, words, note
):
    (tmp_path / "squeue").write_text(SQUEUE.format(left=left))
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    run.start(*words, wants_baseline=False)
    told = [line for line in capsys.readouterr().out.splitlines() if "which this runs inside of" in line]
    if note is None:
        assert told == []
    else:
        assert told[0].startswith(
            "note: Job 41, which this runs inside of, ends in 2 s, and the run is predicted"
        )
        assert told[0].endswith(f": it would be cut short. {note}")


def test_a_baseline_that_is_no_comparison_is_refused_before_the_training(run, tmp_path, capsys):
    run.start("parallel.pp=1", "run.dir=one")
    assert main(["run", "quickstart", "model.num_layers=2", "report.baseline=one", "run.dir=two"]) == 2
    assert "model.num_layers=2: one has 4, and a speedup compares runs of the same" in capsys.readouterr().err
    assert not (tmp_path / "two").exists()


def test_a_named_baseline_is_used_on_one_rank_too(run, tmp_path):
    run.start("parallel.pp=1", "run.dir=one")
    assert run.start("parallel.pp=1", "run.dir=two", "report.baseline=one") == 0
    assert read_json(tmp_path / "two" / "job.json")["baseline"] == "../one"


def test_a_baseline_that_is_named_and_forbidden_is_refused(run, capsys):
    assert main(["run", "quickstart", "report.baseline=one", "--no-baseline"]) == 2
    assert capsys.readouterr().err == (
        "--no-baseline and report.baseline=one exclude each other: give one.\n"
    )


def test_a_dataset_whose_module_is_nowhere_is_refused_before_anything_is_made(run, tmp_path, capsys):
    assert main(["run", "quickstart", "data=custom", "data.target=planets:build", "run.dir=mine"]) == 2
    assert (
        "data.target=planets:build: no module planets is beside the recipe, in the current folder, or "
        "installed. Put planets.py beside the recipe."
    ) in capsys.readouterr().err
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("flag", ["--resume", "--overwrite"])
def test_flags_about_a_directory_need_one(flag, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "quickstart", flag]) == 2
    assert capsys.readouterr().err == f"{flag} needs the directory it is about. Give run.dir=DIRECTORY.\n"
    assert list(tmp_path.iterdir()) == []


def test_resume_and_overwrite_together_are_refused(capsys):
    assert main(["run", "--resume", "--overwrite"]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_several_nodes_are_refused_before_anything_is_made(run, tmp_path, capsys):
    root = f"run.root={tmp_path}/runs"
    assert main(["run", "quickstart", "cluster.nodes=2", root]) == 2
    assert "cluster.nodes=2" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_records_of_the_rank_with_the_last_stage_stand_for_a_run(make_plan, tmp_path):
    plan = make_plan("parallel.pp=2", "parallel.dp=2", "parallel.tp=2")
    directory = RunDirectory(tmp_path)
    assert reporting_records(directory, plan) == [directory.records(4)]
    assert plan.rank(4).coordinates == (1, 0, 0)
    assert plan.rank(4).stages[-1].has_epilogue


@pytest.mark.parametrize(("mode", "num_ranks"), [("sync", 1), ("async", 3)])
def test_the_records_of_every_worker_stand_for_a_run_that_outlives_any(mode, num_ranks, make_plan, tmp_path):
    servers = ("architecture=parameter_server", f"architecture.mode={mode}", "architecture.servers=2")
    plan = make_plan("parallel.pp=1", "parallel.dp=3", "batch.global_size=12", *servers)
    directory = RunDirectory(tmp_path)
    assert reporting_records(directory, plan) == [directory.records(rank) for rank in range(num_ranks)]


def test_the_stored_plan_is_what_the_plan_verb_prints(run, tmp_path, capsys):
    words = [f"run.root={tmp_path}/runs", "parallel.pp=2"]
    main(["plan", "quickstart", *words, "--json"])
    planned = capsys.readouterr().out
    run.start("parallel.pp=2", wants_baseline=False)
    assert json.loads(planned) == read_json(stored(tmp_path)[0] / "plan.json")


FULL = OSError(errno.ENOSPC, "No space left on device")


def fail_to_write(monkeypatch, name):
    """As on a full disk, from now on."""
    write = Path.write_text

    def refuse(path, text, **words):
        if path.name == f".{name}.unfinished":
            raise OSError(*FULL.args)
        return write(path, text, **words)

    monkeypatch.setattr(Path, "write_text", refuse)


def test_a_disk_that_does_not_take_the_plan_is_named_and_leaves_no_directory(run, tmp_path, monkeypatch):
    fail_to_write(monkeypatch, "plan.json")
    with pytest.raises(OSError, match="No space left on device") as refused:
        run.start("run.dir=mine", wants_baseline=False)
    assert refused.value.filename == str(tmp_path / "mine" / "plan.json")
    assert not (tmp_path / "mine").exists()
    monkeypatch.undo()


def test_how_a_run_ended_is_told_although_it_cannot_be_written(run, tmp_path, monkeypatch, capsys):
    run.states = [JobState(phase="failed", exit_code=3, reason="ended with exit code 3", rank=1)]
    run.at_start = {0: lambda: fail_to_write(monkeypatch, "status.json")}
    assert run.start("run.dir=mine", wants_baseline=False) == 1
    error = capsys.readouterr().err
    assert f"{tmp_path}/mine/status.json: No space left on device\n" in error
    assert "rank 1 failed: ended with exit code 3" in error


def test_a_run_whose_directory_another_start_has_by_now_is_left_to_that(run, tmp_path):
    def take():
        taken = lock.Holder(token="theirs", host="elsewhere", pid=7, since="now")
        (tmp_path / "mine" / "lock").write_bytes(lock._text(taken))

    run.at_start = {0: take}
    with pytest.raises(lock.LostLockError, match="it was taken over by process 7 on elsewhere since now"):
        run.start("run.dir=mine", wants_baseline=False)
    assert read_json(tmp_path / "mine" / "status.json")["phase"] == "running"
    assert lock.holder_of((tmp_path / "mine" / "lock").read_bytes()).token == "theirs"


def test_a_run_gives_its_lock_back(run, tmp_path):
    run.at_start = {0: lambda: run.starts.append((tmp_path / "mine" / "lock").is_file())}
    run.start("run.dir=mine", wants_baseline=False)
    assert run.starts[-1] is True
    assert not (tmp_path / "mine" / "lock").exists()


def test_starts_and_ends_of_a_run_are_events(run, tmp_path):
    run.states = [KILLED, JobState(phase="succeeded", exit_code=0)]
    run.start(*RESTARTS, wants_baseline=False)
    assert [(event.kind, event.rank, event.done) for event in read_events(stored(tmp_path)[0])] == [
        ("start", None, "2 ranks"),
        ("failed", 1, "rank 1 killed by signal 9 (SIGKILL)"),
        ("restart", None, "restart 1 of 2"),
        ("succeeded", None, "after 1 restart"),
    ]


def test_a_run_gives_its_events_to_a_command_and_its_baseline_none(run, tmp_path):
    run.start("parallel.dp=2", f"run.notify=[tee,-a,{tmp_path}/told.jsonl]")
    told = [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]
    assert [each["kind"] for each in told] == ["start", "succeeded"]
    assert not told[0]["run"].endswith("-baseline")
