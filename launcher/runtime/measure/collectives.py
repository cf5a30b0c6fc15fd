"""Measures collective operations between the ranks of a plan, in place of a training.

Every operation is first called once and its value checked; then all of them are timed in rounds, so that
what disturbs the machine for a while disturbs all alike. A time is that of some calls in a row on the
slowest rank of all groups, over their number.
"""

from __future__ import annotations

import json
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from launcher.base.files import write_whole
from launcher.contract.bench import (
    REQUEST_FILE,
    RESULT_FILE,
    BenchRequest,
    BenchResult,
    Measurement,
    NotMeasured,
    Placement,
)
from launcher.contract.plan import Plan
from launcher.runtime.measure.clock import device_name
from launcher.runtime.measure.collective_cases import Case, make_case, real_bytes
from launcher.runtime.process.groups import Group, backend
from launcher.runtime.process.heartbeat import Heart
from launcher.runtime.process.log import say
from launcher.runtime.process.process_rank import Place
from launcher.runtime.process.rank import choose_device
from launcher.typed.read import Reading, plain, read

_TARGET_S = 0.02
"""About how long the calls of one time take together."""
_MOST_CALLS = 100
_WARMUP_CALLS = 2
_RIGHT, _ABSENT, _WRONG = 0, 1, 2
"""What came of the first call."""
_ABSENT_WORDS = ("not support", "unsupported", "not implement", "no backend")
"""In what a library says of an operation that it has not got."""


def run(plan: Plan, place: Place, run_dir: Path, heart: Heart, *, resume: bool) -> None:
    """Measures as this rank of the plan; rank 0 writes what was found. ``resume`` changes nothing: there
    is nothing to go on from."""
    request = read(BenchRequest, plan.documents[REQUEST_FILE], Reading())
    assert request is not None, "the plan was made with another request"
    device = choose_device(plan, place)
    timeout = timedelta(seconds=plan.config.run.timeout_s)
    dist.init_process_group(backend(plan), timeout=timeout)
    heart.close()  # a collective takes as long as it takes; one that hangs has its own timeout
    result = Bench(request, place.rank, device, timeout).result()
    if place.rank == 0:
        write_whole(run_dir / RESULT_FILE, json.dumps(plain(result), indent=1) + "\n")
    dist.barrier()  # a rank that left early would look dead to one that is still at work
    dist.destroy_process_group()


@dataclass(frozen=True)
class _Key:
    """What one measurement is of."""

    place: int
    """Index of the placement."""
    operation: str
    num_bytes: int


@dataclass(kw_only=True)
class _Found:
    """What is known so far. The same on every rank."""

    num_calls: dict[_Key, int] = field(default_factory=dict)
    times_s: dict[_Key, list[float]] = field(default_factory=lambda: defaultdict(list))
    not_measured: dict[tuple[int, str], NotMeasured] = field(default_factory=dict)


class Bench:
    """One rank's part. Every rank goes through everything in the same order, member of a group or not."""

    def __init__(self, request: BenchRequest, rank: int, device: torch.device, timeout: timedelta) -> None:
        """Makes the groups. Collective over all ranks."""
        self._request, self._rank, self._device = request, rank, device
        self._groups = [_own_group(placement, rank, timeout) for placement in request.placements]
        self._found = _Found()

    def result(self) -> BenchResult:
        """Checks and measures everything."""
        for key in self._keys():
            self._prepare(key)
        for number in range(self._request.num_rounds):
            if self._rank == 0:
                say(f"round {number + 1} of {self._request.num_rounds}")
            for key, num_calls in self._found.num_calls.items():
                if (key.place, key.operation) not in self._found.not_measured:
                    case = self._case(key)
                    self._found.times_s[key].append(self._slowest(self._time(case, num_calls)))
        hosts: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname())
        return BenchResult(
            backend=dist.get_backend(),
            device=device_name(self._device),
            hostnames=tuple(dict.fromkeys(hosts)),
            torch_version=torch.__version__,
            measurements=tuple(self._measurements()),
            not_measured=tuple(self._found.not_measured.values()),
        )

    def _keys(self) -> Iterator[_Key]:
        for place, placement in enumerate(self._request.placements):
            sizes = dict.fromkeys(real_bytes(size, placement.num_ranks) for size in self._request.sizes)
            for operation in self._request.operations:
                yield from (_Key(place, operation, size) for size in sizes)

    def _prepare(self, key: _Key) -> None:
        """Checks the value of the first call, and how many calls make a time."""
        if (key.place, key.operation) in self._found.not_measured:
            return
        case = self._case(key)
        outcome, reason = self._first_call(case)
        worst = int(self._slowest(outcome))
        if worst != _RIGHT:
            self._note(key, reason, is_wrong=worst == _WRONG)
            return
        self._time(case, 1)  # the first calls make connections
        estimate_s = self._slowest(self._time(case, _WARMUP_CALLS))
        self._found.num_calls[key] = max(1, min(_MOST_CALLS, round(_TARGET_S / max(estimate_s, 1e-9))))

    def _first_call(self, case: Case | None) -> tuple[int, str]:
        """What came of it on this rank, and why."""
        if case is None:
            return _RIGHT, ""
        try:
            case.call()
            self._synchronize()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            text = str(error).partition("\n")[0]
            is_absent = isinstance(error, NotImplementedError)
            if not is_absent and not any(words in text.lower() for words in _ABSENT_WORDS):
                raise
            return _ABSENT, f"{dist.get_backend()} has no such operation: {text}"
        is_right = case.is_right()
        case.clear()
        return (_RIGHT, "") if is_right else (_WRONG, "")

    def _note(self, key: _Key, reason: str, *, is_wrong: bool) -> None:
        """Keeps why an operation has no times; the ranks outside of its groups know no reason."""
        placement = self._request.placements[key.place]
        if is_wrong:
            reason = f"a wrong value for {key.num_bytes} bytes"
        self._found.not_measured[key.place, key.operation] = NotMeasured(
            operation=key.operation,
            link=placement.link,
            num_ranks=placement.num_ranks,
            reason=reason,
            is_wrong=is_wrong,
        )
        if self._rank == 0:
            say(f"{key.operation} on {placement.num_ranks} ranks: {reason}")

    def _case(self, key: _Key) -> Case | None:
        group = self._groups[key.place]
        return make_case(key.operation, group, key.num_bytes, self._device) if group else None

    def _time(self, case: Case | None, num_calls: int) -> float:
        """Seconds of one call on this rank; 0 where it is a member of no group. Collective."""
        if case is not None:
            case.clear()
        dist.barrier()
        if case is None:
            return 0.0
        self._synchronize()
        start = time.perf_counter()
        for _ in range(num_calls):
            case.call()
        self._synchronize()
        return (time.perf_counter() - start) / num_calls

    def _slowest(self, value: float) -> float:
        """The largest value of any rank. Collective."""
        largest = torch.tensor(value, dtype=torch.float64, device=self._device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _measurements(self) -> Iterator[Measurement]:
        for key, times_s in self._found.times_s.items():
            placement = self._request.placements[key.place]
            yield Measurement(
                operation=key.operation,
                link=placement.link,
                num_ranks=placement.num_ranks,
                num_bytes=key.num_bytes,
                times_s=tuple(times_s),
            )


def _own_group(placement: Placement, rank: int, timeout: timedelta) -> Group | None:
    """The group of a placement that this rank is in; None where it is in none.

    Every rank makes every group: the ranks of one could not agree on its name if some of them had made
    fewer groups before it.
    """
    own = None
    for ranks in placement.groups:
        handle = dist.new_group(list(ranks), timeout=timeout)
        if rank in ranks:
            own = Group(ranks=ranks, rank=ranks.index(rank), handle=handle)
    return own
