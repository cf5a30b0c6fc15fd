"""``trireme plan``: what a recipe would do, checked and predicted, without starting anything."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from launcher.base.files import check_new, write_new


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
    from launcher.app.planning import make_plan  # imports hydra, which the help does not need
    from launcher.cli.plans.drawing import check_drawing, draw_plan
    from launcher.plan.text import plan_text

    drawing = Path(given.draw) if given.draw else None
    if drawing:
        check_drawing(drawing)
    out = Path(given.out) if given.out else None
    if out:
        check_new(out, "out")
    planned = make_plan(given.recipe, given.overrides)
    is_screen = not out and sys.stdout.isatty()
    text = planned.plan.to_json() if given.json else plan_text(planned.plan, color=is_screen)
    for note in planned.composed.notes:
        print(f"note: {note}", file=sys.stderr)
    if out:
        write_new(out, text, "out")
        print(f"wrote {out}", file=sys.stderr)
    else:
        print(text, end="")
    if drawing:
        draw_plan(planned.plan, drawing)
        print(f"wrote {drawing}", file=sys.stderr)
    return 0
