"""The life of a run: its starts, why each ended, what was trained, saved and lost, and what comes next.

Each start of the ranks has its own ``exit`` folder, which the next one moves aside and nobody changes after
that: it holds when the start began and ended, the last heartbeat of each rank, and why they failed. What a
killed start could not write any more is told by its heartbeats, and by the checkpoint of the next one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from launcher.app.progress import StepView, reporting_records
from launcher.base.columns import columns
from launcher.base.errors import LauncherError
from launcher.base.files import json_object, read_json, read_regular
from launcher.base.redaction import escaped
from launcher.base.units import counted, format_duration
from launcher.contract.inputs.lineage import lineage_text, stored_lineage
from launcher.contract.job import (
    END_NOTE,
    FINISHED_NOTE,
    JOB_RECORD,
    NODE_NOTE,
    RESUME_NOTE,
    START_NOTE,
    STOP_NOTE,
    JobState,
)
from launcher.contract.model.checkpoint import first_step
from launcher.contract.plan import Plan
from launcher.runs.failure import failure_line, rank_failures
from launcher.runs.hang import heartbeats
from launcher.runs.render import executor_of
from launcher.runs.status import ACTIVE
from launcher.runs.store import RunDirectory, saved_steps
from launcher.runs.tail import last_lines

_UNFINISHED = 75
"""The exit code of a job whose run can be resumed."""
_FINISHED = "finished"
_WHY_WIDTH = 60


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of the ranks. What is not known is None."""

    began_s: float | None
    """Seconds since 1970, as all times here."""
    ended_s: float | None
    """Of one that could not say so: the last sign of life of a rank."""
    first: int
    """Steps that were done when it began."""
    done: int | None
    """Steps that were done when it ended, of which not all need be saved."""
    why: str
    """Why it ended; empty: it has not."""
    job: str = ""
    lost: int = 0
    """Steps that the next start makes again."""

    @property
    def length_s(self) -> float | None:
        """From its begin to its end."""
        if self.began_s is None or self.ended_s is None:
            return None
        return max(0.0, self.ended_s - self.began_s)


def life_text(directory: RunDirectory, state: JobState) -> list[str]:
    """The lines that tell the life of a run, which is in ``state`` now."""
    starts, plan = starts_of(directory, state), stored_plan(directory)
    lineage = lineage_text(stored_lineage(directory.path))
    lines = [f"It {lineage}."] if lineage else []
    lines += [*_table(starts), *_sums(directory, starts)]
    return [*lines, f"next: {'; '.join(_next(directory, state, plan, starts))}"]


def stored_plan(directory: RunDirectory) -> Plan | None:
    """The plan of a run; None where it cannot be read."""
    with suppress(LauncherError, OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return Plan.from_json(read_regular(directory.plan).decode())
    return None


def starts_of(directory: RunDirectory, state: JobState) -> list[Start]:
    """Every start of a run, the first one first."""
    aside = [path for path in directory.path.glob("exit.*") if path.is_dir() and any(path.iterdir())]
    plan = stored_plan(directory)
    begins = first_step(plan.config.train) if plan else 0
    earlier = sorted((_start(path, begins) for path in aside), key=lambda each: each.began_s or 0)
    starts = [
        replace(each, why=each.why or "killed with its launcher or node: it left no word") for each in earlier
    ]
    newest = directory.path / "exit"
    if newest.is_dir() and any(newest.iterdir()):
        last = _start(newest, begins)
        is_active = state.phase in ACTIVE
        why = "" if is_active else last.why if state.phase == "failed" and last.why else _state_text(state)
        starts.append(replace(last, why=why, ended_s=None if is_active else last.ended_s))
    if plan:  # ranks that end well leave no heartbeat
        num_steps = plan.config.train.num_steps
        starts = [replace(each, done=num_steps) if each.why == _FINISHED else each for each in starts]
    following = [each.first for each in starts[1:]]
    if state.phase not in (*ACTIVE, "succeeded"):
        following.append(max(saved_steps(directory.path), default=begins))
    lost = [max(0, (each.done or 0) - first) for each, first in zip(starts, following, strict=False)]
    return [replace(each, lost=number) for each, number in zip(starts, [*lost, 0], strict=False)]


def lost_s(starts: Sequence[Start]) -> float:
    """Seconds of steps that a later start made again, as if each step of a start had taken as long."""
    return sum(
        (each.length_s or 0.0) * each.lost / (each.done - each.first)
        for each in starts
        if each.lost and each.done is not None and each.done > each.first
    )


def _start(folder: Path, begins: int) -> Start:
    """One start, by its exit folder."""

    def note(name: str) -> dict[str, Any]:
        return read_json(folder / Path(name).name)

    began, ended, record, stopped = note(START_NOTE), note(END_NOTE), note(JOB_RECORD), note(STOP_NOTE)
    beats = [beat for _, beat in heartbeats(folder.parent, folder.name)]
    times = {path.name: path.lstat().st_mtime for path in folder.iterdir()}
    first, done = _number(note(RESUME_NOTE).get("step")), _number(stopped.get("step"))
    signs = [beat.time for beat in beats if beat.time > 0]
    made = [beat.step for beat in beats if beat.step >= 0]
    ended_s = _number(ended.get("time")) or times.get(Path(JOB_RECORD).name)
    return Start(
        began_s=_number(began.get("time")) or min(times.values(), default=None),
        ended_s=ended_s or max(signs or times.values(), default=None),
        first=begins if first is None else int(first),
        done=max(made, default=None) if done is None else int(done),
        why=_why(folder, ended, record, stopped),
        job=str(began.get("job", record.get("job", ""))),
    )


def _why(folder: Path, ended: dict[str, Any], record: dict[str, Any], stopped: dict[str, Any]) -> str:
    """Why a start ended; empty where nothing tells."""
    if (folder / Path(FINISHED_NOTE).name).exists():
        return _FINISHED
    if stopped:
        by = ended.get("reason") or stopped.get("signal") or "a signal"
        return f"stopped by {by}, saved after step {stopped.get('step')}"
    if (unfit := folder / Path(NODE_NOTE).name).is_file():
        return read_regular(unfit).decode(errors="replace").strip()
    code, rank = _number(ended.get("exit_code")), _number(ended.get("rank"))
    phase = ended.get("phase")
    if phase == "succeeded":
        return _FINISHED
    if phase == "cancelled":
        return f"stopped by {ended.get('reason')}"
    state = JobState(
        phase="failed",
        exit_code=None if code is None else int(code),
        rank=None if rank is None else int(rank),
        reason=str(ended.get("reason", "")),
    )
    if told := _failure(folder, state):
        return told
    if (code := _number(record.get("exit_code"))) is None:
        return ""
    return (
        "interrupted before it could save" if code == _UNFINISHED else f"its job ended with code {code:.0f}"
    )


def _failure(folder: Path, state: JobState) -> str:
    """Which rank failed first, and how; empty where nothing tells. What the launcher wrote down as the start
    ended was found with more than is left here: how every rank had ended."""
    if state.rank is None or not state.reason:
        return failure_line(folder.parent, state, folder.name)
    own = [each for each in rank_failures(folder.parent, folder.name) if each.rank == state.rank]
    has_ended_itself = state.exit_code is not None and state.exit_code > 0
    return own[0].line if own and has_ended_itself else f"rank {state.rank} {state.reason}"


def _state_text(state: JobState) -> str:
    if state.phase == "succeeded":
        return _FINISHED
    return f"{state.phase}: {state.reason}" if state.reason else state.phase


def _number(value: Any) -> float | None:
    return value if type(value) in (int, float) else None


# As text


def _table(starts: Sequence[Start]) -> list[str]:
    if not starts:
        return ["no start of it is recorded"]
    rows = [("start", "began", "job", "steps", "time", "lost", "ended")]
    for number, each in enumerate(starts, 1):
        rows.append(
            (
                str(number),
                _clock(each.began_s),
                each.job,
                f"{each.first + 1}-{each.done}"
                if each.done is not None and each.done > each.first
                else "none",
                "" if each.length_s is None else format_duration(each.length_s),
                str(each.lost or ""),
                escaped(each.why)[:_WHY_WIDTH] or "it has not",
            )
        )
    return columns(rows, left=len(rows[0]))


def _clock(seconds: float | None) -> str:
    with suppress(ValueError, OverflowError, OSError, TypeError):
        return datetime.fromtimestamp(seconds or 0).strftime("%Y-%m-%d %H:%M:%S") if seconds else ""
    return ""


def _sums(directory: RunDirectory, starts: Sequence[Start]) -> Iterator[str]:
    """Time in starts, time of steps that were lost, time between starts; and what is saved."""
    lengths = [each.length_s or 0.0 for each in starts]
    num_lost, num_ended = sum(each.lost for each in starts), sum(bool(each.why) for each in starts)
    parts = [f"{format_duration(sum(lengths))} in {counted(num_ended, 'start')} that ended"]
    if num_lost:
        parts.append(
            f"about {format_duration(lost_s(starts))} of it for {counted(num_lost, 'step')} that were lost"
        )
    created = _created(directory)
    ends = [created, *(each.ended_s for each in starts)]
    waits = [
        max(0.0, each.began_s - end)
        for each, end in zip(starts, ends, strict=False)
        if each.began_s is not None and end is not None
    ]
    if waits:
        parts.append(f"{format_duration(sum(waits))} before and between them")
    yield "time: " + ", ".join(parts)
    saved = saved_steps(directory.path)
    yield f"saved: after step {', '.join(map(str, saved[-5:]))}" if saved else "saved: nothing"


def _created(directory: RunDirectory) -> float | None:
    with suppress(ValueError, TypeError):
        return datetime.fromisoformat(directory.status().started).timestamp()
    return None


def _next(
    directory: RunDirectory, state: JobState, plan: Plan | None, starts: Sequence[Start]
) -> Iterator[str]:
    """What comes next, and when it will be done."""
    if state.phase == "succeeded":
        yield "nothing: it is finished"
        return
    if state.phase not in ACTIVE:
        saved = saved_steps(directory.path)
        yield "nothing, until it is started by hand" + (
            f": --resume goes on after step {saved[-1]}" if saved else "; nothing is saved to go on from"
        )
        return
    if state.phase == "pending":
        yield f"it starts when its job does ({state.reason or 'waits'})"
    if plan is None:
        return
    step_s, done = _speed(directory, plan)
    left = plan.config.train.num_steps - done
    if step_s is None:
        yield f"{counted(left, 'step')} left; how long they take is not measured yet"
    else:
        yield (
            f"{counted(left, 'step')} left, about {format_duration(left * step_s)} of training: done about "
            f"{_clock(time.time() + left * step_s)} if nothing comes between, an estimate from the latest "
            "steps"
        )
    with suppress(LauncherError):
        if then := executor_of(plan).after_start(plan, len(starts) + (state.phase == "pending")):
            yield then


def _speed(directory: RunDirectory, plan: Plan) -> tuple[float | None, int]:
    """Seconds that a step takes by the latest ones, and the steps done."""
    view = StepView(num_steps=plan.config.train.num_steps, unit="")
    with suppress(OSError, LookupError, TypeError, ValueError):
        for path in filter(Path.is_file, reporting_records(directory, plan)):
            for record in filter(None, map(json_object, last_lines(path))):
                if record.get("type") == "step":
                    view.add(record)
    done = view.num_done or max(saved_steps(directory.path), default=first_step(plan.config.train))
    return (view.step_s if view.recent else None), done
