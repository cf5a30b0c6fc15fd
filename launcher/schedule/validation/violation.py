"""One violation in action lists, and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.base.errors import Fault, PlanError, faults_text
from launcher.schedule.dependencies import ActionLists

REACH = 4
"""Actions shown on each side of a marked one."""
MAX_ROWS = 12
"""Violations shown."""


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One position in the lists that breaks a rule."""

    pp_rank: int
    index: int
    """Index of the wrong action in its rank's list; its length when the end is meant."""
    rule: str
    fix: str
    given: str = ""
    """The wrong actions, as text; empty: the one at ``index``."""


class ScheduleError(PlanError):
    """Action lists that cannot run. The text shows the lists around every violation."""

    def __init__(self, lists: ActionLists, violations: Sequence[Violation]) -> None:
        super().__init__(
            Fault(f"pp_rank {v.pp_rank}, action {v.index}", v.given or _marked(lists, v), v.rule, v.fix)
            for v in violations
        )
        self.args = (f"{faults_text(self.faults)}\n\n{draw_excerpt(lists, violations)}",)


def draw_excerpt(lists: ActionLists, violations: Sequence[Violation]) -> str:
    """One row per violation, the marked actions aligned.

    >>> from launcher.contract.actions import from_text
    >>> lists = [from_text("0F0 0SF0 0RB0 0B0"), from_text("1RF0 1B0 1F0 1SB0")]
    >>> wrong = Violation(pp_rank=1, index=1, rule="follows its forward", fix="Move it.")
    >>> print(draw_excerpt(lists, [wrong]))
      pp_rank 1  1RF0 >1B0< 1F0 1SB0
    """
    rows = [(f"pp_rank {violation.pp_rank}", *_row(lists, violation)) for violation in violations[:MAX_ROWS]]
    label_width, left_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"  {label:<{label_width}}  {left:>{left_width}}{right}" for label, left, right in rows]
    if len(violations) > MAX_ROWS:
        lines.append(f"  ... and {len(violations) - MAX_ROWS} more violations")
    return "\n".join(lines)


def _marked(lists: ActionLists, violation: Violation) -> str:
    actions, index = lists[violation.pp_rank], violation.index
    return str(actions[index]) if index < len(actions) else "end"


def _row(lists: ActionLists, violation: Violation) -> tuple[str, str]:
    """The text left of the marked action, and the text from it on."""
    actions, index = lists[violation.pp_rank], violation.index
    before = [str(action) for action in actions[max(0, index - REACH) : index]]
    after = [str(action) for action in actions[index + 1 : index + 1 + REACH]]
    left = ["..."] * (index > REACH) + before
    right = [f">{_marked(lists, violation)}<", *after] + ["..."] * (index + 1 + REACH < len(actions))
    return "".join(f"{word} " for word in left), " ".join(right)
