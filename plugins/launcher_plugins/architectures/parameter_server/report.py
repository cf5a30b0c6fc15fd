"""What servers write of their work, and what the report of a run tells of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from launcher.base.errors import LauncherError
from launcher.base.units import counted, format_duration
from launcher.contract.records import SERVER
from launcher.contract.strategy import RunReport, TrainedRun

_MOST_VALUES = 6
"""Values of the staleness that are told."""


@dataclass(frozen=True, kw_only=True)
class UpdateRecord:
    """One update of a server's part of the parameters, in the order in which they were made."""

    type: Literal["update"] = "update"
    update: int
    """0-based, over all starts of the run."""
    step: int
    """Of the gradients."""
    busy_ns: int
    """Time that the server worked on it."""
    worker: int | None = None
    """Whose gradient it is; None: the sum over all workers."""
    pulled_at: int | None = None
    """Updates in the parameters that the gradient was computed with; None for a sum: all before this one."""

    @property
    def staleness(self) -> int:
        """Updates that were made between the pull of the parameters and this one."""
        return 0 if self.pulled_at is None else self.update - self.pulled_at


@dataclass(frozen=True, kw_only=True)
class LossRecord:
    """A worker that was gone, as a server saw it."""

    type: Literal["loss"] = "loss"
    worker: int
    step: int
    """Steps it had done."""


def report(run: TrainedRun, planned: Mapping[str, Any]) -> RunReport:
    """What the servers took, beside what was predicted, and how old the gradients were.

    ``planned``: the values of the plan's section.

    Raises:
        LauncherError: when a server has written anything but updates and losses.
    """
    records = [_record(record.type, record.values) for rank in run.records.roles.values() for record in rank]
    updates = [record for record in records if isinstance(record, UpdateRecord)]
    losses = {record.worker: record.step for record in records if isinstance(record, LossRecord)}
    counts = Counter(record.staleness for record in updates)
    own_s = own_step_s(run)
    return RunReport(
        lines=tuple(_lines(run, planned, updates, own_s)) if planned and updates else (),
        notes=tuple(
            f"{run.name} lost worker {worker} after {counted(num_done, 'step')}; the others went on."
            for worker, num_done in sorted(losses.items())
        ),
        measured={
            "staleness": {str(value): counts[value] for value in sorted(counts)},
            "own_step_s": own_s if updates else None,
        },
        predicted={"exchange": planned or None},
    )


def own_step_s(run: TrainedRun) -> dict[int, float]:
    """Rank of each worker -> the median of its steps, without the time in which it waited for the servers, so
    that one that is late is known by name."""
    rows = [run.records.steps[step] for step in run.measured]
    return {
        header.rank: median(row[index].duration_ns - row[index].kinds_ns.get(SERVER, 0) for row in rows) / 1e9
        for index, header in enumerate(run.records.headers)
    }


def _record(kind: str, values: Mapping[str, int | None]) -> UpdateRecord | LossRecord:
    known: dict[str, type[UpdateRecord | LossRecord]] = {"update": UpdateRecord, "loss": LossRecord}
    if kind not in known:
        raise LauncherError(f"the records of a server: type {kind!r} is none of {', '.join(known)}")
    try:
        return known[kind](**values)  # type: ignore[arg-type]
    except TypeError as error:
        raise LauncherError(f"the records of a server: {error}") from error


def _lines(
    run: TrainedRun,
    planned: Mapping[str, Any],
    updates: Sequence[UpdateRecord],
    own_s: Mapping[int, float],
) -> Iterator[str]:
    waits = [row.kinds_ns.get(SERVER, 0) for step in run.measured for row in run.records.steps[step]]
    ring = format_duration(planned["all_reduce_s"])
    yield f"waiting for the servers: measured {format_duration(sum(waits) / len(waits) / 1e9)} a step"
    whole = format_duration(planned["total_s"])
    yield f"  predicted for the whole exchange: {whole}; {ring} as an all-reduce"
    slowest = max(own_s, key=lambda rank: own_s[rank])
    yield (
        f"a worker's step without that wait: {format_duration(median(own_s.values()))} in the middle; "
        f"{format_duration(own_s[slowest])} at most, of worker {slowest}"
    )
    steps = set(run.measured)
    measured = [record for record in updates if record.step in steps]
    if measured:
        busy = sum(record.busy_ns for record in measured) / len(measured) / 1e9
        predicted = format_duration(planned["update_s"])
        yield f"a server's work on an update: measured {format_duration(busy)}; predicted {predicted}"
    if any(record.worker is not None for record in measured):
        yield f"staleness, other updates since the pull: {_histogram(measured)}"


def _histogram(updates: Sequence[UpdateRecord]) -> str:
    """The shares of the commonest values, and the largest value."""
    counts = Counter(record.staleness for record in updates)
    shown = sorted(value for value, _ in counts.most_common(_MOST_VALUES))
    shares = [f"{value}: {counts[value] / len(updates):.0%}" for value in shown]
    return f"{', '.join(shares)} (at most {max(counts)})"
