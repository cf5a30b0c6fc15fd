"""The file of run.prometheus: its format, its figures, and who writes it when."""

import json
import math
import os
import stat
from pathlib import Path

import pytest

from launcher.app.beside.exporter import Exporter, beside, write_for_all
from launcher.app.beside.figures import Family, Figures, text_of
from launcher.app.beside.on_node import phase_at_end
from launcher.base.errors import ConfigError
from launcher.base.files import unfinished_path
from launcher.contract.alarms.events import Event, append, now
from launcher.contract.job import JobState
from launcher.runs.render import render
from launcher.runs.store import RunDirectory
from launcher.typed.read import plain
from tests.helpers.fake_runs import FakeRun, write_records
from tests.helpers.prometheus_text import samples_of
from tests.helpers.slurm_stage import TWO_BY_TWO
from tests.helpers.waiting import wait_until


@pytest.fixture
def made(make_plan, tmp_path):
    """The directory, with quotes in its name, and the plan of a run whose rank has recorded nothing yet."""
    plan = make_plan(
        "cluster.devices_per_node=1", "parallel.pp=1", "train.num_steps=6", "run.prometheus=run.prom"
    )
    directory = RunDirectory(tmp_path / 'a "run"')
    (directory.path / "metrics").mkdir(parents=True)
    directory.write("plan.json", plan.to_json())
    checkouts = [{"commit": None}, {"commit": "5eed"}]
    directory.write("job.json", json.dumps({"recipe": "llama", "checkouts": checkouts}))
    directory.write_status("running")
    write_records(directory.path, 0, [])
    return directory, plan


def recorded(directory, eval_loss=None, last_loss=2.5):
    """Six steps of 100 ms and 128 tokens."""
    records = [plain(record) for record in FakeRun(eval_loss=eval_loss).records(0)]
    next(each for each in records if each.get("step") == 5)["loss"] = last_loss
    write_records(directory.path, 0, records)


def value(samples, name, **labels):
    (found,) = [
        value
        for (each, pairs), value in samples.items()
        if each == f"trireme_run_{name}" and labels.items() <= dict(pairs).items()
    ]
    return found


# The format


@pytest.mark.parametrize("hostile", ['a"b', "a\\b", "a\nb", "a\\nb", 'a\\"b', "é {} ,=# HELP", ""])
def test_any_label_comes_back_as_it_was(hostile):
    text = text_of([Family(name="a", kind="gauge", help="A.", samples=[({"run": hostile, "b": "c"}, 2.5)])])
    assert samples_of(text) == {("a", (("run", hostile), ("b", "c"))): 2.5}


@pytest.mark.parametrize("number", [0, 1, -2, 1e-9, 1e300, 123456789012, math.inf, -math.inf])
def test_any_number_comes_back_as_it_was(number):
    text = text_of([Family(name="a", kind="gauge", help="A.", samples=[({"run": "x"}, number)])])
    assert [*samples_of(text).values()] == [number]


def test_what_is_not_a_number_is_written_as_such():
    text = text_of([Family(name="a", kind="gauge", help="A.", samples=[({"run": "x"}, math.nan)])])
    assert text.endswith('a{run="x"} NaN\n')
    samples_of(text)


def test_a_family_without_samples_is_left_out():
    assert text_of([Family(name="a", kind="gauge", help="A.")]) == ""


@pytest.mark.parametrize(
    "text",
    [
        'a{run="x"} 2\n',
        "# HELP a A.\n# TYPE a gauge\na 2",
        '# HELP a A.\n# TYPE a gauge\na{run="x"} two\n',
        '# HELP a A.\n# TYPE a gauge\na{run="x"y"} 2\n',
        '# HELP a A.\n# TYPE a gauge\nb{run="x"} 2\n',
        '# HELP a A.\n# TYPE a gauge\na{run="x"} 2\na{run="x"} 3\n',
        '# HELP a_total A.\n# TYPE a_total gauge\na_total{run="x"} 2\n',
    ],
)
def test_the_reader_of_these_tests_refuses_what_breaks_a_rule(text):
    with pytest.raises(AssertionError):
        samples_of(text)


# The figures


def test_the_figures_are_those_of_the_run(made):
    directory, plan = made
    path, figures = directory.path, Figures(directory, plan)
    (path / "exit").mkdir()
    (path / "exit" / "start.json").write_text('{"time": 1000}')
    (path / "checkpoints" / "step-00000004").mkdir(parents=True)
    append(path, Event(time=now(), kind="spike"))
    before = samples_of(figures.text("running"))
    assert value(before, "step") == 4, "that of the checkpoint, before a step is recorded"
    assert not any(name == "trireme_run_loss" for name, _ in before)
    recorded(directory, eval_loss=1.5)
    found = samples_of(figures.text("running"))
    expected = {
        "step": 6,
        "planned_steps": 6,
        "last_checkpoint_step": 4,
        "loss": 2.5,
        "eval_loss": 1.5,
        "step_seconds": 0.1,
        "tokens_per_second": 1280,
        "starts_total": 1,
        "lost_seconds": 0,
    }
    assert {name: value(found, name) for name in expected} == pytest.approx(expected)
    assert value(found, "info", recipe="llama", commit="5eed") == 1
    assert value(found, "alarms_total", kind="spike") == 1
    assert value(found, "alarms_total", kind="slow_rank") == 0
    assert value(found, "state", state="running") == 1
    assert sum(number for (name, _), number in found.items() if name == "trireme_run_state") == 1
    assert {dict(labels)["run"] for _, labels in found} == {str(path)}


def test_a_loss_that_is_not_finite_is_told_as_such(made):
    directory, plan = made
    figures = Figures(directory, plan)
    recorded(directory, last_loss=None)
    assert math.isnan(value(samples_of(figures.text("running")), "loss"))


def test_steps_that_are_made_again_are_lost_time(made):
    directory, plan = made
    for name, notes in {
        "exit.1": {"start.json": {"time": 1000}, "stopped.json": {"step": 4}, "end.json": {"time": 1008}},
        "exit": {"start.json": {"time": 1010}, "resumed.json": {"step": 3}},
    }.items():
        (directory.path / name).mkdir()
        for file, content in notes.items():
            (directory.path / name / file).write_text(json.dumps(content))
    found = samples_of(Figures(directory, plan).text("running"))
    assert (value(found, "starts_total"), value(found, "lost_seconds")) == (2, 2)


# Who writes it


def states(path):
    found = samples_of(path.read_text())
    return [
        dict(labels)["state"] for (name, labels), is_so in found.items() if name.endswith("_state") and is_so
    ]


@pytest.mark.parametrize("phase", ["succeeded", "failed", "cancelled"])
def test_the_file_is_there_while_the_run_goes_on_and_has_its_last_state_at_the_end(made, phase):
    directory, plan = made
    file = directory.path / "run.prom"
    with beside(directory, plan, print):
        wait_until(file.exists)
        assert states(file) == ["running"]
        directory.write_state(JobState(phase=phase))
    assert states(file) == [phase]
    assert stat.S_IMODE(file.stat().st_mode) == 0o644, "the collector is another user"
    assert [path.name for path in directory.path.iterdir() if path.name.startswith(".")] == []


def test_a_launcher_that_is_ended_by_an_error_leaves_a_failed_run(made):
    directory, plan = made
    with pytest.raises(KeyboardInterrupt), beside(directory, plan, print):
        raise KeyboardInterrupt
    assert states(directory.path / "run.prom") == ["failed"]


def test_it_is_written_again_and_again(made):
    directory, plan = made
    exporter = Exporter(directory, plan, print, interval_s=0.01)
    file = directory.path / "run.prom"
    wait_until(file.exists)
    file.unlink()
    wait_until(file.exists)
    exporter.close("succeeded")


def test_a_file_that_cannot_be_written_is_told_once_and_ends_nothing(made):
    directory, plan = made
    (directory.path / "run.prom").mkdir()
    said: list[str] = []
    exporter = Exporter(directory, plan, said.append, interval_s=0.01)
    wait_until(lambda: bool(said))
    exporter.close("succeeded")
    (line,) = said
    assert line.startswith(f"run.prometheus={directory.path}/run.prom: [Errno 21] Is a directory: ")
    assert line.endswith("; this is not told again")


def test_figures_that_cannot_be_read_end_nothing(made):
    directory, plan = made
    said: list[str] = []
    with beside(directory, plan, said.append):
        write_records(directory.path, 0, [{"type": "step"}])
    assert len(said) <= 1


def test_a_link_in_place_of_the_unfinished_file_is_not_followed(tmp_path):
    other, file = tmp_path / "other", tmp_path / "run.prom"
    other.write_text("mine")
    unfinished_path(file).symlink_to(other)
    write_for_all(file, "a 1\n")
    assert (other.read_text(), file.read_text()) == ("mine", "a 1\n")
    assert not os.path.islink(file)


@pytest.mark.parametrize(
    ("notes", "phase"),
    [
        ({}, None),
        ({"job.json": "{}"}, "failed"),
        ({"job.json": "{}", "finished": ""}, "succeeded"),
        ({"job.json": "{}", "again": "requeue\n"}, "pending"),
        ({"job.json": "{}", "again": "cancelled\n"}, "cancelled"),
    ],
)
def test_the_last_state_of_a_job_is_what_its_script_has_left(tmp_path, notes, phase):
    (tmp_path / "exit").mkdir()
    for name, text in notes.items():
        (tmp_path / "exit" / name).write_text(text)
    assert phase_at_end(tmp_path) == phase


# The setting


@pytest.mark.parametrize("name", ["run.txt", ".prom"])
def test_a_file_that_the_collector_would_not_read_is_refused(make_plan, name):
    rule = rf"run\.prometheus={name}: must be text that ends in \.prom or null\. \[override"
    with pytest.raises(ConfigError, match=rule):
        make_plan(f"run.prometheus={name}")


def test_a_job_has_something_beside_its_ranks_only_where_it_is_asked_for(make_plan):
    def script(*overrides):
        return render(make_plan(*TWO_BY_TWO, *overrides), Path("/runs/a")).text

    assert "\nis_followed=yes\n" in script("run.prometheus=/metrics/a.prom")
    assert "\nis_followed=yes\n" not in script()
