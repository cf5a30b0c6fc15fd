"""The application layer as a program calls it: values in, values out, no words of a command line."""

import ast
import io
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import launcher.app
from launcher.app import lifecycle, wait
from launcher.app.launch import launch, submit
from launcher.app.lifecycle import origin_of, prepared
from launcher.app.output import Output
from launcher.app.planning import make_plan
from launcher.app.request import Request
from launcher.app.sweep.planning import plan_sweep, reset_runs
from launcher.app.sweep.run import retry_sweep, run_sweep, train_points
from launcher.app.sweep.store import read_sweep
from launcher.app.sweep.tables import with_results
from launcher.base.errors import ConfigError, JobError, LauncherError
from launcher.contract.job import JobState
from launcher.contract.plan import sha256
from launcher.runs.claim import claimed
from launcher.runs.state import current_state
from launcher.runs.store import RunDirectory

FAILED = JobState(phase="failed", exit_code=3, reason="ended with exit code 3", rank=1)


@pytest.fixture
def output():
    return Output(out=io.StringIO(), err=io.StringIO())


@pytest.fixture
def ends(tmp_path, monkeypatch, stand_in_corpus):
    """How runs end, by a part of their directory's path; their processes are not started."""
    found: dict[str, JobState] = {}

    def follow(executor, script, stop, on_tick, warn):
        succeeded = JobState(phase="succeeded", exit_code=0)
        return next((state for part, state in found.items() if part in script.run_dir), succeeded)

    monkeypatch.setattr(lifecycle, "follow", follow)
    monkeypatch.chdir(tmp_path)
    return found


def asked(*overrides, **ways):
    return Request(recipe="quickstart", overrides=overrides, wants_baseline=False, **ways)


def test_a_program_runs_a_recipe_and_is_given_the_run_and_its_end(ends, tmp_path, output, capsys):
    ended = launch(asked("run.dir=mine"), output)
    assert ended.directory.path == tmp_path / "mine"
    assert (ended.state.phase, ended.exit_code) == ("succeeded", 0)
    assert current_state(ended.directory) == ended.state
    assert "run directory: mine\ntraining on 2 ranks\n" in output.out.getvalue()
    assert output.err.getvalue() == ""
    assert capsys.readouterr() == ("", ""), "nothing is printed beside the output that was given"


def test_a_program_runs_a_recipe_in_a_thread_that_is_given_no_signals(ends, output):
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(launch, asked("run.dir=mine"), output).result()
    assert ended.state.phase == "succeeded"


def test_a_run_that_failed_says_why_on_the_stream_for_what_goes_wrong(ends, output, capsys):
    ends["mine"] = FAILED
    ended = launch(asked("run.dir=mine"), output)
    assert (ended.state, ended.exit_code) == (FAILED, 1)
    assert output.err.getvalue().startswith("rank 1 failed: ended with exit code 3\n")
    assert capsys.readouterr() == ("", "")


def test_a_program_sees_what_would_be_submitted_before_anything_is_made(ends, tmp_path, output, capsys):
    run = submit(asked("run.dir=mine", "cluster.devices_per_node=4", dry_run=True), output)
    assert run.directory.path == tmp_path / "mine"
    assert output.out.getvalue() == run.script.text
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_a_program_plans_a_sweep_runs_it_and_reads_what_came_of_every_point(ends, output, capsys):
    request = asked("parallel.pp=1,2,3", "run.dir=mine")
    planned = plan_sweep(request)
    assert [(point.label, point.plan.world_size) for point in planned.points] == [("pp=1", 1), ("pp=2", 2)]
    assert [point.faults[0].path for point in planned.refused] == ["parallel.pp"]
    ends["pp_2"] = FAILED
    done = run_sweep(request, output)
    sweep = done.sweep
    assert sweep is not None
    assert done.exit_code == 1
    states = {point.label: point.state_text for point in with_results(sweep)}
    assert states == {"pp=1": "succeeded", "pp=2": "failed"}
    assert [point.label for point in read_sweep(sweep.path).points] == ["pp=1", "pp=2"]
    ends.clear()
    again = retry_sweep(sweep, asked(), output)
    assert again.exit_code == 0
    assert {point.state_text for point in with_results(sweep)} == {"succeeded"}
    assert "2 points: 2 succeeded" in output.out.getvalue()
    assert capsys.readouterr() == ("", "")


def test_the_points_of_an_older_version_are_retried_with_the_plan_that_their_ranks_read(ends, output):
    ends["pp_2"] = FAILED
    sweep = run_sweep(asked("parallel.pp=1,2", "run.dir=mine"), output).sweep
    assert sweep is not None
    directory = sweep.points[1].directory
    stored = directory.plan.read_text()
    old = stored.replace("launcher.runtime.process.rank:run", "launcher.runtime.rank:run")
    assert old != stored
    directory.write("plan.json", old)
    with pytest.raises(
        JobError, match="was planned by another version of trireme-launcher, which its frozen"
    ):
        reset_runs(with_results(sweep)[1:], asked(), output, sweep.path)
    assert directory.plan.read_text() == old
    ends.clear()
    assert retry_sweep(sweep, asked(), output).exit_code == 0
    assert directory.plan.read_text() == stored
    assert f"--sha256 \\\n  {sha256(stored)}" in (directory.path / "job.sh").read_text()


def test_what_stood_for_an_earlier_start_of_a_run_does_not_stand_for_the_next(ends, output):
    run = launch(asked("run.dir=mine"), output)
    run.directory.write("handle.json", json.dumps({"executor": "slurm", "id": "7"}))
    planned = make_plan("quickstart", ["run.dir=mine"]).plan
    prepared(planned, run.directory).record(origin_of("quickstart"))
    assert not run.directory.handle.exists()


def test_a_run_that_cannot_be_ended_leaves_none_of_the_others_going(monkeypatch, tmp_path):
    ended = []

    def end(directory):
        if directory.path.name == "a":
            raise LauncherError("a: cancel it there")
        ended.append(directory.path.name)

    monkeypatch.setattr(wait, "_end", end)
    with pytest.raises(JobError, match=r"^a: cancel it there$"):
        wait.end_runs([RunDirectory(tmp_path / name) for name in "abc"])
    assert ended == ["b", "c"]


def test_a_sweep_of_which_no_point_can_run_makes_nothing(ends, tmp_path, output):
    done = run_sweep(asked("parallel.pp=3,5", "run.dir=mine"), output)
    assert (done.sweep, done.exit_code) == (None, 2)
    assert "2 refused" in output.out.getvalue()
    assert list(tmp_path.iterdir()) == []


def test_what_contradicts_itself_is_refused_whoever_asks(ends, output):
    with pytest.raises(LauncherError, match=r"--resume goes on with a run and --overwrite starts anew: give"):
        asked(resume=True, overwrite=True)
    with pytest.raises(LauncherError, match=r"^--overwrite needs the directory it is about\. Give run\.dir="):
        launch(asked(overwrite=True), output)
    with pytest.raises(ConfigError, match=r"^executor\.name=slurm: does not start ranks on this machine\."):
        launch(asked("executor=slurm"), output)


def test_only_the_output_prints():
    for path in Path(launcher.app.__file__).parent.rglob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        prints = any(isinstance(call, ast.Name) and call.id == "print" for call in calls)
        assert prints == (path.name == "output.py"), path


def test_a_sweep_that_another_process_runs_is_not_retried(ends, output):
    ends["pp_2"] = FAILED
    sweep = run_sweep(asked("parallel.pp=1,2", "run.dir=mine"), output).sweep
    assert sweep is not None
    lease = claimed(sweep.path, output.say)
    with pytest.raises(
        JobError, match=rf"mine is in use by process {os.getpid()} on .*, which has not ended"
    ):
        retry_sweep(sweep, asked(), output)
    lease.release()
    assert retry_sweep(sweep, asked(), output).exit_code == 1
    assert not list(sweep.path.rglob("lock"))


def test_a_point_that_another_process_has_taken_fails_and_is_left_to_it(ends, output, monkeypatch):
    ends["pp_2"] = FAILED
    sweep = run_sweep(asked("parallel.pp=1,2", "run.dir=mine"), output).sweep
    assert sweep is not None
    directory, claims = sweep.points[1].directory, []
    ends.clear()

    def taken(*runs, **words):
        claims.append(claimed(directory.path, output.say))
        return train_points(*runs, **words)

    monkeypatch.setattr("launcher.app.sweep.run.train_points", taken)
    assert retry_sweep(sweep, asked(), output).exit_code == 1
    assert f"is in use by process {os.getpid()}" in output.err.getvalue()
    assert directory.status().phase == "prepared"
    claims[0].release()
