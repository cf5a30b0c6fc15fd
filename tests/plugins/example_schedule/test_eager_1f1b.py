"""The tests an author ships: the launcher's conformance suite and what is special to the schedule."""

from trireme_example_schedule import OneAtATime

from launcher.interfaces import PipelineShape
from launcher.schedule.passes import lower
from launcher.schedule.simulate import peak_held
from launcher.testing.conformance import ScheduleConformance


class TestOneAtATime(ScheduleConformance):
    plugin = OneAtATime
    name = "one_at_a_time"


def test_holds_one_microbatch() -> None:
    shape = PipelineShape(num_pp_ranks=3, num_microbatches=5)
    assert peak_held(lower(OneAtATime(), shape), shape) == (1, 1, 1)
