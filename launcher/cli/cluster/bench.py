"""``trireme bench``: measures what plans assume."""

from __future__ import annotations

from launcher.cli.arguments import parse

HELP = """\
Starts ranks, checks that every collective operation gives the right value, and times it: broadcast,
scatter, reduce, all-reduce, gather, all-gather, reduce-scatter, all-to-all, send and receive. Bandwidths
are those of nccl-tests; to the times a latency and a bandwidth are fitted, with their error.

key=value sets what belongs to cluster, device, executor, site or run: gloo is measured on device.kind=cpu,
NCCL on cuda. With several nodes, which executor=slurm reserves, the link between them is measured, too.

The exit code is 0 when everything was right, and 1 when a value was wrong or a rank failed.
"""
EXAMPLES = """\
  trireme bench collectives
  trireme bench collectives --ranks 2,4 --sizes 4KB,64KB,1MB,16MB --plot links.svg
  trireme bench collectives --save this_machine
  trireme plan quickstart cluster=this_machine
"""


def run(words: list[str]) -> int:
    """Runs ``bench collectives``; returns the exit code.

    Raises:
        LauncherError: for other words, and for what cannot be measured here.
    """
    given = parse("bench", words)
    from launcher.cli.cluster.bench_collectives import bench  # imports hydra, which the help does not need

    return bench(given)
