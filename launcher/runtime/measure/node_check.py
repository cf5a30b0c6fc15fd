"""What there is on a node, measured before ranks start there: one process on each node.

    python -m launcher.runtime.measure.node_check --run RUN --device cpu --meet HOST:PORT --num-nodes N
        --limit-s S --node NAME --index I

Each figure is printed as soon as it is known, as ``NAME FIGURE VALUE``, so that one that is missing tells
what the node could not do. torch is imported for the speeds alone: the others come in milliseconds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any

from launcher.base.machine import free_disk_bytes, free_memory_bytes
from launcher.runtime.process.environment import num_visible_gpus, rendezvous_key

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

_SIZE = {"cpu": 512, "cuda": 8192}
"""Rows and columns of the factors."""
_LINK_ELEMENTS = 1 << 21
_GRACE_S = 3
"""Seconds after which the last ones that wait for a neighbour have given up."""
_NUM_REPEATS = 20
"""Of a measurement; the fastest counts, which other work there disturbs least."""


def main(argv: list[str]) -> int:
    """Prints the figures of this node."""
    arguments = parsed(argv)
    deadline_s = time.monotonic() + 0.8 * arguments.limit_s
    for figure, value in chain(_present(arguments), _speeds(arguments, deadline_s)):
        if value is not None:
            print(f"{arguments.node} {figure} {value:.6g}", flush=True)
    return 0


def parsed(argv: list[str]) -> argparse.Namespace:
    """The words of the command."""
    parser = argparse.ArgumentParser(description="The check of one node")
    parser.add_argument("--run", required=True, help="run directory")
    parser.add_argument("--device", required=True, choices=("cpu", "cuda"))
    parser.add_argument("--meet", required=True, help="HOST:PORT of the node of index 0")
    parser.add_argument("--num-nodes", required=True, type=int)
    parser.add_argument("--limit-s", required=True, type=float, help="seconds that the check may take")
    parser.add_argument("--node", required=True, help="name of this node")
    parser.add_argument("--index", required=True, type=int, help="index of this node among them")
    return parser.parse_args(argv)


def _present(arguments: argparse.Namespace) -> Iterator[tuple[str, float | None]]:
    """What is there: devices, memory, room on disks."""
    yield "index", arguments.index
    if arguments.device == "cuda":
        yield "devices", num_visible_gpus()
    yield "memory_bytes", free_memory_bytes()
    yield "disk_bytes", free_disk_bytes(arguments.run)
    yield "scratch_bytes", free_disk_bytes(tempfile.gettempdir())


def _speeds(arguments: argparse.Namespace, deadline_s: float) -> Iterator[tuple[str, float]]:
    """The slowest device's matmul, and the exchange with the node of the next index."""
    import torch

    kind = arguments.device
    devices = [torch.device(kind, number) for number in range(torch.cuda.device_count())]
    if kind == "cpu":
        devices = [torch.device("cpu")]
        torch.set_num_threads(1)
    else:
        yield "device_memory_bytes", min(torch.cuda.mem_get_info(device)[0] for device in devices)
    yield "matmul_flops", min(map(matmul_flops, devices))
    if arguments.num_nodes > 1:
        yield from links(arguments, devices[0], deadline_s)


def matmul_flops(device: torch.device) -> float:
    """FLOP/s of a matmul on a device."""
    import torch

    size, dtype = _SIZE[device.type], torch.float32 if device.type == "cpu" else torch.bfloat16
    factor = torch.ones(size, size, device=device, dtype=dtype)
    return 2 * size**3 / _fastest_s(lambda: factor @ factor, device)


def _fastest_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest repeat; the first one, which sets up, is not counted."""
    import torch

    times_s = []
    for _ in range(1 + _NUM_REPEATS):
        start_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times_s.append(time.perf_counter() - start_s)
    return min(times_s[1:])


def links(
    arguments: argparse.Namespace, device: torch.device, deadline_s: float
) -> Iterator[tuple[str, float]]:
    """The speed of an all-reduce between neighbours: first of the pairs 0-1, 2-3 and so on, then of 1-2, 3-4.

    A neighbour that does not come is waited for until the deadline. The node of index 0 holds the store, so
    it is the last to leave.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    index, num_nodes = arguments.index, arguments.num_nodes
    host, _, port = arguments.meet.rpartition(":")
    limit = _left(deadline_s)
    listener = TCPStore(host, int(port), None, index == 0, limit, False)  # waits for none of them
    store = PrefixStore(f"{rendezvous_key()}nodes", listener)
    for first in (index - index % 2, index - 1 + index % 2):
        if 0 <= first < num_nodes - 1:
            speed = _pair_speed(store, first, index - first, device, _left(deadline_s))
            if index == first and speed is not None:
                yield "link_bytes_per_s", speed
    store.add("left", 1)
    while index == 0 and store.add("left", 0) < num_nodes and time.monotonic() < deadline_s + _GRACE_S:
        time.sleep(0.02)


def _left(deadline_s: float) -> timedelta:
    return timedelta(seconds=max(deadline_s - time.monotonic(), 1))


def _pair_speed(store: Store, first: int, rank: int, device: torch.device, limit: timedelta) -> float | None:
    """Bytes per second of an all-reduce of two nodes; None where the other one does not answer."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    pair = PrefixStore(f"pair{first}", store)
    tensor = torch.ones(_LINK_ELEMENTS, device=device)
    make: Any = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
    try:
        group = make(pair, rank, 2, timeout=limit)
        return tensor.nbytes / _fastest_s(lambda: group.allreduce(tensor).wait(), device)
    except RuntimeError as error:  # of a neighbour that is missing or gone
        print(f"{error}".partition("\n")[0], file=sys.stderr)
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
