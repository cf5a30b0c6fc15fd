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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

from launcher.base import registry
from launcher.base.errors import Fault
from launcher.base.registry import Plugin
from launcher.config.compose import compose
from launcher.config.load import load
from launcher.contract.actions import compute_kinds
from launcher.contract.config import LaunchConfig
from launcher.contract.model.shape import LayerShape, ModelShape
from launcher.contract.optim.plugin import Optimizer, ParameterShape
from launcher.contract.strategy import Action, PipelineShape, Schedule
from launcher.schedule.passes import lower
from launcher.schedule.simulate import simulate, textbook_costs

SHAPES = tuple(
    PipelineShape(num_pp_ranks=p, num_chunks=v, num_microbatches=m)
    for p, v, m in product((1, 2, 3, 4), (1, 2), (1, 3, 4, 8))
)
"""Small shapes, valid and invalid, that every schedule is tested with."""


class PluginConformance:
    """What the launcher requires of the planning half of every plugin."""

    kind: ClassVar[type[Plugin]]
    """What it is a plugin for."""
    plugin: ClassVar[type[Plugin]]
    """The plugin's class."""
    name: ClassVar[str]
    """The name under which its entry point is registered."""

    def test_entry_point_leads_to_the_plugin(self) -> None:
        """The installed entry point of this name is this class."""
        found = registry.load(self.kind, self.name)
        assert isinstance(found, self.plugin), f"{self.name!r} is {type(found)}, not {self.plugin}"

    def test_import_needs_no_torch(self) -> None:
        """Planning must not import torch."""
        program = f"import sys, {self.plugin.__module__}; sys.exit('torch' in sys.modules)"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        ended = subprocess.run([sys.executable, "-c", program], env=environment, check=False)  # noqa: S603
        assert ended.returncode == 0, f"importing {self.plugin.__module__} fails or imports torch"


class ScheduleConformance(PluginConformance):
    """What the launcher requires of every schedule plugin.

    A shape may be refused, with a fault that says how to fix it; every other must run.
    """

    kind = Schedule
    plugin: ClassVar[type[Schedule]]
    """The schedule's class."""
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


PARAMETERS = (
    ParameterShape(name="embedding.weight", shape=(11, 4)),
    ParameterShape(name="layers.0.mlp.up.weight", shape=(8, 4)),
    ParameterShape(name="layers.0.kernel", shape=(3, 2, 5, 7)),
    ParameterShape(name="norm.weight", shape=(4,)),
    ParameterShape(name="layers.0.scale", shape=()),
)
"""Parameters of several shapes that every optimizer is asked about."""
MODEL = ModelShape(
    family="custom",
    prologue=None,
    layers=(),
    epilogue=LayerShape(
        name="all",
        num_parameters=0,
        num_replicated_parameters=0,
        parameters=PARAMETERS,
        forward_flops=0.0,
        output_elements=1,
        output_shape=(1,),
    ),
    num_tied_parameters=0,
)
"""A model that has them."""


class OptimizerConformance(PluginConformance):
    """What the launcher requires of the planning half of every optimizer plugin."""

    kind = Optimizer
    plugin: ClassVar[type[Optimizer]]
    """The optimizer's class."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Settings of it to be tested with; without them its defaults."""

    @property
    def config(self) -> LaunchConfig:
        """A configuration that names it."""
        composed = compose("quickstart")
        config = load(composed.values, composed.sources)
        return replace(config, optim=replace(config.optim, name=self.name, options=self.options))

    def test_the_defaults_of_its_options_are_sound(self) -> None:
        """Without any of its options it is made and finds no fault."""
        assert not tuple(self.plugin().check(self.config, MODEL))

    def test_runs_as_something_whatever_is_asked_for(self) -> None:
        """Each value of ``fusion.optimizer`` leads to a kernel that it has."""
        config, plugin = self.config, self.plugin()
        for asked in ("fused", "foreach", "loop"):
            kernel = plugin.kernel(replace(config, fusion=replace(config.fusion, optimizer=asked)))
            assert kernel in plugin.kernels, f"{kernel} is none of {plugin.kernels}"
            assert plugin.scratch_elements(kernel, 100, 10) >= 0, f"{kernel}: less than nothing"

    def test_states_of_an_elementwise_one_can_be_cut_as_their_parameters(self) -> None:
        """Its states have the shape of their parameter, and the same names for all."""
        if not self.plugin.is_elementwise:
            return
        config, plugin = self.config, self.plugin()
        names = {tuple(plugin.states(each, config)) for each in PARAMETERS}
        assert len(names) == 1, f"states depend on the parameter: {names}"
        for each in PARAMETERS:
            shapes = set(plugin.states(each, config).values())
            assert shapes <= {each.shape}, f"{each.name} of shape {each.shape} has states of {shapes}"

    def test_names_of_states_are_no_others(self) -> None:
        """``weight`` and ``step`` are the launcher's own."""
        config, plugin = self.config, self.plugin()
        for each in PARAMETERS:
            taken = {"weight", "step", "optimizer"} & {*plugin.states(each, config)}
            assert not taken, f"{taken} cannot be the name of a state"
