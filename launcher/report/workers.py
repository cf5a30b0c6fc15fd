"""How fast each worker of parameter servers is by itself, so that one that is late is known by name."""

from __future__ import annotations

from statistics import median

from launcher.contract.records import SERVER
from launcher.report.runs import Run


def own_step_s(run: Run) -> dict[int, float]:
    """Rank of each worker -> the median of its steps, without the time in which it waited for the servers."""
    rows = [run.records.steps[step] for step in run.measured]
    return {
        header.rank: median(row[place].duration_ns - row[place].kinds_ns.get(SERVER, 0) for row in rows) / 1e9
        for place, header in enumerate(run.records.headers)
    }
