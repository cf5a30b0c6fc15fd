"""Whether each rank's list has exactly the actions that belong on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product

from launcher.base.errors import Fault, PlanError
from launcher.contract.actions import RB, RF, SB, SF, Action, PipelineShape, W, compute_kinds
from launcher.schedule.dependencies import ActionLists
from launcher.schedule.validation.violation import Violation

MAX_NAMED = 6
"""Actions named in one fault."""


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The actions of complete lists."""

    shape: PipelineShape
    splits_backward: bool
    """Whether there is a W for every B."""
    has_messages: bool
    """Whether the lists have sends and receives."""

    def check(self, lists: ActionLists) -> Iterator[Violation]:
        """Actions that are missing, repeated, or do not belong on their rank.

        Raises:
            PlanError: when there is not one list for each pp_rank.
        """
        num_ranks = self.shape.num_pp_ranks
        if len(lists) != num_ranks:
            rule = f"one list for each of {num_ranks} pp_ranks"
            raise PlanError([Fault("pipeline lists", len(lists), rule, "")])
        for pp_rank, actions in enumerate(lists):
            present = set(actions)
            kinds = sum(len(self._kinds(stage)) for stage in self.shape.stages(pp_rank))
            has_all = present.issuperset(self._every(pp_rank))
            if has_all and len(actions) == kinds * self.shape.num_microbatches:
                continue
            complete = set(self._every(pp_rank))
            yield from self._misplaced(actions, pp_rank, present - complete)
            yield from self._missing(actions, pp_rank, complete - present)
            yield from _repeated(actions, pp_rank)

    @property
    def _compute(self) -> tuple[str, ...]:
        return compute_kinds(splits_backward=self.splits_backward)

    def _kinds(self, stage: int) -> tuple[str, ...]:
        """The kinds of action that a stage runs once for every microbatch."""
        kinds = self._compute
        if self.has_messages and self.shape.num_pp_ranks > 1:  # else all stages are on one rank
            is_first, is_last = stage == 0, stage + 1 == self.shape.num_stages
            kinds += () if is_last else (SF, RB) if stage >= self.shape.num_frozen else (SF,)
            kinds += () if is_first else (RF, SB) if stage > self.shape.num_frozen else (RF,)
        return kinds

    def _every(self, pp_rank: int) -> Iterator[tuple[int, str, int]]:
        """The actions of a rank, in no particular order."""
        microbatches = range(self.shape.num_microbatches)
        stages = self.shape.stages(pp_rank)
        return chain.from_iterable(product((stage,), self._kinds(stage), microbatches) for stage in stages)

    def _misplaced(self, actions: Sequence[Action], pp_rank: int, wrong: set[Action]) -> Iterator[Violation]:
        indices = [index for index, action in enumerate(actions) if action in wrong]
        if indices:
            has_weights = any(action.kind == W for action in wrong) and not self.splits_backward
            weights_fix = "Set splits_backward = True on the schedule, or remove every W."
            yield Violation(
                pp_rank=pp_rank,
                index=indices[0],
                given=_some(actions[index] for index in indices),
                rule=f"not among the actions of pp_rank {pp_rank} ({self._belonging(pp_rank)})",
                fix=weights_fix if has_weights else "Remove it.",
            )

    def _belonging(self, pp_rank: int) -> str:
        """The actions that belong on a rank, as text."""
        stages = ", ".join(map(str, self.shape.stages(pp_rank)))
        *others, last = [*self._compute, "messages"] if self.has_messages else self._compute
        rest = "" if self.has_messages else " only, the launcher adds messages"
        sizes = f"stage {stages}; microbatch 0 to {self.shape.num_microbatches - 1}"
        return f"{sizes}; {', '.join(others)} and {last}{rest}"

    def _missing(
        self, actions: Sequence[Action], pp_rank: int, absent: set[tuple[int, str, int]]
    ) -> Iterator[Violation]:
        if absent:
            missing = [Action(*action) for action in sorted(absent)]
            stage, _, microbatch = missing[0]
            related = (i for i, action in enumerate(actions) if (action[0], action[2]) == (stage, microbatch))
            index = next(related, len(actions))
            weights = ", once for its weight gradients" if self.splits_backward else ""
            yield Violation(
                pp_rank=pp_rank,
                index=index,
                rule=f"{_some(missing)} missing; each stage runs every microbatch once forward and once "
                f"backward{weights}, and each message is sent and received once",
                fix="Add what is missing.",
            )


def _repeated(actions: Sequence[Action], pp_rank: int) -> Iterator[Violation]:
    seen: set[Action] = set()
    for index, action in enumerate(actions):
        if action in seen:
            yield Violation(
                pp_rank=pp_rank,
                index=index,
                rule=f"repeated; it is already at action {actions.index(action)}",
                fix="Remove one of them.",
            )
            return
        seen.add(action)


def _some(actions: Iterable[Action]) -> str:
    """The first few actions as text, with the number of the others."""
    texts = [str(action) for action in actions]
    others = f" and {len(texts) - MAX_NAMED} more" if len(texts) > MAX_NAMED else ""
    return " ".join(texts[:MAX_NAMED]) + others
