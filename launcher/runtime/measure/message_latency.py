"""How long a message between neighbouring pipeline ranks takes when both are ready for it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from math import prod

import torch

from launcher.runtime.api import RankContext

_ROUNDS = 7


def message_latency_ns(ctx: RankContext, shapes: Iterable[tuple[int, ...]], dtype: torch.dtype) -> int:
    """Shortest of several half round trips of the largest message, with the slower of its two neighbours.

    Collective over the pipeline: even ranks first exchange with the next rank, then with the previous one.
    """
    group, device = ctx.groups.pp, ctx.device
    if ctx.transport is None or group.size == 1:
        return 0
    message = torch.zeros(max(shapes, key=prod, default=()), dtype=dtype, device=device)
    slowest = 0
    for parity in (0, 1):
        is_first = group.rank % 2 == parity
        peer = group.rank + 1 if is_first else group.rank - 1
        if not 0 <= peer < group.size:
            continue
        trips = []
        for tag in range(_ROUNDS):
            synchronize(device)
            start = time.perf_counter_ns()
            turns = (True, False) if is_first else (False, True)
            for sends in turns:
                move = ctx.transport.send if sends else ctx.transport.receive
                move(message, peer, tag).wait()
            synchronize(device)
            trips.append((time.perf_counter_ns() - start) // 2)
        slowest = max(slowest, min(trips))
    return slowest


def synchronize(device: torch.device) -> None:
    """Waits until a GPU has done all work; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
