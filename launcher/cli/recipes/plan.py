"""``trireme plan``: what a recipe would do, checked and predicted, without starting anything."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from launcher.app.output import takes_color
from launcher.base.errors import LauncherError
from launcher.base.files import check_new, write_new
from launcher.cli.arguments import settings_of
from launcher.cli.ask import asker
from launcher.contract.inputs.lineage import lineage_of, lineage_text
from launcher.contract.plan import Plan

_DRAWINGS = {".svg": "a picture", ".csv": "a table", ".json": "a trace for ui.perfetto.dev"}


def plan(given: Namespace) -> int:
    """Checks a recipe and shows what it would do: the mesh of ranks, the batch, the layers of every stage,
    the drawn schedule, memory and traffic per rank, and the predicted time of a step. Starts nothing.
    What cannot run is refused, with the rule and the nearest valid choice.

    Examples:
      trireme plan
      trireme plan quickstart parallel.pp=4
      trireme plan gpt_1t_3072xa100
      trireme plan gpt_1t_3072xa100 --json --out plan.json
      trireme plan quickstart parallel.schedule=zb_h1 --draw schedule.svg
    """
    from launcher.app.data import data_rows
    from launcher.app.planning import make_plan  # imports hydra, which the help does not need
    from launcher.app.preflight import refuse, seen_faults, source_notes
    from launcher.plan.text import plan_text

    files = {flag: Path(vars(given)[flag]) for flag in ("out", "draw") if vars(given)[flag]}
    if "draw" in files and files["draw"].suffix not in _DRAWINGS:
        known = ", ".join(f"{ending} ({what})" for ending, what in _DRAWINGS.items())
        raise LauncherError(f"--draw {files['draw']}: the name must end in one of {known}.")
    for flag, path in files.items():
        check_new(path, flag)
    planned = make_plan(given.recipe, settings_of(given), allow=asker(trusts=given.trust))
    refuse(seen_faults(planned.plan), planned.composed.sources)
    is_colored = "out" not in files and takes_color(sys.stdout)
    text = (
        planned.plan.to_json()
        if given.json
        else plan_text(planned.plan, color=is_colored, data=[*data_rows(planned.plan)])
    )
    lineage = lineage_of(planned.plan.config.train)
    earlier = [f"It {lineage_text(lineage)}."] if len(lineage) > 1 else []
    for note in (*planned.composed.notes, *earlier, *source_notes(planned.plan)):
        print(f"note: {note}", file=sys.stderr)
    if "out" not in files:
        print(text, end="")
    for flag, path in files.items():
        write_new(path, text if flag == "out" else _drawing(planned.plan, path.suffix), flag)
        print(f"wrote {path}", file=sys.stderr)
    return 0


def _drawing(plan: Plan, ending: str) -> str:
    """The simulated step of a plan in the format of a suffix."""
    from launcher.schedule.drawing.svg import svg_text  # few plans are drawn to a file
    from launcher.schedule.drawing.timeline_files import csv_text, trace_text
    from launcher.schedule.simulate import paused_gc, planned_timeline

    title, shape = f"{plan.config.name}: {plan.schedule.name}", plan.pipeline
    with paused_gc():
        timeline = planned_timeline(plan)
        if ending == ".svg":
            return svg_text(timeline, shape, title=title)
        return csv_text(timeline) if ending == ".csv" else trace_text(timeline, shape, title=title)
