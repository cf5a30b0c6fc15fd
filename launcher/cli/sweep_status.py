"""``trireme sweep status``: how the points of a sweep stand, and what they measured."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.cli.ending import shown, text_width
from launcher.cli.runs import DEFAULT_ROOT, sweep_at
from launcher.cli.status import last_step
from launcher.cli.words import Words
from launcher.errors import LauncherError, did_you_mean
from launcher.jobs.failure import out_of_memory_ranks
from launcher.jobs.handle import standing, standings
from launcher.jobs.store import RunDirectory, read_json
from launcher.report.claims import Promise, claims
from launcher.report.runs import load_run, named_base, read_plan
from launcher.sweep.results import Outcome, outcomes, results
from launcher.sweep.store import Sweep, read_sweep, stored_sweeps
from launcher.sweep.tables import unit
from launcher.units import counted, format_count


def act(given: Words) -> int:
    """Shows a sweep; returns the exit code.

    Raises:
        LauncherError: when it is not there, or a scheduler gives no answer.
    """
    sweep = find_sweep(given)
    print(f"{shown(sweep.path)}: {counted(len(sweep.points), 'point')} of {sweep.recipe}\n")
    print_outcomes(sweep, read_outcomes(sweep))
    return 0


def find_sweep(given: Words) -> Sweep:
    """The sweep at a path, of a name below runs/, or the newest of a recipe; without a word the newest.

    Raises:
        LauncherError: when there is none.
    """
    sweeps = stored_sweeps(DEFAULT_ROOT)
    word = given.recipe
    path = sweep_at(word) if word else next(reversed(sweeps), None)
    if path:
        return read_sweep(path)
    of_recipe = [sweep for sweep in map(read_sweep, sweeps) if sweep.recipe == word]
    if of_recipe:
        return of_recipe[-1]
    if not sweeps:
        raise LauncherError(f"there is no sweep in {DEFAULT_ROOT}. trireme sweep run makes one.")
    raise LauncherError(f"no sweep at {word}. {did_you_mean(word, [path.name for path in sweeps])}")


def read_outcomes(sweep: Sweep) -> list[Outcome]:
    """How every point stands now, and what it measured. A scheduler is asked once for all of them.

    Raises:
        LauncherError: when a run directory is gone or damaged, or a scheduler gives no answer.
    """
    directories = [point.directory for point in sweep.points]
    plans = [read_plan(directory.path) for directory in directories]
    waiting = [is_waiting(directory) for directory in directories]
    states = iter(standings([d for d, waits in zip(directories, waiting, strict=True) if not waits]))
    return outcomes(sweep, plans, [None if waits else next(states) for waits in waiting])


def is_waiting(directory: RunDirectory) -> bool:
    """Whether a point is recorded and nobody has started it yet."""
    return read_json(directory.status_file).get("phase") == "prepared"


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
