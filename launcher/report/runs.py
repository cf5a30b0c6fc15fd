"""One finished run as the report sees it: its plan, its records, its measured steps."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from launcher.base import registry
from launcher.base.errors import LauncherError, PluginError
from launcher.base.files import read_regular
from launcher.base.redaction import shortened
from launcher.base.units import counted
from launcher.contract.plan import Plan
from launcher.contract.records import Part, RunRecords
from launcher.contract.strategy import Architecture, Parallel, RunReport, Strategy, TrainedRun
from launcher.metrics.blocked_time import split
from launcher.metrics.read import read_run
from launcher.report.ledger import Work


@dataclass(frozen=True, kw_only=True)
class FinalLoss:
    """The last loss that a run recorded."""

    kind: str
    """``evaluation``, or ``training`` where nothing was evaluated."""
    num_steps: int
    """Steps done by then."""
    loss: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run directory, read."""

    path: Path
    plan: Plan
    """Its configuration and predictions, taken as data."""
    records: RunRecords
    measured: tuple[tuple[Part, ...], ...]
    """The steps after the warm-up: windows, then single steps, each with one record per trainer rank."""
    work: Work
    """What those steps did and took."""

    @property
    def name(self) -> str:
        """Name of the directory, safe to print."""
        return printable(self.path.resolve().name)

    @property
    def layout(self) -> str:
        """How the work was spread, such as ``dp=1 tp=2 pp=2 1f1b``."""
        mesh, config = self.plan.mesh, self.plan.config
        parallel = config.parallel
        words = [f"dp={mesh.dp} tp={mesh.tp} pp={mesh.pp}"]
        words += [parallel.schedule] if mesh.pp > 1 else []
        words += [f"chunks={parallel.num_chunks}"] if parallel.num_chunks > 1 else []
        words += [word for strategy in strategies(self.plan) for word in strategy.layout(self.plan)]
        return " ".join(words)

    @cached_property
    def plugin_reports(self) -> tuple[RunReport, ...]:
        """What its plugins report of it."""
        run = TrainedRun(name=self.name, plan=self.plan, records=self.records, measured=self.measured)
        return tuple(strategy.report(run) for strategy in strategies(self.plan))

    def loss_after(self, num_steps: int) -> float | None:
        """The loss of the last of the first steps; None where it is not known."""
        rows = next((rows for rows in self.records.parts if rows[0].step + 1 == num_steps), ())
        losses = [row.loss for row in rows if row.loss is not None]
        return sum(losses) / len(losses) if losses else None

    @property
    def final_loss(self) -> FinalLoss | None:
        """The last evaluation, else the loss of the last step."""
        if self.records.evals:
            last = self.records.evals[-1]
            return FinalLoss(kind="evaluation", num_steps=last.step, loss=last.loss)
        rows = self.records.parts[-1]
        if any(role.trains and role.is_expendable for role in self.plan.roles):
            rows = self.records.newest  # of those that were there to the end
        step, losses = rows[0].step, [row.loss for row in rows if row.loss is not None]
        mean = sum(losses) / len(losses) if losses else 0.0  # replicas on their own have losses of their own
        return FinalLoss(kind="training", num_steps=step + 1, loss=mean) if losses else None


def strategies(plan: Plan) -> list[Strategy]:
    """The parallel plugins of a plan, then its architecture. One that is not installed reports nothing."""
    found: list[Strategy] = []
    kinds: tuple[type[Strategy], ...] = (Parallel, Architecture)
    for kind in kinds:
        for name in (used.name for used in plan.plugins if used.group == kind.entry_group):
            try:
                found.append(registry.load(kind, name))
            except PluginError:
                found.append(kind())
    return found


def printable(path: Path | str) -> str:
    """A file name that cannot write to the terminal.

    >>> printable("a\\x1b[31m")
    'a?[31m'
    """
    return "".join(char if char.isprintable() else "?" for char in str(path))


def load_run(path: Path) -> Run:
    """Reads a run directory.

    Raises:
        LauncherError: it is none, its plan or records are broken, or no step is left after the warm-up.
    """
    plan = read_plan(path)
    records = read_run(path)
    if len(records.headers) != plan.mesh.num_ranks:
        raise LauncherError(
            f"{path}: records of {counted(len(records.headers), 'trainer rank')}, "
            f"but the plan has {plan.mesh.num_ranks}"
        )
    measured = _measured_steps(path, records, plan.config.report.warmup_steps)
    return Run(path=path, plan=plan, records=records, measured=measured, work=_work(plan, records, measured))


_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading another thing than a plan raises."""


def named_base(run_dir: Path) -> Path | None:
    """The baseline that the run itself names, in its job.json; None where it names none.

    Raises:
        LauncherError: when job.json is broken.
    """
    path = run_dir / "job.json"
    if not os.path.isfile(path):
        return None
    try:
        job = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise LauncherError(f"{path} is not JSON: {error}") from error
    name = job.get("baseline") if isinstance(job, dict) else None
    return run_dir / name if isinstance(name, str) else None


def read_plan(path: Path) -> Plan:
    """The plan of a run.

    Raises:
        LauncherError: when there is none in the directory, or it is damaged.
    """
    file = path / "plan.json"
    if not os.path.isfile(file):
        raise LauncherError(
            f"{shortened(str(path))} holds no plan.json. Give a run directory, such as runs/quickstart."
        )
    try:
        return Plan.from_json(read_regular(file).decode())
    except (LauncherError, OSError, *_DAMAGE) as error:
        raise LauncherError(f"{file} cannot be read as a plan: {error}") from error


def _measured_steps(path: Path, records: RunRecords, warmup_steps: int) -> tuple[tuple[Part, ...], ...]:
    """The steps after the first ``warmup_steps`` of the newest start; no window of which some are in the
    warm-up."""
    first = records.parts[0][0].first_step if records.parts else 0
    measured = tuple(rows for rows in records.parts if rows[0].first_step >= first + warmup_steps)
    if not measured:
        raise LauncherError(f"{path}: no step to measure: {_why_none(records, warmup_steps)}")
    return measured


def _why_none(records: RunRecords, warmup_steps: int) -> str:
    num_steps, needed = records.num_steps, counted(warmup_steps + 1, "step")
    drops = f"report.warmup_steps={warmup_steps} drops the first {warmup_steps}"
    if records.num_starts == 1:
        recorded = f"{counted(num_steps, 'step')} recorded by all ranks"
        return f"{recorded}, and {drops}. Train at least {needed}."
    return (
        f"it was started {records.num_starts} times, its last start made {counted(num_steps, 'step')}, and "
        f"{drops} of a start. Its losses and checkpoints are whole; for its speed, run at least {needed} in "
        "one start, or resume with a smaller report.warmup_steps."
    )


def _work(plan: Plan, records: RunRecords, measured: Sequence[Sequence[Part]]) -> Work:
    kinds: Counter[str] = Counter()
    for rows in measured:
        for rank_kinds in split(records.headers, rows):
            kinds.update(rank_kinds)
    num_samples = sum(rows[0].num_samples for rows in measured)
    return Work(
        num_devices=plan.num_devices,
        num_ranks=len(records.headers),
        num_steps=sum(rows[0].num_steps for rows in measured),
        # Not by the records: older ones of a user's own data count samples as tokens.
        num_tokens=num_samples * plan.batch.seq_length,
        num_samples=num_samples,
        kinds_ns=dict(kinds),
    )
