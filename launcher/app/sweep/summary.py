"""What came of a sweep, for a terminal: its table, its failures, its baselines, and how to go on."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.app.ending import shown, text_width
from launcher.app.progress import last_step
from launcher.app.sweep.results import Outcome, results
from launcher.app.sweep.store import Sweep
from launcher.app.sweep.tables import unit
from launcher.base.errors import LauncherError
from launcher.base.units import counted, format_count
from launcher.report.claims import Promise, claims
from launcher.report.runs import load_run, named_base
from launcher.runs.failure import out_of_memory_ranks
from launcher.runs.handle import standing
from launcher.runs.store import RunDirectory


def print_outcomes(sweep: Sweep, found: Sequence[Outcome]) -> None:
    """The table, why points failed, what they are measured against, and how to go on."""
    print("\n".join(results(found)))
    for line in _details(found):
        print(f"  {line}")
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    promises = [_promise(outcome) for outcome in found]
    if table := claims(promises, sweep.refused, width=text_width(), room=room):
        print("\n" + "\n".join(table))
    counts = Counter(outcome.standing for outcome in found)
    total = ", ".join(f"{count} {standing}" for standing, count in counts.items())
    refused = f"; {len(sweep.refused)} more refused" if sweep.refused else ""
    print(f"\n{counted(len(found), 'point')}: {total}{refused}")
    path = shown(sweep.path)
    if counts["failed"] + counts["cancelled"] + counts["not started"]:
        print(f"  trireme sweep retry {path}")


def _promise(outcome: Outcome) -> Promise:
    full = out_of_memory_ranks(outcome.directory.path) if outcome.state.phase == "failed" else ()
    end = f"out of memory on rank {', '.join(map(str, full))}" if full else outcome.standing
    return Promise(label=outcome.label, plan=outcome.plan, run=outcome.run, end=end)


def _details(found: Sequence[Outcome]) -> Iterator[str]:
    """What the table has no room for: how far points are, why they have no measure, the baselines."""
    waiting = Counter(outcome.state.reason for outcome in found if outcome.standing == "pending")
    yield from (f"{counted(count, 'point')} pending: {why}" for why, count in waiting.items() if why)
    for outcome in found:
        if outcome.standing == "running":
            yield f"{outcome.label}: step {last_step(outcome.directory) or 0} {outcome.state.reason}".rstrip()
        elif outcome.standing in ("failed", "cancelled") and outcome.state.reason:
            rank = "" if outcome.state.rank is None else f"rank {outcome.state.rank} "
            yield f"{outcome.label}: {rank}{outcome.state.reason}"
        elif outcome.problem and outcome.run is None:
            yield f"{outcome.label}: not measured: {outcome.problem}"
    labels = {outcome.directory.path.resolve(): outcome.label for outcome in found}
    bases = {base.resolve() for outcome in found if (base := named_base(outcome.directory.path))}
    for base in sorted(bases):
        name = f"the point {labels[base]}" if base in labels else _base_text(base)
        yield f"baseline, on one device: {name}"
    problems = dict.fromkeys(outcome.problem for outcome in found if outcome.problem and outcome.run)
    yield from (f"no speedup: {problem}" for problem in problems)


def _base_text(base: Path) -> str:
    try:
        run = load_run(base)
    except LauncherError:
        return f"{shown(base)}, {standing(RunDirectory(base)).phase}"
    return f"{shown(base)}, {format_count(run.work.tokens_per_s)} {unit([run.plan])}/s"
