"""The results of a sweep, for a terminal: its table, its failures, its baselines, and what to do next."""

from __future__ import annotations

import shlex
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.app.output import TERMINAL, Output, shown, text_width
from launcher.app.progress import last_step
from launcher.app.sweep.point import Point, PointState
from launcher.app.sweep.store import Sweep
from launcher.app.sweep.tables import results_table, speed_unit, with_results
from launcher.app.wait import ASK_INTERVAL_S, wait_for_baseline
from launcher.base.errors import LauncherError
from launcher.base.units import counted, format_count
from launcher.report.claims import Promise, claims
from launcher.report.runs import load_run, named_base, read_plan
from launcher.runs.failure import failure_line, out_of_memory_ranks
from launcher.runs.state import current_state, current_states
from launcher.runs.status import ACTIVE
from launcher.runs.store import RunDirectory


def say_results(sweep: Sweep, output: Output) -> list[Point]:
    """Says the results of the points: the table, why some failed, their baselines, and what to do next.

    Raises:
        LauncherError: as `with_results`.
    """
    found = with_results(sweep)
    output.say("\n".join([*results_table(found), *(f"  {line}" for line in _details(found))]))
    room = shutil.get_terminal_size().columns if output.stream.isatty() else None
    promises = [_promise(point) for point in found]
    if table := claims(promises, sweep.refused, width=text_width(), room=room):
        output.say("\n" + "\n".join(table))
    counts = Counter(point.state_text for point in found)
    refused = f"; {len(sweep.refused)} more refused" if sweep.refused else ""
    output.say(f"\n{counted(len(found), 'point')}: {_text(counts)}{refused}")
    if counts["failed"] + counts["cancelled"] + counts["not started"]:
        output.say(f"  trireme sweep retry {shlex.quote(shown(sweep.path))}")
    return found


def wait_for_points(sweep: Sweep, output: Output = TERMINAL) -> list[Point]:
    """Waits until every point has ended, and a baseline beside them, and says the results.

    Raises:
        LauncherError: when a scheduler gives no answer.
    """
    directories, said = [point.directory for point in sweep.points], ""
    points = [replace(point, planned=read_plan(point.directory.path)) for point in sweep.points]
    while True:
        states = current_states(directories)
        counts = Counter(
            replace(point, has_started=True, state=state).state_text
            for point, state in zip(points, states, strict=True)
        )
        if (text := _text(counts)) != said:
            output.say(f"{counted(len(points), 'point')}: {text}")
            said = text
        if not counts.keys() & {*ACTIVE}:
            break
        time.sleep(ASK_INTERVAL_S)
    if counts["succeeded"]:
        for base in {base for directory in directories if (base := named_base(directory.path))}:
            wait_for_baseline(base, output)
    output.say("")
    return say_results(sweep, output)


def _text(counts: Counter[PointState]) -> str:
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def _promise(point: Point) -> Promise:
    full = out_of_memory_ranks(point.directory.path) if point.state.phase == "failed" else ()
    end = f"out of memory on rank {', '.join(map(str, full))}" if full else point.state_text
    return Promise(label=point.label, plan=point.plan, run=point.measured, end=end)


def _details(found: Sequence[Point]) -> Iterator[str]:
    """What the table has no room for: how far points are, why they have no measure, the baselines."""
    waiting = Counter(point.state.reason for point in found if point.state_text == "pending")
    yield from (f"{counted(count, 'point')} pending: {why}" for why, count in waiting.items() if why)
    for point in found:
        if point.state_text == "running":
            yield f"{point.label}: step {last_step(point.directory) or 0} {point.state.reason}".rstrip()
        elif point.state_text == "failed":
            yield f"{point.label}: {failure_line(point.directory.path, point.state)}"
        elif point.state_text == "cancelled" and point.state.reason:
            rank = "" if point.state.rank is None else f"rank {point.state.rank} "
            yield f"{point.label}: {rank}{point.state.reason}"
        elif point.problem and point.measured is None:
            yield f"{point.label}: not measured: {point.problem}"
    labels = {point.directory.path.resolve(): point.label for point in found}
    bases = {base.resolve() for point in found if (base := named_base(point.directory.path))}
    for base in sorted(bases):
        name = f"the point {labels[base]}" if base in labels else _base_text(base)
        yield f"baseline, on one device: {name}"
    problems = dict.fromkeys(point.problem for point in found if point.problem and point.measured)
    yield from (f"no speedup: {problem}" for problem in problems)


def _base_text(base: Path) -> str:
    try:
        run = load_run(base)
    except LauncherError:
        return f"{shown(base)}, {current_state(RunDirectory(base)).phase}"
    return f"{shown(base)}, {format_count(run.work.tokens_per_s)} {speed_unit([run.plan])}/s"
