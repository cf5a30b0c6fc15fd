"""The run on one device that a speedup is measured against: found among the stored runs, or made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.base.errors import ConfigError, Fault
from launcher.contract.config import DEFAULT_ARCHITECTURE, LaunchConfig, PluginChoice
from launcher.contract.plan import Plan
from launcher.report.runs import named_base
from launcher.runs.fingerprint import common_recompute
from launcher.runs.record import write_baseline
from launcher.runs.store import ACTIVE, SWEEP_FILE, RunDirectory, absolute, read_json


def baseline_search(directory: RunDirectory, plan: Plan) -> tuple[tuple[Path, ...], str]:
    """Where a baseline of a recorded run is looked for, and the fingerprint that it has."""
    places = (absolute(plan.config.run.root), directory.path.parent)
    return tuple(dict.fromkeys(places)), read_json(directory.job)["fingerprint"]


def find_baseline(places: Sequence[Path], fingerprint: str, *, has_ended: bool = True) -> Path | None:
    """The newest finished run on one rank with this fingerprint, in these folders or in sweeps there.

    ``has_ended=False``: the newest that a scheduler has, and that has not ended as far as is known.
    """
    phases, found = ("succeeded",) if has_ended else ("pending", "running"), []
    for directory in (directory for place in places for directory in _runs(place)):
        status = read_json(directory.status_file)
        if status.get("phase") not in phases or not (has_ended or directory.handle.is_file()):
            continue
        job = read_json(directory.job)
        if job.get("fingerprint") == fingerprint and job.get("world_size") == 1:
            found.append((status["changed"], directory.path))
    return max(found)[1] if found else None


def named_baseline(setting: str) -> Path:
    """The finished run that ``report.baseline`` names.

    Raises:
        ConfigError: when it is not the directory of a finished run.
    """
    path = absolute(setting)
    phase = read_json(RunDirectory(path).status_file).get("phase")
    if phase != "succeeded":
        found = f"that run is {phase}" if phase else "it is not a run directory"
        allowed = f"must be auto, none, or the directory of a finished run; {found}"
        raise ConfigError([Fault("report.baseline", setting, allowed, "Set report.baseline=auto.")])
    return path


def is_to_be_found(directory: RunDirectory, plan: Plan) -> bool:
    """Whether a run on one device has still to be found or made for this one. A baseline that
    ``report.baseline`` names is written down at once.

    Raises:
        ConfigError: when that is not the directory of a finished run.
    """
    setting = plan.config.report.baseline
    if setting not in ("auto", "none"):
        write_baseline(directory, named_baseline(setting))
    return setting == "auto" and plan.world_size > 1


def one_device(plan: Plan) -> LaunchConfig:
    """The same training on one device: the same batch in the same microbatches, all in one place."""
    config, batch = plan.config, plan.batch
    return replace(
        config,
        name=f"{config.name}-baseline",
        device=replace(config.device, measured_in=None),
        cluster=replace(config.cluster, nodes=1, devices_per_node=1),
        parallel=replace(config.parallel.on_one_device(), recompute=common_recompute(plan)),
        batch=replace(
            config.batch,
            global_size=batch.global_size,
            micro_size=batch.micro_size,
            num_microbatches=batch.global_size // batch.micro_size,
        ),
        site=replace(config.site, nodelist=None),
        architecture=PluginChoice(name=DEFAULT_ARCHITECTURE, options={}),
        report=replace(config.report, baseline="none", claims=False),
        run=replace(config.run, dir=None),
    )


def unfinished_baseline(run_dir: Path) -> str:
    """Why the baseline that a run names measures nothing; empty where it does, and where none is named."""
    base = named_base(run_dir)
    phase = read_json(RunDirectory(base).status_file).get("phase") if base else None
    if base is None or phase in ("succeeded", None):
        return ""
    if phase in ACTIVE:
        return f"its baseline {base.name} is {phase}; trireme wait {run_dir} waits for it, too"
    return f"its baseline {base.name} is {phase}; trireme report {run_dir} --base RUN takes another"


def _runs(folder: Path) -> Iterator[RunDirectory]:
    """The runs in a folder, and those of the sweeps in it."""
    for path in folder.iterdir() if folder.is_dir() else ():
        yield from map(RunDirectory, path.iterdir() if (path / SWEEP_FILE).is_file() else [path])
