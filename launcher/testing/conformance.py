"""Conformance suites for plugin authors: subclass one, name the plugin, run pytest.

from launcher.testing.conformance import ScheduleConformance
from my_package import MySchedule

class TestMySchedule(ScheduleConformance):
    plugin = MySchedule
    name = "my_schedule"
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from typing import Any, ClassVar

from launcher.base import registry
from launcher.base.errors import Fault
from launcher.contract.actions import compute_kinds
from launcher.contract.strategy import Action, PipelineShape, Schedule
from launcher.schedule.passes import lower
from launcher.schedule.simulate import simulate, textbook_costs

SHAPES = tuple(
    PipelineShape(num_pp_ranks=p, num_chunks=v, num_microbatches=m)
    for p, v, m in product((1, 2, 3, 4), (1, 2), (1, 3, 4, 8))
)
"""Small shapes, valid and invalid, that every schedule is tested with."""


class ScheduleConformance:
    """What the launcher requires of every schedule plugin.

    A shape may be refused, with a fault that says how to fix it; every other must run.
    """

    plugin: ClassVar[type[Schedule]]
    """The schedule's class."""
    name: ClassVar[str]
    """The name under which its entry point is registered."""
    shapes: ClassVar[Sequence[PipelineShape]] = SHAPES
    """Override where the schedule needs other shapes to be tested."""

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Runs every test that takes a ``shape`` on each of them."""
        if "shape" in metafunc.fixturenames:
            names = [f"p{s.num_pp_ranks}-v{s.num_chunks}-m{s.num_microbatches}" for s in self.shapes]
            metafunc.parametrize("shape", self.shapes, ids=names)

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule says that it splits the backward."""
        return bool(getattr(self.plugin, "splits_backward", False))

    def accepts(self, shape: PipelineShape) -> bool:
        """Whether the schedule runs this shape."""
        return not tuple(self.plugin().check(shape))

    def test_entry_point_leads_to_the_plugin(self) -> None:
        """The installed entry point of this name is this class."""
        found = registry.load(Schedule, self.name)
        assert isinstance(found, self.plugin), f"{self.name!r} is {type(found)}, not {self.plugin}"

    def test_import_needs_no_torch(self) -> None:
        """Planning must not import torch."""
        program = f"import sys, {self.plugin.__module__}; sys.exit('torch' in sys.modules)"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        ended = subprocess.run([sys.executable, "-c", program], env=environment, check=False)  # noqa: S603
        assert ended.returncode == 0, f"importing {self.plugin.__module__} fails or imports torch"

    def test_some_shape_is_accepted(self) -> None:
        """At least one of the shapes runs, or the suite would show nothing."""
        assert any(map(self.accepts, self.shapes)), "every shape tried is refused"

    def test_refusal_says_what_to_set(self, shape: PipelineShape) -> None:
        """Each fault has a path, a rule, and a way out or words for one."""
        for fault in self.plugin().check(shape):
            assert isinstance(fault, Fault), f"{fault!r} is not a Fault"
            assert fault.path, f"{fault}: which setting is wrong?"
            assert fault.allowed, f"{fault}: by which rule?"
            assert fault.ways or fault.fix, f"{fault}: how is it fixed?"

    def test_gives_the_kinds_of_action_that_it_says(self, shape: PipelineShape) -> None:
        """The lists have W exactly when the schedule declares that it splits the backward, and no sends or
        receives, which the launcher adds."""
        if self.accepts(shape):
            given = {action.kind for actions in self._actions(shape) for action in actions}
            expected = set(compute_kinds(splits_backward=self.splits_backward))
            assert given == expected, (
                f"kinds {sorted(given)}, expected {sorted(expected)}: W goes with splits_backward = True, "
                "and the launcher adds sends and receives"
            )

    def test_gives_the_same_every_time(self, shape: PipelineShape) -> None:
        """The lists depend on the shape alone."""
        if self.accepts(shape):
            assert self._actions(shape) == self._actions(shape)

    def test_runs_complete_and_without_deadlock(self, shape: PipelineShape) -> None:
        """Every microbatch runs on every stage, without deadlock."""
        if self.accepts(shape):
            lower(self.plugin(), shape)

    def test_bubble_formula_is_what_a_simulation_gives(self, shape: PipelineShape) -> None:
        """The closed form, where there is one, is exact for equal stages and free messages, when each
        gradient takes as long as a forward."""
        if not self.accepts(shape) or (formula := self.plugin().bubble_fraction(shape)) is None:
            return
        costs = textbook_costs(shape, splits_backward=self.splits_backward)
        timeline = simulate(self._actions(shape), shape, costs)
        assert abs(timeline.bubble_fraction - formula) < 1e-9, (
            f"formula {formula}, simulation {timeline.bubble_fraction}"
        )

    def _actions(self, shape: PipelineShape) -> list[list[Action]]:
        plugin = self.plugin()
        return [list(plugin.actions(shape, pp_rank)) for pp_rank in range(shape.num_pp_ranks)]
