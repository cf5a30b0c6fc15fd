"""Reserves nodes with Slurm and starts the ranks on them.

Source: the manual pages sbatch(1), srun(1), scontrol(1), sacct(1), scancel(1).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launcher.config.schema import LaunchConfig
from launcher.errors import Fault, JobError, PlanError
from launcher.interfaces import JobShape
from launcher.jobs.script import JobHandle, JobRequest, JobScript, JobState
from launcher.plan.model import Plan
from launcher_plugins.executors.slurm_commands import ask, left_out
from launcher_plugins.executors.slurm_options import Layout, layout, option_faults
from launcher_plugins.executors.slurm_script import Batch, script_text
from launcher_plugins.executors.slurm_state import PHASES, from_record, from_sacct, from_scontrol, with_rank

END_RECORD = "exit/job.json"
"""What the script leaves in the run directory of how it ended."""
_SETTINGS = {
    "partition": "site.partition",
    "qos": "site.qos",
    "account": "site.account",
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
"""What to look at when a refusal of Slurm holds these words."""


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """Settings of the executor."""

    starter: Literal["srun", "torchrun"] = "srun"
    """``srun`` starts one task per rank; ``torchrun`` is started once per node and starts its ranks."""


class Slurm:
    """The ``slurm`` executor."""

    is_local = False
    Config = SlurmConfig

    def check(self, job: JobShape) -> Iterable[Fault]:
        """Ranks that do not fill the nodes, and options that sbatch would not take."""
        return _faults(job.config, layout(job.config, job.mesh.num_ranks))

    def render(self, plan: Plan, request: JobRequest) -> JobScript:
        """The batch script, and the command that submits it.

        Raises:
            PlanError: for what `check` finds, and for a run directory that Slurm cannot write to.
        """
        place = layout(plan.config, plan.world_size)
        faults = [*_faults(plan.config, place), *_directory_faults(plan.config, request.run_dir)]
        if isinstance(place, Fault) or faults:
            raise PlanError(faults)
        starter = SlurmConfig(**_options(plan.config)).starter
        text = script_text(Batch(config=plan.config, request=request, place=place, starter=starter))
        argv = ("sbatch", "--parsable", f"{request.run_dir}/job.sh")
        return JobScript(argv=argv, environment={}, run_dir=request.run_dir, text=text)

    def submit(self, script: JobScript) -> JobHandle:
        """Has Slurm check the job, then submits it once.

        Raises:
            JobError: when Slurm refuses it; names the setting to look at.
        """
        command, *_, path = script.argv
        checked = ask((command, "--test-only", path), os.environ)
        if checked.code:
            raise JobError(_refusal(checked.error))
        answer = ask(script.argv, os.environ)
        if answer.code:
            raise JobError(_refusal(answer.error))
        notes = []
        if names := left_out(os.environ):
            notes.append(f"Not passed on, because they would change the job: {', '.join(names)}.")
        return JobHandle(id=answer.output.partition(";")[0], run_dir=script.run_dir, notes=tuple(notes))

    def state(self, handle: JobHandle) -> JobState:
        """How the job stands: asked of the controller, then of the accounts, then of its own record.

        Raises:
            JobError: when Slurm gives no answer and the job has left no record.
        """
        return with_rank(_state(handle), handle.run_dir)

    def cancel(self, handle: JobHandle) -> None:
        """Has Slurm end the job, wherever it is.

        Raises:
            JobError: when Slurm refuses.
        """
        answer = ask(("scancel", handle.id), os.environ)
        if answer.code and "Invalid job id" not in answer.error:
            raise JobError(f"Slurm does not cancel job {handle.id}: {answer.error}")


def _state(handle: JobHandle) -> JobState:
    live = ask(("scontrol", "--oneliner", "show", "job", handle.id), os.environ)
    if live.code == 0:
        return from_scontrol(live.output)
    accounts = ask(("sacct", "-X", "-P", "-n", "-j", handle.id, "--format=State,ExitCode"), os.environ)
    known = accounts.output.splitlines()
    if accounts.code == 0 and known and known[-1].split("|")[0].split(" ")[0] in PHASES:
        return from_sacct(known[-1])
    record = Path(handle.run_dir) / END_RECORD
    text = record.read_text(encoding="utf-8") if record.is_file() else ""
    if (left := from_record(text, handle.id)) is not None:
        return left
    if "Invalid job id" not in live.error:
        raise JobError(f"Slurm does not say how job {handle.id} stands: {live.error}")
    return JobState(phase="failed", reason=f"Slurm forgot job {handle.id}, and it left no record of its end")


def _options(config: LaunchConfig) -> dict[str, Any]:
    return dict(config.executor.options)


def _faults(config: LaunchConfig, place: Layout | Fault) -> Iterator[Fault]:
    if isinstance(place, Fault):
        yield place
    yield from option_faults(config.site)


def _directory_faults(config: LaunchConfig, run_dir: str) -> Iterator[Fault]:
    if "\\" in run_dir or not run_dir.isprintable():
        rule = "Slurm does not write to a file whose path holds a backslash or a control character"
        yield Fault("run.dir", ascii(run_dir), rule, "Set run.dir or run.root to another place.")
    if config.site.container_image and re.search("[,:]", run_dir):
        rule = "a path that is mounted into a container holds no comma and no colon"
        yield Fault("run.dir", run_dir, rule, "Set run.dir or run.root to another place.")


def _refusal(message: str) -> str:
    known = [setting for words, setting in _SETTINGS.items() if words in message.lower()]
    hint = f" Look at {' and '.join(known[:1])}." if known else ""
    if known[:1] == ["site.partition"] and (names := ask(("sinfo", "-h", "-o", "%R"), os.environ)).code == 0:
        hint += f" Partitions here: {', '.join(sorted(set(names.output.split())))}."
    return f"Slurm refuses the job: {message}.{hint}"
