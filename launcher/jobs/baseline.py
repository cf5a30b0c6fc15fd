"""The run on one device that a speedup is measured against: found among the stored runs, or made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.config.schema import LaunchConfig, PluginChoice
from launcher.errors import ConfigError, Fault
from launcher.jobs.store import RunDirectory, absolute, read_json
from launcher.plan.model import Plan


def find_baseline(root: Path, fingerprint: str) -> Path | None:
    """The newest finished run under ``root`` on one rank with this fingerprint."""
    found = [
        (status["changed"], directory.path)
        for directory, job, status in _finished_runs(root)
        if job.get("fingerprint") == fingerprint and job.get("world_size") == 1
    ]
    return max(found)[1] if found else None


def named_baseline(setting: str) -> Path:
    """The finished run that ``report.baseline`` names.

    Raises:
        ConfigError: when it is not the directory of a finished run.
    """
    path = absolute(setting)
    phase = read_json(RunDirectory(path).status_file).get("phase")
    if phase != "succeeded":
        stands = f"that run is {phase}" if phase else "it is not a run directory"
        allowed = f"must be auto, none, or the directory of a finished run; {stands}"
        raise ConfigError([Fault("report.baseline", setting, allowed, "Set report.baseline=auto.")])
    return path


def one_device(plan: Plan) -> LaunchConfig:
    """The same training on one device: the same batch in the same microbatches, all in one place."""
    config, batch = plan.config, plan.batch
    return replace(
        config,
        name=f"{config.name}-baseline",
        cluster=replace(config.cluster, nodes=1, devices_per_node=1),
        parallel=replace(
            config.parallel,
            dp=1,
            tp=1,
            pp=1,
            num_chunks=1,
            schedule="1f1b",
            schedule_options={},
            layers_per_stage="even",
            sequence_parallel=False,
            zero_stage=0,
            zero_offload=False,
            zero_options={},
        ),
        batch=replace(
            config.batch,
            global_size=batch.global_size,
            micro_size=batch.micro_size,
            num_microbatches=batch.global_size // batch.micro_size,
        ),
        architecture=PluginChoice(name="decentralized", options={}),
        report=replace(config.report, baseline="none"),
        run=replace(config.run, dir=None),
    )


def _finished_runs(root: Path) -> Iterator[tuple[RunDirectory, dict[str, Any], dict[str, Any]]]:
    for path in root.iterdir() if root.is_dir() else ():
        directory = RunDirectory(path)
        status = read_json(directory.status_file)
        if status.get("phase") == "succeeded":
            yield directory, read_json(directory.job), status
