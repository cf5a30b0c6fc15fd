"""Events and rewinds in their files, what counts as a spike, what a plan refuses, and the user's command."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.app.lifecycle import prepared
from launcher.app.preflight import executor_faults
from launcher.base.errors import JobError, PlanError
from launcher.cli.runs.status import event_lines
from launcher.contract.alarms.config import AlarmsConfig
from launcher.contract.alarms.events import EVENTS, Event, append, count_alarms, read_events
from launcher.contract.alarms.rewinds import REWINDS, Rewinds, read_rewinds, write_rewinds
from launcher.contract.config import PluginChoice
from launcher.plan.build import build
from launcher.runs.alarms.notify import NOTIFY_LOG, Notifier, note, notifying
from tests.helpers.configs import launch_config

SPIKE = Event(
    time="2026-03-01T10:00:00.000+00:00", kind="spike", step=7, figures={"loss": 9.0, "limit": None}
)


# Events


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    rank = replace(SPIKE, kind="slow_rank", rank=3, node="n1", done="the training goes on")
    append(tmp_path, SPIKE)
    append(tmp_path, rank)
    assert read_events(tmp_path) == [SPIKE, rank]


def test_half_a_line_of_a_killed_writer_spoils_no_later_event(tmp_path: Path) -> None:
    (tmp_path / EVENTS).write_bytes(b'{"time": "2026-03-01T1')
    append(tmp_path, SPIKE)
    assert read_events(tmp_path) == [SPIKE]


def test_a_run_without_events_has_none(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []
    assert event_lines([]) == []


def test_an_event_reads_as_a_line() -> None:
    event = replace(SPIKE, rank=3, node="n1", done="its batch is skipped")
    assert str(event) == (
        "2026-03-01T10:00:00.000+00:00  spike, step 7, rank 3 on n1, loss 9, limit not a number: "
        "its batch is skipped"
    )


def test_status_shows_the_newest_events() -> None:
    lines = event_lines([replace(SPIKE, step=step) for step in range(1, 13)])
    assert lines[1] == "events, the newest 10 of 12:"
    assert "step 3" in lines[2]
    assert "step 12" in lines[-1]


def test_alarms_are_counted_by_kind(tmp_path: Path) -> None:
    note(tmp_path, "start", "1 rank")
    append(tmp_path, SPIKE)
    append(tmp_path, SPIKE)
    assert count_alarms(read_events(tmp_path)) == {"spike": 2}


# Rewinds


def test_rewinds_are_read_as_they_were_written(tmp_path: Path) -> None:
    rewinds = Rewinds().rewound(5, 4).rewound(9, 8)
    write_rewinds(tmp_path, rewinds)
    assert read_rewinds(tmp_path) == rewinds


@pytest.mark.parametrize("text", ["", "{", '{"rewinds": [{"alarm_step": -1}]}'])
def test_damaged_rewinds_are_not_taken_for_none(text: str, tmp_path: Path) -> None:
    (tmp_path / REWINDS).write_text(text)
    with pytest.raises(JobError, match=r"rewinds\.json is damaged, and tells which batches were passed over"):
        read_rewinds(tmp_path)


def test_no_batch_is_made_twice_whatever_a_run_goes_back_to() -> None:
    rng = random.Random(1)
    for _ in range(200):
        rewinds, done, seen = Rewinds(), 0, set[int]()
        for _ in range(rng.randrange(1, 6)):
            alarm = done + rng.randrange(5)
            batches = {rewinds.batch_of(step) for step in range(done, alarm + 1)}
            assert not batches & seen
            seen |= set(range(max(batches) + 1))
            done = rng.randrange(alarm + 1)
            rewinds = rewinds.rewound(alarm, done)
            assert rewinds.batch_of(done) == max(batches) + 1


# Plans


def refusal(alarms: dict[str, Any], **sections: Any) -> list[str]:
    config = replace(launch_config(**sections), alarms=AlarmsConfig(**alarms))
    with pytest.raises(PlanError) as error:
        build(config)
    return [str(fault) for fault in error.value.faults]


@pytest.mark.parametrize("name", ["gossip", "parameter_server"])
@pytest.mark.parametrize("action", ["skip", "rewind"])
def test_replicas_that_do_not_step_as_one_take_nothing_back(name: str, action: str) -> None:
    architecture = PluginChoice(name=name, options={})
    assert refusal({"spike": action}, parallel={"dp": 2}, architecture=architecture) == [
        f"alarms.spike={action}: is one decision of all ranks, and those of {name} do not step as one. "
        "Set alarms.spike=end."
    ]


def test_times_of_workers_of_servers_are_not_compared_and_end_nothing() -> None:
    architecture = PluginChoice(name="parameter_server", options={})
    assert refusal({"slow_rank": "end"}, parallel={"dp": 2}, architecture=architecture) == [
        "alarms.slow_rank=end: compares times that ranks of parameter_server do not exchange. "
        "Set alarms.slow_rank=ignore."
    ]


def test_there_is_nothing_to_go_back_to_without_checkpoints() -> None:
    (fault,) = refusal({"not_finite": "rewind"})
    assert fault.startswith(
        "alarms.not_finite=rewind: goes back to a checkpoint, and train.checkpoint_interval is 0. "
        "Set train.checkpoint_interval="
    )
    assert fault.endswith(", or alarms.not_finite=end.")


def test_deepspeed_skips_no_batch() -> None:
    assert refusal({"spike": "skip"}, parallel={"dp": 2, "zero_stage": 1}) == [
        "alarms.spike=skip: leaves out the update of a step, and DeepSpeed clears gradients only as it "
        "updates. Set alarms.spike=end, or alarms.spike=rewind train.checkpoint_interval=1."
    ]


# The command


def command(tmp_path: Path, code: str) -> tuple[str, ...]:
    script = tmp_path / "told.py"
    script.write_text(code)
    return (sys.executable, str(script), "$HOME `id`", str(tmp_path / "told"))


TELL = "import sys; open(sys.argv[2], 'a').write(sys.argv[1] + sys.stdin.read())"


def test_the_command_reads_each_later_event_and_no_shell_is_between(tmp_path: Path) -> None:
    append(tmp_path, SPIKE)
    config = replace(launch_config().run, notify=command(tmp_path, TELL))
    with notifying(tmp_path, config):
        append(tmp_path, replace(SPIKE, step=8))
        note(tmp_path, "failed", "rank 1: no", rank=1)
    words, *lines = (tmp_path / "told").read_text().replace("$HOME `id`", "\n").strip().split("\n")
    told = [json.loads(line) for line in (words, *lines) if line]
    assert [(each["kind"], each["step"]) for each in told] == [("spike", 8), ("failed", None)]
    assert told[0]["run"] == str(tmp_path)
    assert not (tmp_path / NOTIFY_LOG).exists()


@pytest.mark.parametrize(
    ("code", "timeout_s", "problem"),
    [
        ("import sys; sys.exit('no mail')", 30.0, "start: run.notify: exit code 1. no mail\n"),
        (
            "import time; time.sleep(60)",
            0.2,
            "start: run.notify: killed after 200 ms (run.notify_timeout_s)\n",
        ),
    ],
)
def test_what_goes_wrong_with_the_command_is_a_line_in_a_log(
    code: str, timeout_s: float, problem: str, tmp_path: Path
) -> None:
    notifier = Notifier(tmp_path, command(tmp_path, code), timeout_s)
    note(tmp_path, "start", "1 rank")
    notifier.close()
    notifier._thread.join()
    assert (tmp_path / NOTIFY_LOG).read_text().endswith(problem)


def test_a_command_that_is_not_there_is_a_line_in_a_log(tmp_path: Path) -> None:
    notifier = Notifier(tmp_path, (str(tmp_path / "absent"),), 1.0)
    note(tmp_path, "start", "1 rank")
    notifier.close()
    assert "run.notify: it cannot be started: " in (tmp_path / NOTIFY_LOG).read_text()


def test_a_command_that_this_machine_does_not_have_is_refused() -> None:
    config = launch_config()
    plan = build(replace(config, run=replace(config.run, notify=("no-such-command", "me"))))
    (fault,) = executor_faults(prepared(plan), is_here=True)
    assert str(fault) == (
        "run.notify=['no-such-command', 'me']: no-such-command is no command that this machine can execute. "
        "Set 'run.notify=[]'."
    )
