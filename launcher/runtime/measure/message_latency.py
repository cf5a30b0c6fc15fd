"""How long one message between neighbouring pipeline ranks takes when nobody is late for it."""

from __future__ import annotations

import time

import torch

from launcher.runtime.api import RankContext

_ROUNDS = 7


def message_latency_ns(ctx: RankContext, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Shortest of several half round trips of one message; the slower of the rank's two neighbours.

    Collective over the pipeline: even ranks first talk to the next rank, then to the previous one.
    """
    group, device = ctx.groups.pp, ctx.device
    if ctx.transport is None or group.size == 1:
        return 0
    message = torch.zeros(shape, dtype=dtype, device=device)
    slowest = 0
    for parity in (0, 1):
        is_first = group.rank % 2 == parity
        peer = group.rank + 1 if is_first else group.rank - 1
        if not 0 <= peer < group.size:
            continue
        trips = []
        for tag in range(_ROUNDS):
            _synchronize(device)
            start = time.perf_counter_ns()
            turns = (True, False) if is_first else (False, True)
            for sends in turns:
                move = ctx.transport.send if sends else ctx.transport.receive
                move(message, peer, tag).wait()
            _synchronize(device)
            trips.append((time.perf_counter_ns() - start) // 2)
        slowest = max(slowest, min(trips))
    return slowest


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
