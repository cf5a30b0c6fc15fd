"""``trireme bench``: measures what plans assume."""

from __future__ import annotations

from launcher.base.errors import LauncherError, did_you_mean
from launcher.cli.arguments import split_flags

HELP = """\
trireme bench collectives [key=value ...] [--sizes SIZE,...] [--ranks N,...]
                          [--json FILE] [--plot FILE.svg] [--save NAME]

Starts ranks, checks that every collective operation gives the right value, and times it: broadcast,
scatter, reduce, all-reduce, gather, all-gather, reduce-scatter, all-to-all, send and receive. Bandwidths
are those of nccl-tests; to the times a latency and a bandwidth are fitted, with their error.

key=value sets what belongs to cluster, device, executor, site or run: gloo is measured on device.kind=cpu,
NCCL on cuda. With several nodes, which executor=slurm reserves, the link between them is measured, too.

  --sizes SIZE,...  bytes, also as 64KB, 1MB (decimal) or 64KiB, 1MiB
  --ranks N,...     sizes of the groups
  --json FILE       all numbers
  --plot FILE.svg   bus bandwidth over size
  --save NAME       write what was found as a cluster, after which cluster=NAME is known to every plan;
                    a path, such as cluster/NAME.yaml beside your recipes, writes there

The exit code is 0 when everything was right, and 1 when a value was wrong or a rank failed.

  trireme bench collectives
  trireme bench collectives --ranks 2,4 --sizes 4KB,64KB,1MB,16MB --plot links.svg
  trireme bench collectives --save this_machine
  trireme plan quickstart cluster=this_machine
"""
_ACTIONS = ("collectives",)
_FLAGS = {"sizes": True, "ranks": True, "json": True, "plot": True, "save": True}


def run(words: list[str]) -> int:
    """Runs ``bench collectives``; returns the exit code.

    Raises:
        LauncherError: for other words, and for what cannot be measured here.
    """
    action, *rest = words or [""]
    if action not in _ACTIONS:
        known = f"known is {_ACTIONS[0]}" if action else f"give what to measure: {_ACTIONS[0]}"
        hint = f" {did_you_mean(action, _ACTIONS)}" if action else ""
        raise LauncherError(f"{f'bench {action}'.strip()}: {known}.{hint}")
    overrides, flags = split_flags(rest, _FLAGS)
    from launcher.cli.cluster.bench_collectives import bench  # imports hydra, which the help does not need

    return bench(overrides, flags)
