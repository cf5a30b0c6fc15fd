"""What is wrong at one place of the action lists, and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.base.errors import Fault, PlanError, faults_text
from launcher.schedule.dependencies import Lists

REACH = 4
"""Actions shown on each side of a marked one."""
MAX_ROWS = 12
"""Places shown."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One wrong place."""

    pp_rank: int
    index: int
    """Place of the wrong action in its rank's list; the end of the list when nothing stands there."""
    given: str
    """The wrong actions, as text."""
    rule: str
    fix: str

    @property
    def fault(self) -> Fault:
        """The finding as text; its path is the place in the lists."""
        return Fault(f"pp_rank {self.pp_rank}, action {self.index}", self.given, self.rule, self.fix)


class ScheduleError(PlanError):
    """Action lists that cannot run. The text shows the lists around every wrong place."""

    def __init__(self, lists: Lists, findings: Sequence[Finding]) -> None:
        super().__init__(finding.fault for finding in findings)
        self.args = (f"{faults_text(self.faults)}\n\n{draw_excerpt(lists, findings)}",)


def draw_excerpt(lists: Lists, findings: Sequence[Finding]) -> str:
    """One row per finding, the marked actions one below the other.

    >>> from launcher.contract.actions import from_text
    >>> lists = [from_text("0F0 0SF0 0RB0 0B0"), from_text("1RF0 1B0 1F0 1SB0")]
    >>> wrong = Finding(pp_rank=1, index=1, given="1B0", rule="follows its forward", fix="Move it.")
    >>> print(draw_excerpt(lists, [wrong]))
      pp_rank 1  1RF0 >1B0< 1F0 1SB0
    """
    rows = [(f"pp_rank {finding.pp_rank}", *_row(lists, finding)) for finding in findings[:MAX_ROWS]]
    label_width, left_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [f"  {label:<{label_width}}  {left:>{left_width}}{right}" for label, left, right in rows]
    if len(findings) > MAX_ROWS:
        lines.append(f"  ... and {len(findings) - MAX_ROWS} more places")
    return "\n".join(lines)


def _row(lists: Lists, finding: Finding) -> tuple[str, str]:
    """The text left of the marked action, and the text from it on."""
    actions, index = lists[finding.pp_rank], finding.index
    before = [str(action) for action in actions[max(0, index - REACH) : index]]
    after = [str(action) for action in actions[index + 1 : index + 1 + REACH]]
    marked = str(actions[index]) if index < len(actions) else "end"
    left = ["..."] * (index > REACH) + before
    right = [f">{marked}<", *after] + ["..."] * (index + 1 + REACH < len(actions))
    return "".join(f"{word} " for word in left), " ".join(right)
