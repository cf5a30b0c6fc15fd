"""The speedup report as text, for a terminal or a file."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.base.columns import columns, wrapped
from launcher.base.units import counted, format_bytes, format_count, format_duration, format_percent
from launcher.contract.records import COMPUTE, SERVER
from launcher.report.bubble import bubble
from launcher.report.claims import Promise, claims
from launcher.report.ledger import LEDGER_KINDS, NOT_TRAINING, amdahl_speedup
from launcher.report.runs import Run
from launcher.report.speedup import Result, SpeedupReport, compare

_MEANINGS = {
    COMPUTE: "forward and backward",
    "replicated": "optimizer and clipping, repeated by every replica",
    "single_rank": "evaluation, checkpoint, log",
    "transfer": "data in flight",
    "peer_wait": "waiting for the slowest rank of a collective",
    "pipeline_wait": "waiting for another stage (the bubble, uneven stages)",
    SERVER: "waiting for the servers",
    "input_wait": "waiting for the next batch",
    "other": "the rest of the step",
    NOT_TRAINING: "allocated, but no trainer rank",
}
_BAR_CELLS = 18
_TOO_SMALL = 5e-4
"""Below this a number prints as 0.000."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """The characters that a stream can show."""

    full: str
    halves: str
    """Partial cells, from the smallest."""
    negative: str
    rule: str


UNICODE = Style(full="█", halves="▏▎▍▌▋▊▉", negative="░", rule="─")
ASCII = Style(full="#", halves="", negative="-", rule="-")


def speedup_text(
    run_dirs: list[Path], base: Path | None, *, width: int = 100, ascii_only: bool | None = None
) -> str:
    """Reads the runs and writes the report, at most ``width`` columns wide.

    ``base`` None: each run's own baseline, from its job.json. ``ascii_only`` None: as stdout allows.

    Raises:
        LauncherError: see `launcher.report.speedup.compare`.
    """
    return report_text(compare(run_dirs, base), width=width, ascii_only=ascii_only)


def report_text(report: SpeedupReport, *, width: int = 100, ascii_only: bool | None = None) -> str:
    """The report of runs that were compared already."""
    if ascii_only is None:
        ascii_only = not (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
    style = ASCII if ascii_only else UNICODE
    several = len(report.results) > 1
    blocks: list[Iterable[str]] = [_title(report, width), _compared(report, width), _table(report, style)]
    for result in report.results:
        whose = f" of {result.median.run.layout}" if several else ""
        blocks += [(*_ledger(result, style, whose), "", *_facts(result))]
    runs = [result.median.run for result in report.results]
    blocks += [claims([Promise(label=run.layout, plan=run.plan, run=run, end="succeeded") for run in runs])]
    blocks += [_losses(report), _notes(report, width)]
    return "\n\n".join("\n".join(lines) for lines in map(list, blocks) if lines) + "\n"


def bar(value: float, largest: float, style: Style) -> str:
    """A bar whose full length stands for ``largest``; a negative value has its own fill.

    >>> bar(0.5, 1.0, ASCII), bar(-0.5, 1.0, ASCII), bar(0.0, 1.0, ASCII)
    ('#########', '---------', '')
    """
    cells = abs(value) / largest * _BAR_CELLS if largest > 0 else 0.0
    if value < 0 or not style.halves:
        return (style.negative if value < 0 else style.full) * round(cells)
    parts = len(style.halves) + 1
    whole, rest = divmod(round(cells * parts), parts)
    return style.full * whole + (style.halves[rest - 1] if rest else "")


def _title(report: SpeedupReport, width: int) -> Iterator[str]:
    layouts = ", ".join(result.median.run.layout for result in report.results)
    bases = ", ".join(dict.fromkeys(base.layout for base in report.bases))
    title = f"Speedup of {layouts} against {bases}" if bases else f"Throughput of {layouts} (no speedup)"
    yield textwrap.fill(title, width, subsequent_indent="  ")


def _compared(report: SpeedupReport, width: int) -> Iterator[str]:
    rows = [("base", _run_text(base)) for base in report.bases]
    rows += [("run", _run_text(pair.run)) for result in report.results for pair in result.pairs]
    rows += [("no base", report.why_no_base)] if report.why_no_base else []
    rows += [("constant", _constant_text(report))]
    rows += [("repeats", _repeats_text(result, _unit(report))) for result in report.results]
    rows += [("scaling", _scaling_text(result)) for result in report.results if result.median.scaling]
    for label, text in dict.fromkeys(rows):
        yield wrapped(f"  {label:<9} ", text, width)


def _run_text(run: Run) -> str:
    dropped = run.records.num_steps - run.work.num_steps
    measured = counted(run.work.num_steps, "step")
    return f"{run.name} ({run.layout}): {measured} measured, {dropped} dropped (warm-up)"


def _constant_text(report: SpeedupReport) -> str:
    plan = report.results[0].median.run.plan
    config = plan.config
    batches = {run.work.samples_per_step for run in _runs(report)}
    words = [f"model {config.model.name} ({format_count(plan.num_parameters)} parameters)"]
    words += [f"data {config.data.name}"]
    words += [f"global batch {batches.pop():g}"] if len(batches) == 1 else []
    words += [f"sequence length {config.batch.seq_length}"] if plan.batch.unit == "tokens" else []
    return ", ".join([*words, f"precision {config.precision.compute}", f"device {config.device.name}"])


def _scaling_text(result: Result) -> str:
    run, base = result.median.run, result.median.base
    assert base is not None, "scaling is a comparison with a base"
    unit = run.plan.batch.unit.removesuffix("s")
    sizes = f"{base.work.samples_per_step:g} -> {run.work.samples_per_step:g} samples per step"
    texts = {
        "strong": f"strong: the same global batch of {run.work.samples_per_step:g} on more devices",
        "weak": f"weak: the same batch per device ({sizes}); S is per {unit}, not per step",
        "neither": f"neither strong nor weak ({sizes}): a comparison per {unit}",
    }
    return texts[str(result.median.scaling)]


def _repeats_text(result: Result, unit: str) -> str:
    if len(result.pairs) == 1:
        return "1 run: no spread known"
    values = result.speedups or [pair.run.work.tokens_per_s for pair in result.pairs]
    low, high = values[0], values[-1]
    spread = f"S from {low:.2f} to {high:.2f}"
    if not result.speedups:
        spread = f"{format_count(low)} to {format_count(high)} {unit}/s"
    return f"{result.median.run.layout}: the median of {len(values)} runs is shown, {spread}"


def _table(report: SpeedupReport, style: Style) -> Iterator[str]:
    rows = [("", "devices", "step", f"{_unit(report)}/s", "speedup S", "efficiency E")]
    rows += [_base_row(base) for base in report.bases]
    rows += [_result_row(result) for result in report.results]
    filled = [column for column in zip(*rows, strict=True) if any(column[1:])]
    heading, *lines = columns(list(zip(*filled, strict=True)))
    yield from (f"  {line}" for line in (heading, style.rule * len(heading), *lines))


def _speed_cells(run: Run) -> tuple[str, str, str]:
    work = run.work
    return str(work.num_devices), format_duration(work.step_s), format_count(work.tokens_per_s)


def _base_row(base: Run) -> tuple[str, str, str, str, str, str]:
    """A base of several devices counts as that many: its S is their number."""
    return (base.layout, *_speed_cells(base), f"{base.work.num_devices:.2f}", "100 %")


def _result_row(result: Result) -> tuple[str, str, str, str, str, str]:
    run, speedup, efficiency = result.median.run, result.median.speedup, result.median.efficiency
    speed = f"{speedup:.2f}" if speedup is not None else ""
    share = f"{100 * efficiency:.0f} %" if efficiency is not None else ""
    return (run.layout, *_speed_cells(run), speed, share)


def _ledger(result: Result, style: Style, whose: str) -> Iterator[str]:
    run, total = result.median.run, sum(result.median.devices.values())
    whose += f" (median run {run.name})" if len(result.pairs) > 1 else ""
    speedup, num_devices = result.median.speedup, run.work.num_devices
    if speedup is None:
        yield f"What the device time{whose} went to, in devices"
    else:
        yield f"Where the missing devices{whose} went: {num_devices} - {speedup:.3f} = {_number(total)} lost"
    largest = max(map(abs, result.median.devices.values()))
    for kind in LEDGER_KINDS:
        value = result.median.devices[kind]
        if kind in (SERVER, NOT_TRAINING) and not value:
            continue
        drawn = bar(value, largest, style) if abs(value) >= _TOO_SMALL else ""
        label, meaning = _words(kind, value, has_base=speedup is not None)
        yield f"  {label:<14} {_number(value):>8}  {drawn:<{_BAR_CELLS}}  {meaning}"
    closing = "= P - S = P (1 - E)" if speedup is not None else "= P"
    yield f"  {'sum':<14} {_number(total):>8}  {closing}"


def _words(kind: str, value: float, *, has_base: bool) -> tuple[str, str]:
    """The label of a kind and what it means."""
    meaning = _MEANINGS[kind]
    if value <= -_TOO_SMALL:
        meaning += "; less than in the base"
    elif kind == COMPUTE and has_base:
        meaning += "; more than in the base"
    return "extra compute" if kind == COMPUTE and has_base else kind.replace("_", " "), meaning


def _number(value: float) -> str:
    """Three decimals, and no minus before a zero."""
    return f"{round(value, 3) + 0.0:.3f}"


def _facts(result: Result) -> Iterator[str]:
    run, percent = result.median.run, format_percent
    schedule, serial, karp_flatt = run.plan.schedule, result.median.serial_fraction, result.median.karp_flatt
    if serial is not None and result.median.scaling == "strong":
        limit = f"undivided, it limits S to {amdahl_speedup(serial, run.work.num_ranks):.2f} (Amdahl)"
        yield f"  serial fraction of the base's step (measured): {percent(serial)}; {limit}"
    if karp_flatt is not None and karp_flatt <= 1:
        yield f"  serial fraction that would explain S alone (Karp-Flatt): {percent(karp_flatt)}"
    elif karp_flatt is not None:
        yield "  slower than the base: no serial fraction explains that (Karp-Flatt above 100 %)"
    if found := bubble(run):
        closed = schedule.bubble_formula
        formula = f"{percent(closed)} by formula, " if closed is not None else ""
        yield f"  bubble, idle / (idle + compute) of the pipeline: measured {percent(found.measured)}"
        yield f"    {percent(found.replayed)} by simulation with the measured time of every action"
        yield f"    predicted before the run: {formula}{percent(schedule.bubble_simulated)} by simulation"
    measured, predicted = format_duration(run.work.step_s), format_duration(schedule.step_s)
    yield f"  step: measured {measured}; predicted {predicted}"
    yield from (f"  {line}" for report in run.plugin_reports for line in report.lines)
    yield from _memory(run)


def _memory(run: Run) -> Iterator[str]:
    """What the fullest rank held, beside what was predicted for it."""
    if not run.records.memory:
        return
    pp_ranks = {header.rank: header.pp_rank for header in run.records.headers}
    rank, found = max(run.records.memory.items(), key=lambda item: item[1].states_bytes)
    planned = run.plan.memory[pp_ranks[rank]]
    *kinds, last = planned.update_bytes
    gap = "\n    " if planned.persistent_bytes else " "
    yield (
        f"  held by rank {rank} at the update: measured {format_bytes(found.states_bytes)}; predicted "
        f"{format_bytes(sum(planned.update_bytes.values()))}{gap}of {', '.join(kinds)} and {last}"
    )
    what = "growth of the whole process" if run.plan.config.device.kind == "cpu" else "by the allocator"
    yield (
        f"  memory of rank {rank} at most: measured {format_bytes(found.peak_bytes)} ({what}); "
        f"predicted {format_bytes(planned.total_bytes)}"
    )


def _losses(report: SpeedupReport) -> Iterator[str]:
    for run in _runs(report):
        if final := run.final_loss:
            steps = counted(final.num_steps, "step")
            yield f"  {final.kind} loss {final.loss:.4f} after {steps} of {run.name}"
    for pair in (result.median for result in report.results):
        if pair.base and (losses := pair.losses_in_base_steps):
            both = f"{losses[0]:.4f} in {pair.run.name}, {losses[1]:.4f} in {pair.base.name}"
            yield f"  training loss after the {pair.base_steps} steps of the base: {both}"


def _notes(report: SpeedupReport, width: int) -> Iterator[str]:
    if report.notes:
        yield "Notes"
    for note in report.notes:
        yield wrapped("  - ", note, width)


def _unit(report: SpeedupReport) -> str:
    return report.results[0].median.run.plan.batch.unit


def _runs(report: SpeedupReport) -> Sequence[Run]:
    """Every run once, bases first."""
    runs = [*report.bases, *(pair.run for result in report.results for pair in result.pairs)]
    return list({run.path.resolve(): run for run in runs}.values())
