"""The points of a sweep on a scheduler: as the tasks of one job, or as a job each."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launcher.app.baseline import ensure_baseline, has_failed_baseline, submit_baseline
from launcher.app.launch import submitted_origin, tree_notes
from launcher.app.lifecycle import (
    NotNotedError,
    PreparedRun,
    note_submitted,
    origin_of,
    removed_unless_begun,
    submit_recorded,
)
from launcher.app.output import Output, shown
from launcher.app.request import Request
from launcher.app.sweep.planning import PointRun, create_runs, new_sweep, reset_runs
from launcher.app.sweep.point import PlannedSweep, Point
from launcher.app.sweep.store import TASKS, Sweep
from launcher.base.errors import JobError
from launcher.base.files import read_json
from launcher.base.secrets import check_text, secret_values
from launcher.base.units import counted
from launcher.contract.job import GroupRequest, JobHandle, JobScript, JobState
from launcher.runs.freeze import freeze
from launcher.runs.record import Origin
from launcher.runs.store import RunDirectory, expected_path, hold, released


def submit_points(planned: PlannedSweep, given: Request, output: Output) -> Sweep:
    """Submits every point of a new sweep.

    Raises:
        LauncherError: when none was submitted.
    """
    plans = [point.plan for point in planned.points]
    roots = max((plan.source_roots for plan in plans), key=len)
    names = sorted({name for plan in plans for name in plan.config.site.secrets})
    origin = submitted_origin(given, roots, names)
    sweep = new_sweep(planned, output)
    with released(hold(RunDirectory(sweep.path))), removed_unless_begun(sweep.path):
        copied = freeze(roots, sweep.path, given.untracked, origin.secrets)
        for note in tree_notes(origin.checkouts, copied):
            output.say(f"note: {note}")
        runs = create_runs(sweep, origin, sweep.path)
        ids = _submit(sweep, runs, at_once_of(planned.points, given), output)
    if given.wants_baseline:
        _settle_baselines(sweep, runs, origin, ids, output)
    return sweep


def resubmit(
    sweep: Sweep, points: Sequence[Point], lacking: Sequence[PointRun], given: Request, output: Output
) -> None:
    """Submits points again, and the baseline of points that are done and lack it, with the code that is
    frozen in the sweep.

    Raises:
        LauncherError: when a point is still going, or none was submitted.
    """
    runs = reset_runs(points, given, output, sweep.path)
    ids = _submit(sweep, runs, at_once_of(points, given), output) if runs else []
    if given.wants_baseline:
        unnamed = (item for item in runs if read_json(item[1].directory.job).get("baseline") is None)
        missing = [*(item for item in runs if has_failed_baseline(item[1])), *unnamed, *lacking]
        _settle_baselines(sweep, missing, origin_of(sweep.recipe), ids, output)


def at_once_of(points: Sequence[Point], given: Request) -> int | None:
    """Points that may run at a time: on one machine one, so that none slows another one down."""
    if given.at_once is not None:
        return given.at_once
    return 1 if any(point.plan.config.site.is_one_machine for point in points) else None


def say_scripts(planned: PlannedSweep, given: Request, output: Output) -> None:
    """Prints what would be submitted, and nothing else on the standard output."""
    first = planned.points[0].plan.config
    path = expected_path(first.run, f"{first.name}-sweep")
    points = [point.placed(path, len(planned.points)) for point in planned.points]
    runs = [(point, PreparedRun(plan=point.plan, directory=point.directory, code=path)) for point in points]
    grouped = _group(runs, path, at_once_of(points, given))
    scripts = [(_new_script(path), grouped.text)] if grouped else []
    scripts += [(run.directory.path / "job.sh", run.script.text) for _, run in runs]
    for name, text in scripts:
        check_text(text, "a job script", secret_values(os.environ, ()))
        output.say(f"# ---- {name}\n{text}")
    if first.run.dir is None:
        output.warn("note: The directory is named by the time; give run.dir to know it beforehand.")


def _submit(sweep: Sweep, runs: Sequence[PointRun], at_once: int | None, output: Output) -> list[str]:
    """Submits the runs as one job, or each by itself; the ids."""
    grouped = _group(runs, sweep.path, at_once)
    if grouped is None:
        ids = _submit_each(runs, at_once, output)
        how = f"submitted as {counted(len(ids), 'job')}"
    else:
        _new_script(sweep.path).write_text(grouped.text, encoding="utf-8")
        handle = _submit_group(runs, grouped)
        for note in handle.notes:
            output.say(f"note: {note}")
        ids = [handle.id]
        how = f"submitted as the job array {handle.id} of {counted(len(runs), 'task')}"
    num_jobs = len(ids) if grouped is None else len(runs)
    limit = f", {at_once} at a time" if at_once and at_once < num_jobs else ""
    path = shlex.quote(shown(sweep.path))
    output.say(f"{how}{limit}")
    output.say(f"  trireme sweep status {path}\n  trireme sweep retry {path}\n  trireme sweep best {path}")
    return ids


def _submit_group(runs: Sequence[PointRun], grouped: JobScript) -> JobHandle:
    executor = runs[0][1].executor
    handle = executor.submit(grouped)
    members = executor.members(handle, [point.index for point, _ in runs])
    for (_, run), name in zip(runs, members, strict=True):
        note_submitted(run, JobHandle(id=name, run_dir=str(run.directory.path)))
    return handle


def _submit_each(runs: Sequence[PointRun], at_once: int | None, output: Output) -> list[str]:
    """A job for each: they ask for different resources. One that is refused ends no other."""
    ids: list[str] = []
    for point, fresh in runs:
        run = fresh
        if at_once and len(ids) >= at_once:
            run = replace(fresh, after=ids[-at_once])
            run.record_script()
        try:
            handle = submit_recorded(run)
        except NotNotedError:
            raise
        except JobError as error:
            output.warn(f"{point.label}: {error}")
            run.directory.write_state(JobState(phase="failed", reason=str(error)))
        else:
            ids.append(handle.id)
            nodes = counted(run.plan.config.cluster.nodes, "node")
            output.say(f"{point.label}: submitted as job {handle.id} on {nodes}")
    if not ids:
        raise JobError("no point was submitted")
    return ids


def _group(runs: Sequence[PointRun], path: Path, at_once: int | None) -> JobScript | None:
    """What submits the runs of the sweep at ``path`` as one job; None where that cannot be."""
    if len(runs) == 1:
        return None
    request = GroupRequest(
        name=path.name,
        folder=str(path / TASKS),
        script=str(_new_script(path)),
        tasks=tuple(point.index for point, _ in runs),
        at_once=at_once if at_once and at_once < len(runs) else None,
    )
    return runs[0][1].executor.group([run.script for _, run in runs], request)


def _new_script(sweep_path: Path) -> Path:
    """Where the script of the next submission goes; those before are kept."""
    number = len(list(sweep_path.glob("job-*.sh"))) + 1
    return sweep_path / f"job-{number}.sh"


def _settle_baselines(
    sweep: Sweep, runs: Sequence[PointRun], origin: Origin, ids: Sequence[str], output: Output
) -> None:
    """Names the baseline of every point; one that has still to be made is a job of its own."""
    is_one_machine = any(run.plan.config.site.is_one_machine for _, run in runs)
    after = ",".join(ids) if is_one_machine else ""
    messages = dict.fromkeys(
        ensure_baseline(run, lambda plan: submit_baseline(plan, origin, code=sweep.path, after=after)).message
        for _, run in runs
    )
    for message in filter(None, messages):
        output.say(message)
