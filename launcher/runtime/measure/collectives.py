"""Measures collective operations between the ranks of a plan, in place of a training.

Every operation is first called once and its result checked; then all of them are timed in rounds, so that a
disturbance of the machine affects all alike. A time is that of several consecutive calls on the slowest rank
of all groups, over their number.
"""

from __future__ import annotations

import json
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
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
from launcher.runtime.measure.message_latency import synchronize
from launcher.runtime.process.environment import ProcessRank
from launcher.runtime.process.groups import Group, backend
from launcher.runtime.process.heartbeat import HeartbeatWriter
from launcher.runtime.process.log import log
from launcher.runtime.process.rank import choose_device
from launcher.runtime.process.rendezvous import init_process_group
from launcher.typed.read import plain, read_or_raise

_TARGET_S = 0.02
"""About how long the calls of one measured time take together."""
_MOST_CALLS = 100
_WARMUP_CALLS = 2
_RIGHT, _ABSENT, _WRONG = 0, 1, 2
"""Outcomes of the first call."""
_ABSENT_WORDS = ("not support", "unsupported", "not implement", "no backend")
"""In a library's error for an operation that it does not have."""


def run(plan: Plan, process: ProcessRank, run_dir: Path, heartbeat: HeartbeatWriter, *, resume: bool) -> None:
    """Measures as this rank of the plan; rank 0 writes the result. ``resume`` changes nothing: there are no
    checkpoints."""
    request = read_or_raise(BenchRequest, plan.documents[REQUEST_FILE])
    device = choose_device(plan, process)
    timeout = timedelta(seconds=plan.config.run.timeout_s)
    init_process_group(backend(plan), process, timeout)
    heartbeat.close()  # a collective takes as long as it takes; one that hangs has its own timeout
    result = Bench(request, process.rank, device, timeout).result()
    if process.rank == 0:
        write_whole(run_dir / RESULT_FILE, json.dumps(plain(result), indent=1) + "\n")
    dist.barrier()  # a rank that exits early would look failed to one that is still working
    dist.destroy_process_group()


@dataclass(frozen=True)
class _Key:
    """Identifies one measurement."""

    placement: Placement
    operation: str
    num_bytes: int


class Bench:
    """One rank's part. Every rank goes through all cases in the same order, member of a group or not."""

    def __init__(self, request: BenchRequest, rank: int, device: torch.device, timeout: timedelta) -> None:
        """Makes the groups. Collective over all ranks."""
        self._request, self._rank, self._device = request, rank, device
        self._groups = {each: _own_group(each, rank, timeout) for each in request.placements}
        # The results so far, the same on every rank.
        self._num_calls: dict[_Key, int] = {}
        self._times_s: dict[_Key, list[float]] = defaultdict(list)
        self._not_measured: dict[tuple[Placement, str], NotMeasured] = {}

    def result(self) -> BenchResult:
        """Checks and measures everything."""
        for key in self._keys():
            self._prepare(key)
        for number in range(self._request.num_rounds):
            if self._rank == 0:
                log(f"round {number + 1} of {self._request.num_rounds}")
            for key, num_calls in self._num_calls.items():
                if (key.placement, key.operation) not in self._not_measured:
                    case = self._case(key)
                    self._times_s[key].append(self._slowest(self._time(case, num_calls)))
        hosts: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname())
        return BenchResult(
            backend=dist.get_backend(),
            device=device_name(self._device),
            hostnames=tuple(dict.fromkeys(hosts)),
            torch_version=torch.__version__,
            measurements=tuple(self._measurements()),
            not_measured=tuple(self._not_measured.values()),
        )

    def _keys(self) -> Iterator[_Key]:
        for placement in self._request.placements:
            sizes = dict.fromkeys(real_bytes(size, placement.num_ranks) for size in self._request.sizes)
            for operation in self._request.operations:
                yield from (_Key(placement, operation, size) for size in sizes)

    def _prepare(self, key: _Key) -> None:
        """Checks the result of the first call, and chooses the number of calls of a time."""
        if (key.placement, key.operation) in self._not_measured:
            return
        case = self._case(key)
        outcome, reason = self._first_call(case)
        worst = int(self._slowest(outcome))
        if worst != _RIGHT:
            self._note(key, reason, is_wrong=worst == _WRONG)
            return
        self._time(case, 1)  # the first calls make connections
        estimate_s = self._slowest(self._time(case, _WARMUP_CALLS))
        self._num_calls[key] = max(1, min(_MOST_CALLS, round(_TARGET_S / max(estimate_s, 1e-9))))

    def _first_call(self, case: Case | None) -> tuple[int, str]:
        """The outcome on this rank, and its reason."""
        if case is None:
            return _RIGHT, ""
        try:
            case.call()
            synchronize(self._device)
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
        """Records why an operation has no times; the ranks outside of its groups know no reason."""
        placement = key.placement
        if is_wrong:
            reason = f"a wrong value for {key.num_bytes} bytes"
        self._not_measured[placement, key.operation] = NotMeasured(
            operation=key.operation,
            link=placement.link,
            num_ranks=placement.num_ranks,
            reason=reason,
            is_wrong=is_wrong,
        )
        if self._rank == 0:
            log(f"{key.operation} on {placement.num_ranks} ranks: {reason}")

    def _case(self, key: _Key) -> Case | None:
        group = self._groups[key.placement]
        return make_case(key.operation, group, key.num_bytes, self._device) if group else None

    def _time(self, case: Case | None, num_calls: int) -> float:
        """Seconds of one call on this rank; 0 where it is a member of no group. Collective."""
        if case is not None:
            case.clear()
        dist.barrier()
        if case is None:
            return 0.0
        synchronize(self._device)
        start = time.perf_counter()
        for _ in range(num_calls):
            case.call()
        synchronize(self._device)
        return (time.perf_counter() - start) / num_calls

    def _slowest(self, value: float) -> float:
        """The largest value of any rank. Collective."""
        largest = torch.tensor(value, dtype=torch.float64, device=self._device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)

    def _measurements(self) -> Iterator[Measurement]:
        for key, times_s in self._times_s.items():
            yield Measurement(
                operation=key.operation,
                link=key.placement.link,
                num_ranks=key.placement.num_ranks,
                num_bytes=key.num_bytes,
                times_s=tuple(times_s),
            )


def _own_group(placement: Placement, rank: int, timeout: timedelta) -> Group | None:
    """The group of a placement that this rank is in; None where it is in none.

    Every rank makes every group: torch names a group by the number of groups made before it, and the ranks of
    one must agree on its name.
    """
    own = None
    for ranks in placement.groups:
        handle = dist.new_group(list(ranks), timeout=timeout)
        if rank in ranks:
            own = Group(ranks=ranks, rank=ranks.index(rank), handle=handle)
    return own
