"""The life of a run, whoever asks for it: prepared, recorded, started here or submitted, followed, ended."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from launcher.app.beside.exporter import beside
from launcher.app.output import Output, shown, text_width
from launcher.app.progress import Progress, progress_of
from launcher.base.errors import ConfigError, Fault, JobError, LauncherError
from launcher.base.files import read_json, share
from launcher.base.lock import LostLockError
from launcher.base.secrets import secret_values
from launcher.base.units import counted
from launcher.contract.executor import Executor
from launcher.contract.job import END_NOTE, START_NOTE, STOP_NOTE, JobHandle, JobScript, JobState
from launcher.contract.model.checkpoint import first_step
from launcher.contract.plan import Plan
from launcher.contract.site import SiteConfig
from launcher.report.runs import named_base
from launcher.report.tables import speedup_text
from launcher.runs.alarms.notify import note
from launcher.runs.facts import checkouts, environment_facts
from launcher.runs.failure import failure_line, failure_text, unless_trained
from launcher.runs.freeze import freeze, frozen_plan
from launcher.runs.record import Origin, write_job
from launcher.runs.render import executor_of, render, shell_text
from launcher.runs.state import save_handle
from launcher.runs.status import ACTIVE
from launcher.runs.store import START_FOLDERS, RunDirectory, expected_path, fresh_folders, saved_steps
from launcher.runs.watch import StopSignal, follow, surviving_lost_output


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A plan, the directory that it runs in, and what starts it there."""

    plan: Plan
    """As it was planned; of a recorded run that is read again, as it was recorded."""
    directory: RunDirectory
    code: Path | None = None
    """The directory that holds the frozen code of the job; None: it runs the code that is installed."""
    resume: bool = False
    """Whether the ranks resume from the newest checkpoint."""
    after: str = ""
    """Ids of the jobs that have to end before this one begins."""

    @cached_property
    def recorded_plan(self) -> Plan:
        """The plan whose ranks import the user's modules from the frozen code."""
        return self.plan if self.code is None else frozen_plan(self.plan, self.code)

    @cached_property
    def script(self) -> JobScript:
        """What starts it.

        Raises:
            PlanError: when its executor cannot.
        """
        return render(
            self.recorded_plan, self.directory.path, resume=self.resume, after=self.after, code_in=self.code
        )

    @property
    def executor(self) -> Executor:
        """Who starts it."""
        return executor_of(self.plan)

    def record(self, origin: Origin) -> None:
        """Writes down what it is, before its first process starts."""
        share_run(self.directory.path, self.plan.config.site)
        write_job(self.directory, self.recorded_plan, self.script, origin)

    def record_script(self) -> None:
        """Writes down how a recorded run is started this time."""
        share_run(self.directory.path, self.plan.config.site)
        self.directory.write("job.sh", shell_text(self.script))


def share_run(path: Path, site: SiteConfig) -> None:
    """Lets a group read a directory of runs, where the site has it so.

    Raises:
        ConfigError: when it is no group of the user.
    """
    if site.group_access == "none":
        return
    try:
        share(path, site.group)
    except (LookupError, OSError) as error:
        why = "there is no such group here" if isinstance(error, LookupError) else str(error)
        rule = f"cannot be given {path}: {why}"
        fix = "Give a group that you are in (the command id lists them), or null for that of new files."
        raise ConfigError(
            [Fault("site.group", site.group, rule, fix, ways=({"site.group": None},))]
        ) from None


def prepared(plan: Plan, directory: RunDirectory | None = None, *, resume: bool = False) -> PreparedRun:
    """A run, fresh or resumed, of the installed code, or by a scheduler of its own frozen copy.

    ``directory``: None: the one that it would get now.
    """
    directory = directory or RunDirectory(expected_path(plan.config.run, plan.config.name))
    code = None if executor_of(plan).is_local else directory.path
    return PreparedRun(plan=plan, directory=directory, code=code, resume=resume)


@dataclass(frozen=True, kw_only=True)
class EndedRun:
    """A run that was followed to its end."""

    directory: RunDirectory
    state: JobState

    @property
    def exit_code(self) -> int:
        """Of a process that did only this: 0, 1 after a failure, 128 and its number after a signal."""
        if self.state.phase == "cancelled":
            return self.state.exit_code or 1
        return int(self.state.phase == "failed")


def origin_of(
    recipe: str, overrides: Sequence[str] = (), source_roots: Sequence[str] = (), secrets: Sequence[str] = ()
) -> Origin:
    """Where plans come from that are made now: their recipe, this machine, the state of the code.

    Raises:
        JobError: when a variable of ``secrets`` that the ranks are given is not set.
    """
    return Origin(
        recipe=recipe,
        overrides=tuple(overrides),
        facts=environment_facts(),
        checkouts=checkouts(source_roots),
        secrets=secret_values(os.environ, secrets),
    )


# On this machine


def train(run: PreparedRun, stop: StopSignal, output: Output) -> JobState:
    """Starts the ranks here and follows them to the end of their last start, whatever it is; those that
    fail are started again as often as the executor is set to."""
    if stop.signal is not None:
        state = JobState(phase="cancelled", exit_code=stop.exit_code, reason=stop.signal.name)
        run.directory.write_state(state)
        return state
    path = run.directory.path
    with beside(run.directory, run.plan, output.warn):
        note(path, "start", f"{counted(run.plan.world_size, 'rank')}{', resumed' if run.resume else ''}")
        state = _train_and_restart(run, stop, output)
        line = failure_line(path, state) if state.phase == "failed" else state.reason
        note(path, state.phase, line, state.rank)
    return state


def _train_and_restart(run: PreparedRun, stop: StopSignal, output: Output) -> JobState:
    output.say(f"training on {counted(run.plan.world_size, 'rank')}")
    directory, num_restarts, running = run.directory, 0, JobState(phase="running")
    while True:
        directory.write_state(running)
        directory.write(START_NOTE, json.dumps({"time": time.time()}) + "\n")
        progress = progress_of(directory, run.plan, output.stream)

        def tick(progress: Progress = progress) -> None:
            directory.check()
            progress.update()

        state = follow(run.executor, run.script, stop, tick, output.warn)
        state = _unless_told_to_stop(unless_trained(state, directory.path), directory)
        with surviving_lost_output(reader=True):
            progress.close()
        ended = {
            "phase": state.phase,
            "exit_code": state.exit_code,
            "reason": state.reason,
            "rank": state.rank,
        }
        with _told(output):
            directory.write(END_NOTE, json.dumps({"time": time.time()} | ended) + "\n")
        assert state.phase in ("succeeded", "failed", "cancelled"), f"a job that is {state.phase} was left"
        if state.phase != "failed" or num_restarts == run.script.max_restarts or stop.signal is not None:
            break
        num_restarts += 1
        running = replace(running, reason=f"restart {num_restarts} of {run.script.max_restarts}")
        output.say(failure_line(directory.path, state))
        note(directory.path, "failed", failure_line(directory.path, state), state.rank)
        note(directory.path, "restart", running.reason)
        output.say(f"{running.reason}: {_next_start(run, progress.view.num_done)}")
        run = replace(run, resume=bool(saved_steps(directory.path)))
        fresh_folders(directory, *START_FOLDERS)
    if num_restarts and state.phase != "cancelled":
        after = f"after {counted(num_restarts, 'restart')}"
        state = replace(state, reason=f"{state.reason}, {after}" if state.reason else after)
    with _told(output):
        directory.write_state(state)
    return state


@contextmanager
def _told(output: Output) -> Iterator[None]:
    """Tells of a disk that is full: how a run ended is told all the same."""
    try:
        yield
    except OSError as error:
        output.warn(f"{error.filename}: {error.strerror}")


def _unless_told_to_stop(state: JobState, directory: RunDirectory) -> JobState:
    """How a start ended; one whose ranks saved and stopped on a signal to one of them is not finished."""
    note = read_json(directory.path / STOP_NOTE)
    if state.phase != "succeeded" or not note:
        return state
    number = signal.Signals[note["signal"]]
    return JobState(phase="cancelled", exit_code=128 + number, reason=f"{number.name} to a rank")


def _next_start(run: PreparedRun, num_done: int) -> str:
    """Where the next start begins, and which steps it repeats."""
    saved, first = saved_steps(run.directory.path), first_step(run.plan.config.train)
    begins = "restarts where it began" if first else "restarts from scratch"
    begins = f"resumed after step {saved[-1]}" if saved else f"{begins} (no checkpoint)"
    first = max(saved, default=first)
    return f"{begins}; {counted(num_done - first, 'step')} repeated" if num_done > first else begins


# By a scheduler


def freeze_and_submit(
    run: PreparedRun, origin: Origin, untracked: Sequence[str] = ()
) -> tuple[JobHandle, tuple[str, ...]]:
    """Freezes the code of a run that has its own copy, records the run and submits it.

    Returns the job, and those files that were copied although git does not track them, of which
    ``untracked`` holds patterns.

    Raises:
        LauncherError: when it cannot be submitted, a secret would be written down, or a variable that the
            ranks are given is not set.
    """
    path = run.directory.path
    named = secret_values(os.environ, run.plan.config.site.secrets)
    origin = replace(origin, secrets={**origin.secrets, **named})
    copied = freeze(run.plan.source_roots, path, untracked, origin.secrets) if run.code == path else ()
    run.record(origin)
    return submit_recorded(run), copied


def submit_recorded(run: PreparedRun) -> JobHandle:
    """Hands a recorded run to its scheduler.

    Raises:
        JobError: when that refuses it.
    """
    handle = run.executor.submit(run.script)
    note_submitted(run, handle)
    return handle


def note_submitted(run: PreparedRun, handle: JobHandle) -> None:
    """Notes in a run directory which job it is, and leaves its lock to that.

    Raises:
        NotNotedError: when a full disk does not take it.
    """
    try:
        save_handle(run.directory, run.plan.config.executor.name, handle)
        run.directory.write_status("pending")
    except OSError as error:
        path = shown(run.directory.path)
        raise NotNotedError(
            f"job {handle.id} is submitted and runs in {path}, which could not be told so: {error.strerror}. "
            f"Cancel job {handle.id} with the commands of its scheduler before you submit it again."
        ) from error
    run.directory.release()


class NotNotedError(JobError):
    """A scheduler has a job whose run directory does not say so, and which needs that directory."""


# The end


@contextmanager
def removed_unless_begun(path: Path, *, is_new: bool = True) -> Iterator[None]:
    """Leaves nothing of a new run or sweep that is refused before its first process, or that a full disk does
    not take; a resumed run has failed. What a scheduler has a job in is left to that."""
    try:
        yield
    except (LostLockError, NotNotedError):
        raise
    except (LauncherError, OSError):
        if not is_new:
            with suppress(OSError):
                RunDirectory(path).write_status("failed")
        elif not _has_job(path):
            shutil.rmtree(path)
        raise


def _has_job(path: Path) -> bool:
    """Whether a scheduler has been given a run, or one of a sweep."""
    return any(RunDirectory(folder).handle.is_file() for folder in (path, *path.iterdir()))


@contextmanager
def failed_unless_ended(directory: RunDirectory) -> Iterator[None]:
    """Records a run as failed when whatever is raised ends this process before the run: nobody else would.
    Gives back its lock in any case."""
    try:
        yield
    except NotNotedError:
        raise
    except BaseException as error:
        if isinstance(error, FileNotFoundError):
            directory.check(anew=True)  # a folder that was moved, or whose mount is lost, is named so
        # It was removed, as it never was; or another one has it now; or the disk is full.
        with suppress(LostLockError, OSError):
            if directory.path.is_dir():
                directory.write_status("failed")
        raise
    finally:
        directory.release()


def stopped_text(by: str) -> str:
    """What is said after a request to stop, which is named."""
    return f"stopped by {by}: all ranks have ended"


def report_end(run: EndedRun, output: Output) -> None:
    """Says how a run ended: with its speedup, or with the guilty rank."""
    directory, state = run.directory, run.state
    if state.phase == "cancelled":
        output.warn(
            f"{stopped_text(state.reason)}. Run directory: {shown(directory.path)}\n{_saved_text(directory)}"
        )
    elif state.phase == "failed":
        output.warn(failure_text(directory.path, state))
    elif problem := unfinished_baseline(directory.path):
        output.say(f"no speedup: {problem}")
    else:
        try:
            output.say("\n" + speedup_text([directory.path], None, width=text_width()).rstrip())
        except LauncherError as error:  # the training succeeded; only its measure is missing
            output.say(f"no speedup: {error}")


def unfinished_baseline(run_dir: Path) -> str:
    """Why the baseline that a run names measures nothing; empty where it does, and where none is named."""
    base = named_base(run_dir)
    if base is None or not RunDirectory(base).status_file.is_file():
        return ""
    phase = RunDirectory(base).status().phase
    if phase == "succeeded":
        return ""
    path = shlex.quote(str(run_dir))
    if phase in ACTIVE:
        return f"its baseline {base.name} is {phase}; trireme wait {path} waits for it, too"
    return f"its baseline {base.name} is {phase}; trireme report {path} --base RUN takes another"


def _saved_text(directory: RunDirectory) -> str:
    """What a run that has not finished can be resumed from."""
    if steps := saved_steps(directory.path):
        return f"Saved after step {steps[-1]}: --resume goes on from there."
    plan = Plan.from_json(directory.plan.read_text(encoding="utf-8"))
    if plan.config.train.checkpoint_interval:
        return "Nothing is saved: no checkpoint was complete."
    return "Nothing is saved, as train.checkpoint_interval is 0."
