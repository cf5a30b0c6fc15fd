"""Compares runs with a base on one device: speedup, efficiency, and where the missing devices went."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.base.errors import ConfigError, LauncherError
from launcher.contract.records import PIPELINE_WAIT
from launcher.report import ledger
from launcher.report.bubble import bubble
from launcher.report.comparability import faults
from launcher.report.notes import layout_notes, run_notes
from launcher.report.runs import Run, load_run, named_base, printable
from launcher.typed.read import plain


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A run and what it is measured against."""

    run: Run
    base: Run | None

    @property
    def speedup(self) -> float | None:
        """S, or None without a base."""
        return ledger.speedup(self.run.work, self.base.work) if self.base else None

    @property
    def efficiency(self) -> float | None:
        """E, or None without a base."""
        return ledger.efficiency(self.run.work, self.base.work) if self.base else None

    @property
    def scaling(self) -> ledger.Scaling | None:
        """What was held constant while devices were added."""
        return ledger.scaling(self.run.work, self.base.work) if self.base else None

    @property
    def devices(self) -> dict[str, float]:
        """Devices by kind: lost ones, or without a base the occupied ones."""
        work = self.run.work
        return ledger.lost_devices(work, self.base.work) if self.base else ledger.device_shares(work)

    @property
    def base_steps(self) -> int | None:
        """The steps that the base made, where the run made more; None: no fewer."""
        if self.base is None:
            return None
        run, base = (each.records.parts[-1][0].step + 1 for each in (self.run, self.base))
        return base if base < run else None

    @property
    def losses_in_base_steps(self) -> tuple[float, float] | None:
        """The training loss of the run and of its base after `base_steps`, where both are known."""
        if self.base is None or self.base_steps is None:
            return None
        run, base = (each.loss_after(self.base_steps) for each in (self.run, self.base))
        return (run, base) if run is not None and base is not None else None

    @property
    def serial_fraction(self) -> float | None:
        """Share of the base's step that this layout does not divide."""
        copies, num_ranks = self.run.plan.num_update_copies, self.run.work.num_ranks
        return ledger.serial_fraction(self.base.work, copies, num_ranks) if self.base else None

    @property
    def karp_flatt(self) -> float | None:
        """The serial fraction that would explain S; it is defined for strong scaling."""
        if self.speedup is None or self.scaling != "strong":
            return None
        return ledger.karp_flatt(self.speedup, self.run.work.num_devices)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One layout, over all runs of it. The run, not the step, is the unit of repetition."""

    pairs: tuple[Pair, ...]
    """Ascending by speedup, or by throughput without a base."""

    @property
    def median(self) -> Pair:
        """The middle pair (the lower of two): a run that happened, so that its ledger closes."""
        return self.pairs[(len(self.pairs) - 1) // 2]

    @property
    def speedups(self) -> tuple[float, ...]:
        """S of every run, ascending; empty without a base."""
        return tuple(pair.speedup for pair in self.pairs if pair.speedup is not None)


@dataclass(frozen=True, kw_only=True)
class SpeedupReport:
    """Everything that the table shows."""

    results: tuple[Result, ...]
    bases: tuple[Run, ...]
    """Each once; empty when there is nothing to compare with."""
    why_no_base: str
    """Why there is no speedup; empty where there is one."""
    notes: tuple[str, ...]


def compare(run_dirs: Sequence[Path], base: Path | None) -> SpeedupReport:
    """Reads and compares runs; ``base`` None: each with the baseline that its job.json names.

    Raises:
        LauncherError: a directory given twice, not readable as a run, or runs that are not comparable.
    """
    paths = list(run_dirs)
    for index, path in enumerate(paths):
        if path.resolve() in [other.resolve() for other in paths[:index]]:
            raise LauncherError(f"{path} is given twice: one run is no repetition of itself")
    base_dirs, why_no_base = _base_dirs(paths, base)
    loaded = {path.resolve(): path for path in (*paths, *base_dirs)}
    runs = {resolved: load_run(path) for resolved, path in loaded.items()}
    base_runs: Sequence[Run | None] = [runs[path.resolve()] for path in base_dirs] or [None] * len(paths)
    pairs = [
        Pair(run=runs[path.resolve()], base=base_run) for path, base_run in zip(paths, base_runs, strict=True)
    ]
    _check_comparable(pairs)
    bases = {pair.base.path.resolve(): pair.base for pair in pairs if pair.base}
    results = tuple(_results(pairs))
    return SpeedupReport(
        results=results,
        bases=tuple(bases.values()),
        why_no_base=why_no_base,
        notes=tuple(dict.fromkeys(_notes(results))),
    )


def to_json(report: SpeedupReport) -> str:
    """The report for programs."""
    data = {
        "bases": [_run_data(run) for run in report.bases],
        "results": [_result_data(result) for result in report.results],
        "why_no_base": report.why_no_base or None,
        "notes": list(report.notes),
    }
    return json.dumps(data, indent=1, allow_nan=False)


def _base_dirs(paths: Sequence[Path], base: Path | None) -> tuple[list[Path], str]:
    """One base per run, or none at all and why."""
    if base is not None:
        return [base] * len(paths), ""
    found: list[Path] = []
    for path in paths:
        named = named_base(path)
        if named is None:
            return [], f"{printable(path)} names no baseline; give one with --base RUN"
        if not named.is_dir():
            gone = f"the baseline of {printable(path)}, {printable(named)}, is gone"
            return [], f"{gone}; give another with --base RUN"
        found.append(named)
    return found, ""


def _check_comparable(pairs: Sequence[Pair]) -> None:
    reference = pairs[0].base or pairs[0].run
    others = [run for pair in pairs for run in (pair.run, pair.base) if run and run is not reference]
    unique = {id(run): run for run in others}
    found = [fault for run in unique.values() for fault in faults(run, reference)]
    if found:
        raise ConfigError(found)


def _results(pairs: Sequence[Pair]) -> Iterator[Result]:
    """One result per layout, in the order in which the runs were given."""
    layouts: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        config, work = pair.run.plan.config, pair.run.work
        layout = (config.parallel, config.architecture, config.batch, work.num_devices)
        layouts[json.dumps(plain(layout), sort_keys=True)].append(pair)
    for same in layouts.values():
        yield Result(pairs=tuple(sorted(same, key=lambda pair: pair.speedup or pair.run.work.tokens_per_s)))


def _notes(results: Sequence[Result]) -> Iterator[str]:
    for pair in (pair for result in results for pair in result.pairs):
        yield from run_notes(pair.run)
        yield from run_notes(pair.base) if pair.base else ()
    for result in results:
        yield from layout_notes(result.median.run, result.median.base)


def _run_data(run: Run) -> dict[str, Any]:
    final = run.final_loss
    return {
        "run": str(run.path),
        "layout": run.layout,
        "num_devices": run.work.num_devices,
        "num_ranks": run.work.num_ranks,
        "num_steps": run.work.num_steps,
        "num_starts": run.records.num_starts,
        "num_lost_steps": run.records.num_lost_steps,
        "step_s": run.work.step_s,
        "tokens_per_s": run.work.tokens_per_s,
        "unit": run.plan.batch.unit,
        "samples_per_step": run.work.samples_per_step,
        "kinds_ns": dict(run.work.kinds_ns),
        "final_loss": _finite(plain(final)) if final else None,
    }


def _result_data(result: Result) -> dict[str, Any]:
    median = result.median
    found, schedule, kinds = bubble(median.run), median.run.plan.schedule, median.run.work.kinds_ns
    reports = median.run.plugin_reports
    return {
        "median": _run_data(median.run),
        "base": str(median.base.path) if median.base else None,
        "runs": [str(pair.run.path) for pair in result.pairs],
        "speedup": median.speedup,
        "speedups": list(result.speedups),
        "efficiency": median.efficiency,
        "scaling": median.scaling,
        "lost_devices" if median.base else "devices": median.devices,
        "serial_fraction": median.serial_fraction,
        "karp_flatt": median.karp_flatt,
        "base_steps": median.base_steps,
        "losses_in_base_steps": list(map(_or_null, median.losses_in_base_steps or ())),
        "measured": {
            "pipeline_wait_fraction": kinds[PIPELINE_WAIT] / sum(kinds.values()),
            "bubble": plain(found) if found else None,
            **{name: value for extra in reports for name, value in extra.measured.items()},
        },
        "predicted": {
            "bubble_formula": schedule.bubble_formula,
            "bubble_simulated": schedule.bubble_simulated,
            "step_s": schedule.step_s,
            **{name: value for extra in reports for name, value in extra.predicted.items()},
        },
    }


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """A diverged loss has no number in JSON: it becomes null."""
    return {key: _or_null(value) for key, value in values.items()}


def _or_null(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
