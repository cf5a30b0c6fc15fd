"""What a reader must know beside the numbers: each note is a sentence."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

from launcher.base.units import counted
from launcher.contract.alarms.events import count_alarms, read_events
from launcher.contract.inputs.lineage import lineage_text, stored_lineage
from launcher.contract.inputs.record import INPUTS
from launcher.contract.records import Header
from launcher.report.comparability import noted_differences
from launcher.report.ledger import efficiency
from launcher.report.runs import Run

_GAP_WORTH_NOTING = 0.02
_TOO_GOOD = 1.1
"""An efficiency above this is no effect of the layout."""


def run_notes(run: Run) -> Iterator[str]:
    """Notes on one run by itself."""
    records, name = run.records, run.name
    if records.num_starts > 1:
        yield f"{name} was started {records.num_starts} times: only steps since its last start are measured."
    if lineage := stored_lineage(run.path):
        yield f"{name} {lineage_text(lineage)}."
    if earlier := sorted(run.path.glob(f"{INPUTS}.*")):
        yield f"{name} went on with other data or code: {earlier[-1].name} and {INPUTS} tell which."
    if records.num_lost_steps:
        steps = counted(records.num_lost_steps, "step")
        yield f"{name} lost {steps} with starts that failed: their time is in no number here."
    if records.num_torn_lines:
        lines = counted(records.num_torn_lines, "half-written line")
        yield f"{name} leaves out {lines} of killed ranks."
    if records.num_incomplete_steps:
        steps = counted(records.num_incomplete_steps, "step")
        yield f"{name} leaves out {steps} that not every rank recorded."
    for report in run.plugin_reports:
        yield from report.notes
    num_skipped = sum(rows[0].num_skipped for rows in records.parts)
    if num_skipped:
        steps = counted(num_skipped, "step")
        is_scaled = run.plan.config.precision.compute == "fp16"
        why = "the gradient overflowed, and the loss scale was halved" if is_scaled else "by its alarms"
        yield f"{name} skipped the update of {steps}: {why}."
    yield from _alarm_notes(run)
    if records.windows:
        first, last = records.windows[0][0].first_step + 1, records.windows[-1][0].step + 1
        yield (
            f"{name} has sums of its steps {first} to {last}, window by window: a median here is that of the "
            "windows' medians there. Sums and means are over all steps."
        )
    devices = Counter(header.device for header in records.headers)
    if len(devices) > 1:
        listed = ", ".join(f"{count} of {device}" for device, count in sorted(devices.items()))
        yield f"{name} has ranks on different devices ({listed}): the others wait for the slowest."
    gap = gap_fraction(run)
    if gap > _GAP_WORTH_NOTING:
        yield f"{name}: {gap:.0%} of the wall time lies between the steps and is in no number here."


def _alarm_notes(run: Run) -> Iterator[str]:
    counts = count_alarms(read_events(run.path))
    if counts:
        each = (f"{kind.replace('_', ' ')} {counted(number, 'time')}" for kind, number in counts.items())
        told = ", ".join(each)
        yield f"{run.name} raised alarms: {told}; trireme status {run.path} shows the newest."


def layout_notes(run: Run, base: Run | None) -> Iterator[str]:
    """Notes that hold for every repeat of a layout."""
    if not run.plan.exact:
        yield f"{run.name} is not equal to one device by design: compare its loss as well as its speed."
    yield from _replica_notes(run)
    if run.work.num_devices > run.work.num_ranks:
        yield (
            f"{run.name} was allocated {run.work.num_devices} devices and trains on {run.work.num_ranks}: "
            "S is divided by all of them."
        )
    yield from _core_notes(run)
    if base:
        yield from _base_notes(run, base)


def _replica_notes(run: Run) -> Iterator[str]:
    """How far replicas that have weights of their own were apart at the end."""
    found = [row.disagreement for row in run.records.parts[-1] if row.disagreement is not None]
    if found:
        yield (
            f"{run.name}: the weights of its replicas differ by up to {max(found):.2g} of their size from "
            "the average with their neighbours, before the last step; its losses are means over the replicas."
        )


def _base_notes(run: Run, base: Run) -> Iterator[str]:
    if efficiency(run.work, base.work) > _TOO_GOOD:
        yield (
            f"{run.name} is faster than its devices can explain: the machine was probably busy with "
            f"something else while {base.name} ran."
        )
    if base.work.num_ranks > 1:
        yield f"The base {base.name} ran on {base.work.num_ranks} devices: S counts its efficiency as 1."
    bound = core_bound(run, base)
    if bound is not None and bound < run.work.num_devices:
        threads = sum(header.num_threads for header in base.records.headers)
        yield (
            f"The base keeps {counted(threads, 'core')} busy and {run.name} has "
            f"{counted(_total_cores(run), 'core')}: S can hardly exceed {bound:.3g}, whatever the layout."
        )
    for what in ("device", "hostname", "torch_version", "num_threads"):
        mine, theirs = _values(run, what), _values(base, what)
        if mine != theirs:
            yield f"{what} differs: {mine} in {run.name}, {theirs} in the base {base.name}."
    differing = noted_differences(run, base)
    if differing:
        yield f"Settings that differ beside the layout: {', '.join(differing)}."


def gap_fraction(run: Run) -> float:
    """Share of the time from the first to the last measured step that is in no step."""
    wall = inside = 0
    for rows, following in pairwise(run.measured):
        for row, later in zip(rows, following, strict=True):
            wall += later.start_ns - row.start_ns
            inside += row.duration_ns
    for row in run.measured[-1]:  # from its first step to its last, where it is a window
        wall += row.last_start_ns - row.start_ns
        inside += row.duration_ns - row.last_duration_ns
    return 1 - inside / wall if wall else 0.0


def core_bound(run: Run, base: Run) -> float | None:
    """Largest speedup that the cores allow when the base's threads are all busy; None off the CPU."""
    if run.plan.config.device.kind != "cpu":
        return None
    busy = min(sum(header.num_threads for header in base.records.headers), _total_cores(base))
    return base.work.num_ranks * _total_cores(run) / busy


def _core_notes(run: Run) -> Iterator[str]:
    if run.plan.config.device.kind != "cpu":
        return
    for host, headers in _by_host(run).items():
        threads, cores = sum(header.num_threads for header in headers), headers[0].num_cores
        if threads > cores:
            yield (
                f"{run.name}: {counted(len(headers), 'rank')} with {counted(threads, 'thread')} in all share "
                f"{counted(cores, 'core')} on {host}, so ranks wait for cores as well as for each other."
            )


def _by_host(run: Run) -> dict[str, list[Header]]:
    hosts: dict[str, list[Header]] = defaultdict(list)
    for header in run.records.headers:
        hosts[header.hostname].append(header)
    return hosts


def _total_cores(run: Run) -> int:
    return sum(max(header.num_cores for header in headers) for headers in _by_host(run).values())


def _values(run: Run, field: str) -> str:
    return ", ".join(sorted({str(getattr(header, field)) for header in run.records.headers}))
