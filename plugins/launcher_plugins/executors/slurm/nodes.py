"""The check of a job's nodes: what they need, and which of them are unfit by what was measured there.

A job script runs it as ``python -m launcher_plugins.executors.slurm.nodes RUN FIRST_S LAST_S NEED=VALUE...``:
it reads the figures of `launcher.runtime.measure.node_check`, and prints each unfit node with the reason.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from launcher.base.files import write_whole
from launcher.base.units import format_bytes
from launcher.contract.plan import Plan
from launcher_plugins.executors.slurm.continuation import SlurmConfig

FIGURES = "exit/nodes.json"
"""What was measured on the nodes of a start, and which of them were unfit, in the run directory."""
SPARE_BYTES = 64 * 2**20
"""Bytes that have to be free on a disk beside a checkpoint: logs, temporary files."""
_CLOCK_S = 5
"""Seconds by which the clock of a node may be off."""
_Nodes = Mapping[str, Mapping[str, float]]


def needs(plan: Plan, ranks_per_node: int) -> dict[str, float]:
    """What every node of a plan has to have, by the name of its figure."""
    config = plan.config
    disk = {"disk_bytes": plan.checkpoint_bytes + SPARE_BYTES, "scratch_bytes": SPARE_BYTES}
    speed = {"min_speed": config.executor.settings(SlurmConfig).min_node_speed}
    if config.device.kind == "cpu":
        return {"memory_bytes": plan.node_memory_bytes(ranks_per_node), **disk, **speed}
    most = max(part.total_bytes for part in plan.memory)
    return {"devices": ranks_per_node, "device_memory_bytes": most, **disk, **speed}


def unfit(nodes: _Nodes, needed: Mapping[str, float], *, seconds: tuple[float, float]) -> dict[str, str]:
    """Why nodes are unfit, by their names.

    nodes: the figures of each in their order; none of one that gave no answer.
    seconds: when the first node asked for the clocks, and when it had them all.

    >>> unfit({"a": {"matmul_flops": 9e9}, "b": {}}, {}, seconds=(0, 0))
    {'b': 'gives no answer'}
    """
    found: dict[str, list[str]] = defaultdict(list)
    needed = dict(needed)
    fraction = needed.pop("min_speed", 0)
    for node, figures in nodes.items():
        found[node] += _missing(figures, needed, seconds)
    speeds = {node: figures["matmul_flops"] for node, figures in nodes.items() if "matmul_flops" in figures}
    usual = median(speeds.values()) if speeds else 0
    for node, speed in speeds.items():
        if speed < fraction * usual:
            found[node].append(
                f"a matmul runs at {_shown('flops', speed)}, less than {fraction:g} of the median of all "
                f"nodes, {_shown('flops', usual)}"
            )
    # A pair with a node that is unfit anyway tells nothing of the other one.
    fit = [node for node in nodes if not found[node]]
    for node, reason in _slow_links({node: nodes[node] for node in fit}, list(nodes), fraction):
        found[node].append(reason)
    return {node: "; ".join(reasons) for node, reasons in found.items() if reasons}


def _missing(
    figures: Mapping[str, float], needed: Mapping[str, float], seconds: tuple[float, float]
) -> Iterator[str]:
    """What a node lacks by its own figures."""
    if not figures:
        yield "gives no answer"
        return
    clock_s = figures.get("clock_s", seconds[0])
    off_s = max(seconds[0] - clock_s, clock_s - seconds[1])
    if off_s > _CLOCK_S:
        yield f"its clock is {off_s:.0f} s off that of the first node, and may be {_CLOCK_S} s"
    for name, least in needed.items():
        if name in figures and figures[name] < least:
            yield f"{_LACKS[name]}: {_shown(name, figures[name])}, and {_shown(name, least)} are needed"
    if "matmul_flops" not in figures:
        yield "no matmul in time (executor.check_timeout_s; its error is in logs/executor.log)"


_LACKS = {
    "devices": "too few CUDA devices",
    "memory_bytes": "too little free memory",
    "device_memory_bytes": "too little free memory on a device",
    "disk_bytes": "too little room at the run directory",
    "scratch_bytes": "too little room for temporary files (TMPDIR)",
}


def _shown(name: str, value: float) -> str:
    if name == "flops":
        return f"{value / 1e9:.3g} GFLOP/s"
    return f"{value:.0f}" if name == "devices" else format_bytes(int(value))


def _slow_links(nodes: _Nodes, order: Sequence[str], fraction: float) -> Iterator[tuple[str, str]]:
    """The nodes whose exchanges with their neighbours are all slow, against the upper quartile of all: a node
    slows down those of both sides."""
    links = {
        (first, second): nodes[first].get("link_bytes_per_s", 0.0)
        for first, second in pairwise(order)
        if first in nodes and second in nodes
    }
    if not any(links.values()):
        return
    usual = sorted(links.values())[3 * len(links) // 4]
    slow = {link for link, speed in links.items() if speed < fraction * usual}
    blamed: set[str] = set()
    for num_links in (2, 1):  # a node at the end of the row has one: its neighbour may explain it
        for node in nodes:
            own = [link for link in links if node in link]
            unexplained = [link for link in own if link in slow and not blamed & set(link)]
            if len(own) == num_links and len(unexplained) == num_links:
                blamed.add(node)
                speed = max(links[link] for link in own)
                yield (
                    node,
                    (
                        f"exchanges data with its neighbours at {format_bytes(int(speed))}/s, less than "
                        f"{fraction:g} of the usual {format_bytes(int(usual))}/s"
                    ),
                )


def read_figures(lines: Sequence[str], hosts: Sequence[str]) -> dict[str, dict[str, float]]:
    """The figures of each host, in the order in which the check has numbered them; lines of other programs
    are left out.

    >>> read_figures(["b clock_s 3", "Welcome", "b index 0", "a index 1"], ["a", "b", "c"])
    {'b': {'clock_s': 3.0, 'index': 0.0}, 'a': {'index': 1.0}, 'c': {}}
    """
    found: dict[str, dict[str, float]] = {host: {} for host in hosts}
    for line in lines:
        words = line.split(" ")
        if len(words) == 3 and words[0] in found:
            found[words[0]][words[1]] = float(words[2])
    return dict(sorted(found.items(), key=lambda item: item[1].get("index", len(hosts))))


def main(argv: Sequence[str]) -> int:
    """Judges the nodes, whose figures are read from standard input, and writes `FIGURES`."""
    run_dir, hosts, first_s, last_s, *words = argv
    needed = {name: float(value) for name, _, value in (word.partition("=") for word in words)}
    nodes = read_figures(sys.stdin.read().splitlines(), hosts.split(","))
    found = unfit(nodes, needed, seconds=(float(first_s), float(last_s)))
    record = {"time": float(last_s), "needed": needed, "nodes": nodes, "unfit": found}
    write_whole(Path(run_dir, FIGURES), json.dumps(record, indent=1) + "\n")
    for node, reason in found.items():
        print(f"{node} {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
