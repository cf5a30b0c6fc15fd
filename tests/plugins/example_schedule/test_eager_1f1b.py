"""The tests an author ships: the launcher's conformance suite and what is special to the schedule."""

from dataclasses import replace

import pytest
from trireme_example_schedule import Eager1F1B

from launcher.contract.strategy import PipelineShape
from launcher.schedule.passes import lower
from launcher.schedule.simulate import peak_held, simulate, textbook_costs
from launcher.testing.conformance import ScheduleConformance

SHAPE = PipelineShape(num_pp_ranks=4, num_microbatches=16)


class TestEager1F1B(ScheduleConformance):
    plugin = Eager1F1B
    name = "eager_1f1b"


def test_holds_nearly_twice_as_much_as_1f1b() -> None:
    assert peak_held(lower(Eager1F1B(), SHAPE), SHAPE) == (7, 5, 3, 1)


@pytest.mark.parametrize("transfer_s", [0.0, 0.5, 1.0])
def test_messages_delay_the_first_and_the_last_microbatch_alone(transfer_s: float) -> None:
    costs = replace(textbook_costs(SHAPE, splits_backward=False), transfer_s=transfer_s)
    step_s = simulate(lower(Eager1F1B(), SHAPE), SHAPE, costs).makespan_s
    assert step_s == (16 + 3) * 3 + 2 * 3 * transfer_s
