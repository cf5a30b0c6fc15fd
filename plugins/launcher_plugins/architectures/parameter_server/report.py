"""What servers write of their work, and what the report of a run tells of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from launcher.base.arithmetic import weighted_median
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


_SUMS, _STALENESS = "updates", "staleness_"


@dataclass(frozen=True, kw_only=True)
class UpdateSums:
    """Updates of one server, summed."""

    num_updates: int
    first_step: int
    """The first step that any of them is of."""
    last_step: int
    """The last one."""
    busy_ns: int
    num_of_workers: int
    """Those that are of one worker's gradient."""
    staleness: Mapping[int, int]
    """Staleness -> updates that have it."""

    def values(self) -> dict[str, Any]:
        """As they are recorded: a record of a role holds numbers alone."""
        counts = {f"{_STALENESS}{value}": count for value, count in self.staleness.items()}
        return {
            "type": _SUMS,
            **{key: value for key, value in vars(self).items() if key != "staleness"},
            **counts,
        }


def summed(updates: Sequence[UpdateRecord]) -> UpdateSums:
    """The sums of some updates.

    >>> summed([UpdateRecord(update=3, step=1, busy_ns=5, worker=0, pulled_at=1)]).staleness
    {2: 1}
    """
    return UpdateSums(
        num_updates=len(updates),
        first_step=min(update.step for update in updates),
        last_step=max(update.step for update in updates),
        busy_ns=sum(update.busy_ns for update in updates),
        num_of_workers=sum(update.worker is not None for update in updates),
        staleness=dict(Counter(update.staleness for update in updates)),
    )


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
    updates = [record for record in records if isinstance(record, UpdateSums)]
    losses = {record.worker: record.step for record in records if isinstance(record, LossRecord)}
    counts = _counts(updates)
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
    return {
        header.rank: weighted_median((rows[index].own_ns, rows[index].num_steps) for rows in run.measured)
        / 1e9
        for index, header in enumerate(run.records.headers)
    }


def _record(kind: str, values: Mapping[str, Any]) -> UpdateSums | LossRecord:
    """A record; one update as a sum of one."""
    known: dict[str, Callable[..., UpdateSums | LossRecord]]
    known = {"update": _update, "loss": LossRecord, _SUMS: _sums}
    if kind not in known:
        raise LauncherError(f"the records of a server: type {kind!r} is none of {', '.join(known)}")
    try:
        return known[kind](**values)
    except TypeError as error:
        raise LauncherError(f"the records of a server: {error}") from error


def _update(**values: Any) -> UpdateSums:
    return summed([UpdateRecord(**values)])


def _sums(**values: Any) -> UpdateSums:
    counts = {key: values.pop(key) for key in tuple(values) if key.startswith(_STALENESS)}
    staleness = {int(key.removeprefix(_STALENESS)): count for key, count in counts.items()}
    return UpdateSums(**values, staleness=staleness)


def _counts(updates: Sequence[UpdateSums]) -> Counter[int]:
    """How many updates have each staleness."""
    counts: Counter[int] = Counter()
    for update in updates:
        counts.update(update.staleness)
    return counts


def _lines(
    run: TrainedRun,
    planned: Mapping[str, Any],
    updates: Sequence[UpdateSums],
    own_s: Mapping[int, float],
) -> Iterator[str]:
    waited = sum(row.kinds_ns.get(SERVER, 0) for rows in run.measured for row in rows)
    num_steps = len(run.measured_steps) * len(run.records.headers)
    ring = format_duration(planned["all_reduce_s"])
    yield f"waiting for the servers: measured {format_duration(waited / num_steps / 1e9)} a step"
    whole = format_duration(planned["total_s"])
    yield f"  predicted for the whole exchange: {whole}; {ring} as an all-reduce"
    slowest = max(own_s, key=lambda rank: own_s[rank])
    yield (
        f"a worker's step without that wait: {format_duration(median(own_s.values()))} in the middle; "
        f"{format_duration(own_s[slowest])} at most, of worker {slowest}"
    )
    steps = run.measured_steps
    measured = [sums for sums in updates if sums.first_step in steps and sums.last_step in steps]
    if measured:
        busy = sum(sums.busy_ns for sums in measured) / sum(sums.num_updates for sums in measured) / 1e9
        predicted = format_duration(planned["update_s"])
        yield f"a server's work on an update: measured {format_duration(busy)}; predicted {predicted}"
    if any(sums.num_of_workers for sums in measured):
        yield f"staleness, other updates since the pull: {_histogram(measured)}"


def _histogram(updates: Sequence[UpdateSums]) -> str:
    """The shares of the commonest values, and the largest value."""
    counts = _counts(updates)
    shown = sorted(value for value, _ in counts.most_common(_MOST_VALUES))
    shares = [f"{value}: {counts[value] / counts.total():.0%}" for value in shown]
    return f"{', '.join(shares)} (at most {max(counts)})"
