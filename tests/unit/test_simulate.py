"""The clock of the simulation: exact times on small cases, and bounds on all."""

from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.contract.actions import F, PipelineShape, from_text
from launcher.contract.strategy import Schedule
from launcher.schedule.passes import lower
from launcher.schedule.simulate import Costs, Timeline, peak_held, replay, simulate, textbook_costs
from launcher_plugins.schedules.gpipe import GPipe
from launcher_plugins.schedules.interleaved_1f1b import Interleaved1F1B
from launcher_plugins.schedules.one_f_one_b import OneFOneB
from launcher_plugins.schedules.zb_h1 import ZBH1


def shape_of(p: int, v: int, m: int) -> PipelineShape:
    return PipelineShape(num_pp_ranks=p, num_chunks=v, num_microbatches=m)


def run(schedule: Schedule, shape: PipelineShape, costs: Costs) -> Timeline:
    return simulate(lower(schedule, shape), shape, costs)


def equal_costs(shape: PipelineShape, transfer_s: float = 0.0) -> Costs:
    num_stages = shape.num_stages
    return Costs(forward_s=(1.0,) * num_stages, backward_s=(2.0,) * num_stages, transfer_s=transfer_s)


def test_spans_of_two_ranks_and_two_microbatches() -> None:
    shape = shape_of(2, 1, 2)
    timeline = run(OneFOneB(), shape, equal_costs(shape, transfer_s=0.5))
    assert [[(str(action), start, end) for action, start, end in spans] for spans in timeline.spans] == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 5, 7), ("0B1", 8, 10)],
        [("1F0", 1.5, 2.5), ("1B0", 2.5, 4.5), ("1F1", 4.5, 5.5), ("1B1", 5.5, 7.5)],
    ]
    assert timeline.makespan_s == 10
    assert timeline.busy_s == (6, 6)
    assert timeline.bubble_fraction == pytest.approx(1 - 12 / 20)


def test_spans_of_a_split_backward() -> None:
    shape = shape_of(2, 1, 2)
    costs = Costs(forward_s=(1, 1), backward_s=(2, 2), weight_s=(3, 4), transfer_s=0.5)
    timeline = run(ZBH1(), shape, costs)
    assert [[(str(action), start, end) for action, start, end in spans] for spans in timeline.spans] == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 5, 7), ("0W0", 7, 10), ("0B1", 10, 12), ("0W1", 12, 15)],
        [
            ("1F0", 1.5, 2.5),
            ("1B0", 2.5, 4.5),
            ("1F1", 4.5, 5.5),
            ("1B1", 5.5, 7.5),
            ("1W0", 7.5, 11.5),
            ("1W1", 11.5, 15.5),
        ],
    ]
    assert timeline.busy_s == (12, 14)


@pytest.mark.parametrize("schedule", [OneFOneB(), ZBH1()], ids=["1f1b", "zb_h1"])
def test_times_of_weight_gradients_go_with_a_schedule_that_splits(schedule: Schedule) -> None:
    shape = shape_of(2, 1, 2)
    others = textbook_costs(shape, splits_backward=not schedule.splits_backward)
    with pytest.raises(AssertionError, match="weight_s goes with a schedule that has W"):
        run(schedule, shape, others)


def test_what_is_held_is_let_go_by_the_weight_gradients() -> None:
    assert peak_held([from_text("0F0 0B0 0F1 0W0 0B1 0W1")], shape_of(1, 1, 2)) == (2,)
    assert peak_held([from_text("0F0 0B0 0W0 0F1 0B1 0W1")], shape_of(1, 1, 2)) == (1,)


def test_messages_between_stages_of_one_rank_take_no_time() -> None:
    shape = shape_of(1, 2, 2)
    timeline = run(Interleaved1F1B(), shape, equal_costs(shape, transfer_s=100.0))
    assert timeline.makespan_s == 12
    assert timeline.bubble_fraction == 0


def test_slowest_stage_sets_the_pace() -> None:
    shape = shape_of(4, 1, 64)
    even, slow = (1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 3.0, 1.0)
    timeline = run(OneFOneB(), shape, Costs(forward_s=slow, backward_s=slow))
    assert timeline.busy_s == (128, 128, 384, 128)
    fastest_possible = (
        64 * 6 + run(OneFOneB(), shape_of(4, 1, 1), Costs(forward_s=even, backward_s=even)).makespan_s
    )
    assert 64 * 6 < timeline.makespan_s <= fastest_possible


def test_gpipe_and_1f1b_are_equally_long() -> None:
    for p, m in product(range(1, 6), range(1, 9)):
        shape = shape_of(p, 1, m)
        assert (
            run(GPipe(), shape, equal_costs(shape)).makespan_s
            == run(OneFOneB(), shape, equal_costs(shape)).makespan_s
        )


def test_peak_held_counts_messages_for_nothing() -> None:
    shape = shape_of(2, 1, 4)
    compute = [list(OneFOneB().actions(shape, pp_rank)) for pp_rank in range(2)]
    assert peak_held(lower(OneFOneB(), shape), shape) == peak_held(compute, shape) == (2, 1)


def test_replay_takes_a_time_for_each_action() -> None:
    shape = shape_of(2, 1, 2)
    lists = lower(OneFOneB(), shape)  # 0F0 0F1 0B0 0B1 and 1F0 1B0 1F1 1B1
    timeline = replay(lists, shape, [(1, 2, 1, 1), (1, 5, 1, 1)], transfer_s=1)
    assert [[end for _, _, end in spans] for spans in timeline.spans] == [[1, 3, 10, 12], [3, 8, 9, 10]]
    assert timeline.busy_s == (5, 8)


def test_replay_of_equal_times_is_the_simulation() -> None:
    shape = shape_of(4, 2, 8)
    lists = lower(Interleaved1F1B(), shape)
    times = [
        [1.0 if action.kind == F else 2.0 for action, _, _ in spans]
        for spans in run(Interleaved1F1B(), shape, equal_costs(shape)).spans
    ]
    assert replay(lists, shape, times, transfer_s=0.5) == simulate(lists, shape, equal_costs(shape, 0.5))


def test_replay_refuses_a_missing_time() -> None:
    shape = shape_of(2, 1, 2)
    with pytest.raises(ValueError, match="pp_rank 1: 3 times for 4 actions"):
        replay(lower(OneFOneB(), shape), shape, [(1, 1, 1, 1), (1, 1, 1)], transfer_s=0)


def test_lists_that_deadlock_are_our_own_mistake() -> None:
    shape = shape_of(2, 1, 2)
    lists = [from_text("0F0 0B0 0F1 0B1"), from_text("1F1 1B1 1F0 1B0")]
    with pytest.raises(AssertionError, match="the lists deadlock: validate them before simulating"):
        simulate(lists, shape, equal_costs(shape))


SECONDS = st.floats(min_value=0.01, max_value=10.0)


@settings(max_examples=60, deadline=None)
@given(
    p=st.integers(1, 4),
    v=st.integers(2, 3),
    rounds=st.integers(1, 3),
    forward_s=SECONDS,
    backward_s=SECONDS,
    transfer_s=st.floats(0.0, 5.0),
)
def test_every_action_waits_for_its_rank_and_its_message(
    p: int, v: int, rounds: int, forward_s: float, backward_s: float, transfer_s: float
) -> None:
    shape = shape_of(p, v, rounds * p)
    costs = Costs(forward_s=(forward_s,) * (p * v), backward_s=(backward_s,) * (p * v), transfer_s=transfer_s)
    timeline = run(Interleaved1F1B(), shape, costs)
    end_of = {action: end for spans in timeline.spans for action, _, end in spans}
    for spans in timeline.spans:
        free_s = 0.0
        for action, start, end in spans:
            source = action._replace(stage=action.stage + (-1 if action.kind == F else 1))
            arrival_s = end_of.get(source, 0.0) + (transfer_s if source in end_of and p > 1 else 0.0)
            assert start == max(free_s, arrival_s)
            assert end == start + (forward_s if action.kind == F else backward_s)
            free_s = end
    assert timeline.makespan_s == max(end_of.values())


def test_slower_messages_never_shorten_the_step() -> None:
    shape = shape_of(4, 2, 8)
    lengths = [
        run(Interleaved1F1B(), shape, equal_costs(shape, t)).makespan_s for t in (0.0, 0.1, 0.5, 1.0, 2.0)
    ]
    assert all(shorter <= longer for shorter, longer in pairwise(lengths))
