"""The points of a sweep on a scheduler: as the tasks of one job, or as a job each."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.app.ending import say, shown
from launcher.app.frozen_job import Material, note_submitted, record_plan, submit_script
from launcher.app.request import Request
from launcher.app.submission import gather, tree_notes
from launcher.app.submitted_baseline import settle_baseline
from launcher.app.sweep.points import Points, new_sweep, placed
from launcher.app.sweep.results import Outcome
from launcher.app.sweep.store import TASKS, Sweep, ready_again
from launcher.base.errors import JobError, LauncherError
from launcher.base.secrets import check_folder, check_text, secret_values
from launcher.base.units import counted
from launcher.contract.job import GroupRequest, JobHandle, JobScript, JobState
from launcher.contract.plan import Plan
from launcher.runs.facts import checkouts, environment_facts
from launcher.runs.freeze import freeze, frozen_plan
from launcher.runs.record import Origin
from launcher.runs.render import executor_of, render, shell_text
from launcher.runs.store import RunDirectory, expected_path, new_directory, read_json


@dataclass(frozen=True, kw_only=True)
class Job:
    """A point that is recorded and about to be submitted."""

    task: int
    """Its number among the points of the sweep."""
    label: str
    directory: RunDirectory
    plan: Plan
    script: JobScript
    resume: bool = False


def submit_points(points: Points, given: Request) -> int:
    """Submits every point; returns the exit code: 1 where some were refused by the scheduler.

    Raises:
        LauncherError: when none was submitted.
    """
    at_once = _at_once(given, points.plans)
    if given.dry_run:
        return _print_scripts(points, at_once)
    roots = max((plan.source_roots for plan in points.plans), key=len)
    secrets = sorted({name for plan in points.plans for name in plan.config.site.secrets})
    material = gather(roots, secrets, given)
    sweep = new_sweep(points)
    try:
        copied = freeze(roots, sweep.path, material.patterns)
        for note in tree_notes(material.origin.checkouts, copied):
            say(f"note: {note}")
        jobs = list(_recorded(sweep, points, material))
        check_folder(sweep.path, material.secrets)
        ids = _submit(sweep, jobs, at_once)
    except LauncherError:
        shutil.rmtree(sweep.path)  # nothing is left of a sweep that never was
        raise
    if given.wants_baseline:
        _settle_baselines(sweep, jobs, material.origin, ids)
    return _exit_code(jobs)


def resubmit(sweep: Sweep, found: Sequence[Outcome], given: Request) -> int:
    """Submits points again, with the code that is frozen in the sweep; returns the exit code.

    Raises:
        LauncherError: when a point is still going, or none was submitted.
    """
    at_once = _at_once(given, [outcome.plan for outcome in found])
    tasks = {point.directory.path: task for task, point in enumerate(sweep.points)}
    jobs = []
    for outcome in found:
        directory, plan = outcome.directory, outcome.plan
        resume = ready_again(directory, plan.config.train.num_steps)
        script = render(plan, directory.path, resume=resume, code_in=sweep.path)
        directory.write("job.sh", shell_text(script))
        job = Job(
            task=tasks[directory.path],
            label=outcome.label,
            directory=directory,
            plan=plan,
            script=script,
            resume=resume,
        )
        jobs.append(job)
    ids = _submit(sweep, jobs, at_once)
    if given.wants_baseline:
        missing = [job for job in jobs if read_json(job.directory.job).get("baseline") is None]
        origin = Origin(recipe=sweep.recipe, overrides=(), facts=environment_facts(), checkouts=checkouts())
        _settle_baselines(sweep, missing, origin, ids)
    return _exit_code(jobs)


def _at_once(given: Request, plans: Sequence[Plan]) -> int | None:
    """Points that may run at a time: on one machine one, so that none slows another one down."""
    if given.at_once is not None:
        return given.at_once
    return 1 if any(plan.config.site.is_one_machine for plan in plans) else None


def _recorded(sweep: Sweep, points: Points, material: Material) -> Iterator[Job]:
    """Every point with its run directory, before the first is submitted."""
    for task, (item, stored) in enumerate(zip(points.planned, sweep.points, strict=True)):
        plan = placed(item.plan, stored.directory.path)
        directory = new_directory(plan.config.run, plan.config.name)
        origin = replace(material.origin, overrides=item.point.overrides)
        script = record_plan(directory, plan, origin, sweep.path)
        yield Job(task=task, label=stored.label, directory=directory, plan=plan, script=script)


# Submitting


def _submit(sweep: Sweep, jobs: Sequence[Job], at_once: int | None) -> list[str]:
    """Submits the jobs as one, or each by itself; the ids.

    Raises:
        JobError: when no point was submitted.
    """
    path = _new_script(sweep.path)
    grouped = _group(jobs, sweep.path, path, at_once)
    if grouped is None:
        return _submit_each(jobs, at_once, sweep)
    path.write_text(grouped.text, encoding="utf-8")
    executor = executor_of(jobs[0].plan)
    handle = executor.submit(grouped)
    members = executor.members(handle, [job.task for job in jobs])
    for job, name in zip(jobs, members, strict=True):
        note_submitted(job.directory, job.plan, JobHandle(id=name, run_dir=str(job.directory.path)))
    for note in handle.notes:
        say(f"note: {note}")
    limit = f", {at_once} at a time" if at_once and at_once < len(jobs) else ""
    _tell(sweep, f"submitted as the job array {handle.id} of {counted(len(jobs), 'task')}{limit}")
    return [handle.id]


def _submit_each(jobs: Sequence[Job], at_once: int | None, sweep: Sweep) -> list[str]:
    """A job for each: they ask for different resources. One that is refused ends no other."""
    ids: list[str] = []
    for job in jobs:
        script = job.script
        if at_once and len(ids) >= at_once:
            code_in = sweep.path
            script = render(
                frozen_plan(job.plan, code_in),
                job.directory.path,
                resume=job.resume,
                after=ids[-at_once],
                code_in=code_in,
            )
            job.directory.write("job.sh", shell_text(script))
        try:
            handle = submit_script(job.directory, job.plan, script)
        except JobError as error:
            print(f"{job.label}: {error}", file=sys.stderr)
            job.directory.write_state(JobState(phase="failed", reason=str(error)))
        else:
            ids.append(handle.id)
            nodes = counted(job.plan.config.cluster.nodes, "node")
            say(f"{job.label}: submitted as job {handle.id} on {nodes}")
    if not ids:
        raise JobError("no point was submitted")
    limit = f", {at_once} at a time" if at_once and at_once < len(ids) else ""
    _tell(sweep, f"submitted as {counted(len(ids), 'job')}{limit}")
    return ids


def _group(jobs: Sequence[Job], sweep_path: Path, script: Path, at_once: int | None) -> JobScript | None:
    if len(jobs) == 1:
        return None
    request = GroupRequest(
        name=sweep_path.name,
        folder=str(sweep_path / TASKS),
        script=str(script),
        tasks=tuple(job.task for job in jobs),
        at_once=at_once if at_once and at_once < len(jobs) else None,
    )
    return executor_of(jobs[0].plan).group([job.script for job in jobs], request)


def _new_script(sweep_path: Path) -> Path:
    """Where the script of the next submission goes; those before are kept."""
    number = len(list(sweep_path.glob("job-*.sh"))) + 1
    return sweep_path / f"job-{number}.sh"


def _tell(sweep: Sweep, sentence: str) -> None:
    path = shown(sweep.path)
    say(sentence)
    say(f"  trireme sweep status {path}\n  trireme sweep retry {path}\n  trireme sweep best {path}")


def _exit_code(jobs: Sequence[Job]) -> int:
    """1 where the scheduler refused one."""
    return int(any(read_json(job.directory.status_file).get("phase") == "failed" for job in jobs))


def _settle_baselines(sweep: Sweep, jobs: Sequence[Job], origin: Origin, ids: Sequence[str]) -> None:
    """Names the baseline of every point; one that has still to be made is a job of its own."""
    is_one_machine = any(job.plan.config.site.is_one_machine for job in jobs)
    after = ",".join(ids) if is_one_machine else ""

    def start(base: RunDirectory, alone: Plan) -> JobHandle:
        script = record_plan(base, alone, origin, sweep.path, after=after)
        check_folder(base.path, secret_values(os.environ, alone.config.site.secrets))
        return submit_script(base, alone, script)

    told = dict.fromkeys(settle_baseline(job.directory, job.plan, start) for job in jobs)
    for sentence in filter(None, told):
        say(sentence)


# Looking


def _print_scripts(points: Points, at_once: int | None) -> int:
    """Prints what would be submitted, and nothing else on the standard output."""
    first = points.plans[0].config
    path = expected_path(first.run, f"{first.name}-sweep")
    jobs = []
    for task, item in enumerate(points.planned):
        run_dir = path / item.point.folder(task, len(points.planned))
        plan = frozen_plan(placed(item.plan, run_dir), path)
        script = render(plan, run_dir, code_in=path)
        job = Job(
            task=task, label=item.point.label, directory=RunDirectory(run_dir), plan=plan, script=script
        )
        jobs.append(job)
    grouped = _group(jobs, path, _new_script(path), at_once)
    scripts = [(_new_script(path), grouped.text)] if grouped else []
    scripts += [(job.directory.path / "job.sh", job.script.text) for job in jobs]
    for name, text in scripts:
        check_text(text, "a job script", secret_values(os.environ, ()))
        print(f"# ---- {name}\n{text}")
    if first.run.dir is None:
        print(
            "note: The directory is named by the time; give run.dir to know it beforehand.", file=sys.stderr
        )
    return 0
