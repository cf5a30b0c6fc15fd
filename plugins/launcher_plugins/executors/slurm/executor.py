"""Reserves nodes with Slurm and starts the ranks on them.

Source: the manual pages sbatch(1), srun(1), squeue(1), sacct(1), scancel(1).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from launcher.base.errors import Fault, JobError
from launcher.contract.config import LaunchConfig
from launcher.contract.executor import Executor, SiteSurvey
from launcher.contract.job import GroupRequest, JobHandle, JobRequest, JobScript, JobState
from launcher.contract.plan import Plan
from launcher.contract.site import time_s
from launcher_plugins.executors.slurm.commands import removed_names, run_command
from launcher_plugins.executors.slurm.continuation import (
    SlurmConfig,
    continuation_faults,
    continuation_notes,
    lead_warnings,
    next_start,
    time_notes,
)
from launcher_plugins.executors.slurm.nodes import needs
from launcher_plugins.executors.slurm.option_rules import clash_faults, node_faults, option_faults
from launcher_plugins.executors.slurm.options import SEPARATOR, device_request, node_layout
from launcher_plugins.executors.slurm.queue import Jobs, ask_about, with_time
from launcher_plugins.executors.slurm.roles import het_components, role_faults, role_notes
from launcher_plugins.executors.slurm.script import Batch, array, script_text
from launcher_plugins.executors.slurm.state import with_end
from launcher_plugins.executors.slurm.survey import survey

CHAIN = "logs/chain"
"""File with the ids of the jobs of a chain, in the run directory."""
_JOB_ID = re.compile(r"^\s*(\d+)(?:;[\w.-]+)?\s*$", re.MULTILINE)
"""What sbatch prints with --parsable: the id of the job, and in a federation its cluster."""
_MOST_SHOWN = 300
"""Most characters of an unexpected answer in an error."""
_SETTINGS = {
    "account": "site.account",  # the message names the partition, too
    "partition": "site.partition",
    "qos": "site.qos",
    "time limit": "site.time_limit",
    "reservation": "site.reservation",
    "feature": "site.constraint",
    "gres": "site.gpu_request",
    "memory": "site.memory_per_node",
    "node count": "cluster.nodes",
    "node configuration": "cluster.nodes, cluster.devices_per_node and the site's requests for a node",
    "invalid node name": "site.nodelist and site.exclude",
    "unrecognized option": "site.options",
    "configuration source": "SLURM_CONF, by which a cluster is found",
}
"""The setting to look at, by words in Slurm's message."""


class Slurm(Executor):
    """The ``slurm`` executor."""

    is_local = False
    job_variable = "SLURM_JOB_ID"
    Config = SlurmConfig

    def check(self, plan: Plan, run_dir: str | None = None) -> Iterable[Fault]:
        """Ranks that do not fill the nodes, options that sbatch rejects, impossible continuations, and a run
        directory that Slurm cannot write to."""
        config = plan.config
        if isinstance(layout := node_layout(config, plan.num_cluster_ranks), Fault):
            yield layout
        yield from role_faults(config, plan.roles)
        yield from option_faults(config.site)
        yield from clash_faults(config, asks_for_devices=bool(device_request(config, 1)))
        yield from node_faults(config.site, config.cluster.nodes + config.cluster.spare_nodes)
        yield from continuation_faults(config)
        yield from _directory_faults(config, run_dir) if run_dir is not None else ()

    def notes(self, plan: Plan) -> Iterable[str]:
        """Where the ranks rendezvous, how an interrupted run continues, and whether the run is predicted to
        take longer than its time limits allow."""
        yield from role_notes(plan.config, plan.roles)
        yield from _network_notes(plan.config)
        yield from continuation_notes(plan.config)
        yield from time_notes(plan.config, plan.config.train.num_steps * plan.schedule.step_s)

    def after_start(self, plan: Plan, num_starts: int) -> str:
        """Its requeue, or the next job of its chain."""
        return next_start(plan.config, num_starts)

    def render(self, plan: Plan, request: JobRequest) -> JobScript:
        """The batch script, and the command that submits it."""
        layout = node_layout(plan.config, plan.num_cluster_ranks)
        assert not isinstance(layout, Fault), "a plan is checked before it is rendered"
        others = het_components(plan.config, plan.roles)
        needed = needs(plan, layout.ranks_per_node)
        text = script_text(
            Batch(config=plan.config, request=request, layout=layout, needs=needed, others=others)
        )
        argv = ("sbatch", "--parsable", f"{request.run_dir}/job.sh")
        num_jobs = plan.config.executor.settings(SlurmConfig).num_jobs()
        return JobScript(argv=argv, environment={}, run_dir=request.run_dir, text=text, num_jobs=num_jobs)

    def submit(self, script: JobScript) -> JobHandle:
        """Has Slurm check the job, then submits it, or each job of a chain.

        Raises:
            JobError: when Slurm rejects it; names the setting to look at.
        """
        self.try_out(script)
        jobs: list[str] = []
        try:
            while len(jobs) < script.num_jobs:
                jobs.append(_submit_one(script, jobs))
            if script.num_jobs > 1:
                (Path(script.run_dir) / CHAIN).write_text(
                    "".join(f"{job}\n" for job in jobs), encoding="utf-8"
                )
        except (JobError, OSError):
            if jobs:
                run_command(("scancel", *reversed(jobs)))
            raise
        names = ", ".join(removed_names(os.environ))
        notes = [f"Not passed on to sbatch, because they would change the job: {names}."] if names else []
        notes += lead_warnings(script)
        return JobHandle(id=SEPARATOR.join(jobs), run_dir=script.run_dir, notes=tuple(notes))

    def try_out(self, script: JobScript) -> None:
        """Has Slurm check the job, whose script is in the run directory.

        Raises:
            JobError: when Slurm rejects it; names the setting to look at.
        """
        command, *_, path = script.argv
        checked = run_command((command, "--test-only", path))
        if checked.code:
            raise JobError(_refusal(checked.error))

    def survey(self) -> SiteSurvey:
        """Asks the cluster for its partitions, and for the accounts of the user.

        Raises:
            JobError: when it gives no answer.
        """
        return survey()

    def group(self, scripts: Sequence[JobScript], request: GroupRequest) -> JobScript | None:
        """The jobs as the tasks of an array; None where they do not all request the same resources."""
        return array(scripts, request)

    def members(self, handle: JobHandle, tasks: Sequence[int]) -> list[str]:
        """The ids of the tasks of an array."""
        return [f"{handle.id}_{task}" for task in tasks]

    def time_left_s(self, job: str) -> float | None:
        """Seconds until the time limit of a job; None where it has none, or is not known.

        Raises:
            JobError: when there is no squeue on this machine.
        """
        answer = run_command(("squeue", "--noheader", f"--jobs={job}", "--format=%L"))
        found = [
            left_s for line in answer.output.splitlines() if (left_s := time_s(line.strip())) is not None
        ]
        return found[0] if found and math.isfinite(found[0]) else None

    def state(self, handle: JobHandle) -> JobState:
        """The state of the job: from squeue, else from sacct, else from the job's own record.

        Raises:
            JobError: when Slurm does not answer and the job has left no record.
        """
        return self.states([handle])[0]

    def states(self, handles: Sequence[JobHandle]) -> list[JobState]:
        """The states of several jobs, with one command each; as `state`."""
        jobs = ask_about([job for handle in handles for job in handle.id.split(SEPARATOR)])
        return [with_time(with_end(_state(run, jobs), run.run_dir), run.run_dir) for run in handles]

    def cancel(self, handle: JobHandle) -> None:
        """Cancels the job; of a chain, the queued jobs first.

        Raises:
            JobError: when Slurm does not.
        """
        jobs = handle.id.split(SEPARATOR)
        answer = run_command(("scancel", *reversed(jobs)))
        if answer.code and "Invalid job id" not in answer.error:
            raise JobError(f"Slurm does not cancel job {handle.id}: {answer.error}")


def _submit_one(script: JobScript, before: Sequence[str]) -> str:
    """Submits the job; in a chain it waits until the one before has ended without finishing the run."""
    command, parsable, path = script.argv
    waits = (f"--dependency=afternotok:{before[-1]}", "--kill-on-invalid-dep=yes") if before else ()
    answer = run_command((command, parsable, *waits, path))
    if answer.code:
        raise JobError(_refusal(answer.error))
    found = _JOB_ID.findall(answer.output)  # among what a site's own sbatch may print around it
    if len(found) != 1:
        printed = answer.output[:_MOST_SHOWN] or "nothing"
        raise JobError(
            f"sbatch did not print the id of one job, but: {printed}\nIf squeue --me lists it, end it with "
            "scancel: nothing follows it."
        )
    job: str = found[0]
    return job


def _state(handle: JobHandle, jobs: Jobs) -> JobState:
    """The state of the last job of a chain that was needed."""
    first, *others = handle.id.split(SEPARATOR)
    state = jobs.state(first, handle.run_dir)
    for job in others:
        if state.phase not in ("failed", "cancelled"):
            break
        following = jobs.state(job, handle.run_dir)
        if following.phase == "cancelled":  # it was not needed, or has nothing to resume from
            break
        state = following
    return state


def _network_notes(config: LaunchConfig) -> Iterator[str]:
    site = config.site
    if site.host_suffix and config.cluster.nodes > 1:
        address = f"the first node's name followed by {site.host_suffix} (site.host_suffix)"
        yield f"The ranks rendezvous at {address}."
    if site.network_interface:
        yield f"gloo and NCCL use the interface {site.network_interface} (site.network_interface)."


def _directory_faults(config: LaunchConfig, run_dir: str) -> Iterator[Fault]:
    if "\\" in run_dir or not run_dir.isprintable():
        rule = "Slurm cannot write to a path with a backslash or a control character"
        yield Fault("run.dir", ascii(run_dir), rule, "Set run.dir or run.root to another place.")
    if config.site.container_image and re.search("[,:]", run_dir):
        rule = "a path that is mounted into a container cannot have a comma or a colon"
        yield Fault("run.dir", run_dir, rule, "Set run.dir or run.root to another place.")


def _refusal(message: str) -> str:
    known = next((setting for words, setting in _SETTINGS.items() if words in message.lower()), "")
    hint = f" Look at {known}." if known else ""
    if known == "site.partition":
        listed = run_command(("sinfo", "-h", "-o", "%R"))
        names = ", ".join(sorted(set(listed.output.split())))
        hint += f" Partitions here: {names}." if listed.code == 0 else ""
    return f"Slurm rejects the job: {message}.{hint}"
