"""Splits blocked time into moving data and waiting for others, from all ranks' records together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from launcher.base.errors import LauncherError
from launcher.contract.records import (
    COLLECTIVE_KINDS,
    COMPUTE,
    INPUT,
    OTHER,
    PEER_WAIT,
    PIPELINE,
    PIPELINE_WAIT,
    REPLICATED,
    REPORT_KINDS,
    SERVER,
    SINGLE_RANK,
    TRANSFER,
    Header,
    Part,
    StepRecord,
    WindowRecord,
)

_SHARED = {
    "tp": ("pp_rank", "dp_rank"),
    "dp": ("pp_rank", "tp_rank"),
    "model": ("dp_rank",),
    "tied": ("dp_rank", "tp_rank"),
}
"""The coordinates that the members of one group have in common."""


def split(headers: Sequence[Header], rows: Sequence[Part]) -> tuple[dict[str, int], ...]:
    """The `REPORT_KINDS` of one step, or of the steps of a window, in nanoseconds: one dict per rank.

    A collective ends for all members together, so the member that came last waited for nobody: its
    time in the call, the shortest, is the ``transfer`` of all, and what the others spent beyond it
    is ``peer_wait``. That is taken call by call; totals over a step would hide waiting that changes
    sides. It holds for collectives in which every member needs every other (all-reduce, all-gather,
    reduce-scatter), not for a broadcast. A message between stages has one side that waits, so its
    ``transfer`` is the time calibrated for it in warm-up, and the rest is ``pipeline_wait``.

    The kinds of a rank sum to its steps exactly.

    Raises:
        LauncherError: when two members of a group made different numbers of calls.
    """
    found = [_own(header, row) for header, row in zip(headers, rows, strict=True)]
    for kind in COLLECTIVE_KINDS:
        is_used = any(kind in row.kinds_ns for row in rows)
        for indices in groups(headers, kind) if is_used else ():
            transfer = _transfer_ns(headers, rows, kind, indices)
            for index in indices:
                found[index][TRANSFER] += transfer
                found[index][PEER_WAIT] += rows[index].kinds_ns.get(kind, 0) - transfer
    for header, row, kinds in zip(headers, rows, found, strict=True):
        if sum(kinds.values()) != row.duration_ns:
            raise LauncherError(
                f"step {row.step}: rank {header.rank} made tied calls, but holds no tied weights"
            )
    return tuple(found)


def waited_ns(headers: Sequence[Header], rows: Sequence[Part], kinds: Sequence[str]) -> int:
    """Time that all ranks together waited in these collective kinds for the member that came last."""
    total = 0
    for kind in kinds:
        for indices in groups(headers, kind):
            blocked = sum(rows[index].kinds_ns.get(kind, 0) for index in indices)
            total += blocked - len(indices) * _transfer_ns(headers, rows, kind, indices)
    return total


def groups(headers: Sequence[Header], kind: str) -> list[list[int]]:
    """The groups of a collective kind, each as indices in ``headers``."""
    last_pp_rank = max(header.pp_rank for header in headers)
    members: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, header in enumerate(headers):
        if kind != "tied" or header.pp_rank in (0, last_pp_rank):
            members[tuple(getattr(header, name) for name in _SHARED[kind])].append(index)
    return list(members.values())


def _own(header: Header, row: Part) -> dict[str, int]:
    """What one rank's record tells by itself."""
    kinds = dict.fromkeys(REPORT_KINDS, 0)
    for kind in (COMPUTE, REPLICATED, SINGLE_RANK, SERVER, INPUT, OTHER):
        kinds[kind] = row.kinds_ns.get(kind, 0)
    blocked = row.kinds_ns.get(PIPELINE, 0)
    if isinstance(row, StepRecord):
        kinds[TRANSFER] = min(blocked, row.num_receives * header.p2p_latency_ns)
    else:
        kinds[TRANSFER] = row.shortest_ns.get(PIPELINE) or 0
    kinds[PIPELINE_WAIT] = blocked - kinds[TRANSFER]
    return kinds


def _transfer_ns(headers: Sequence[Header], rows: Sequence[Part], kind: str, indices: list[int]) -> int:
    """The shortest times of the calls of one group, summed."""
    members = [rows[index] for index in indices]
    steps = [row for row in members if isinstance(row, StepRecord)]
    if len(steps) == len(members):
        return sum(shortest_calls_ns(headers, steps, kind, indices))
    found = {row.shortest_ns.get(kind) for row in members if isinstance(row, WindowRecord)}
    time = found.pop() if len(found) == 1 else None
    if time is None:
        names = ", ".join(str(headers[index].rank) for index in indices)
        raise LauncherError(
            f"steps {members[0].first_step} to {members[0].step}: ranks {names} did not make the same {kind} "
            "calls; they cannot be matched"
        )
    return time


def shortest_calls_ns(
    headers: Sequence[Header], rows: Sequence[StepRecord], kind: str, indices: Sequence[int]
) -> list[int]:
    """For each call of one group in a step, the shortest time that a member spent in it; ``rows`` and the
    ``indices`` of their headers are those of its members.

    Raises:
        LauncherError: when two of them made different numbers of calls.
    """
    calls = [row.collectives_ns.get(kind, ()) for row in rows]
    for index, row, times in zip(indices, rows, calls, strict=True):
        if len(times) != len(calls[0]):
            raise LauncherError(
                f"step {row.step}: rank {headers[index].rank} made {len(times)} {kind} calls, "
                f"rank {headers[indices[0]].rank} of the same group {len(calls[0])}; they cannot be matched"
            )
    return list(map(min, zip(*calls, strict=True)))
