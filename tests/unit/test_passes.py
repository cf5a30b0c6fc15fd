"""Messages are added where they cannot deadlock and overlap with compute."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.base.errors import Fault, PlanError, PluginError
from launcher.contract.actions import (
    COMPUTE,
    RB,
    RF,
    SB,
    SF,
    Action,
    B,
    F,
    PipelineShape,
    W,
    from_text,
    to_text,
)
from launcher.contract.strategy import Schedule
from launcher.schedule.dependencies import DependencyGraph
from launcher.schedule.passes import deadlines, lower, smallest_depth
from launcher.schedule.simulate import simulate, textbook_costs
from launcher.schedule.validation.validate import validate
from launcher_plugins.schedules.gpipe import GPipe
from launcher_plugins.schedules.interleaved_1f1b import Interleaved1F1B
from launcher_plugins.schedules.naive import Naive
from launcher_plugins.schedules.one_f_one_b import OneFOneB
from launcher_plugins.schedules.zb_h1 import ZBH1
from tests.helpers.schedules import add_communication

Lists = Sequence[Sequence[Action]]


def shape_of(p: int, v: int, m: int) -> PipelineShape:
    return PipelineShape(num_pp_ranks=p, num_chunks=v, num_microbatches=m)


def compute_of(schedule: Schedule, shape: PipelineShape) -> list[list[Action]]:
    return [list(schedule.actions(shape, pp_rank)) for pp_rank in range(shape.num_pp_ranks)]


def depth_of(schedule: Schedule, shape: PipelineShape) -> int:
    graph = DependencyGraph.of(compute_of(schedule, shape), shape)
    return smallest_depth(graph, deadlines(graph))


def accepted_shapes() -> Iterator[tuple[Any, PipelineShape]]:
    for p, v, m in product(range(1, 9), range(1, 5), range(1, 17)):
        for schedule in (Naive(), GPipe(), OneFOneB(), Interleaved1F1B(), ZBH1()):
            if not list(schedule.check(shape_of(p, v, m))):
                yield schedule, shape_of(p, v, m)


def test_lists_of_a_lowered_1f1b() -> None:
    shape = shape_of(2, 1, 3)
    assert list(map(to_text, lower(OneFOneB(), shape))) == [
        "0RB0 0F0 0SF0 0F1 0SF1 0RB1 0B0 0RB2 0F2 0SF2 0B1 0B2",
        "1RF0 1RF1 1F0 1B0 1SB0 1RF2 1F1 1B1 1SB1 1F2 1B2 1SB2",
    ]


def test_add_communication_puts_receives_depth_actions_ahead() -> None:
    shape = shape_of(2, 1, 2)
    lists = compute_of(GPipe(), shape)
    assert to_text(add_communication(lists, shape, 0)[1]) == "1RF0 1F0 1RF1 1F1 1B0 1SB0 1B1 1SB1"
    assert to_text(add_communication(lists, shape, 1)[1]) == "1RF0 1RF1 1F0 1F1 1B0 1SB0 1B1 1SB1"
    assert to_text(add_communication(lists, shape, 2)[0]) == "0RB0 0F0 0SF0 0RB1 0F1 0SF1 0B0 0B1"


def test_stages_of_one_rank_exchange_no_messages() -> None:
    shape = shape_of(1, 3, 2)
    (actions,) = lower(Interleaved1F1B(), shape)
    assert {action.kind for action in actions} == {F, B}


def test_input_gradients_are_sent_before_the_weight_gradients_are_computed() -> None:
    shape = shape_of(2, 1, 1)
    assert list(map(to_text, lower(ZBH1(), shape))) == [
        "0RB0 0F0 0SF0 0B0 0W0",
        "1RF0 1F0 1B0 1SB0 1W0",
    ]


def test_every_accepted_shape_lowers_to_valid_lists() -> None:
    for schedule, shape in accepted_shapes():
        validate(lower(schedule, shape), shape, splits_backward=schedule.splits_backward)


def test_messages_per_boundary_are_one_each_way_and_microbatch() -> None:
    for schedule, shape in accepted_shapes():
        p, v, m = shape.num_pp_ranks, shape.num_chunks, shape.num_microbatches
        kinds = [action.kind for actions in lower(schedule, shape) for action in actions]
        boundaries = p * v - 1 if p > 1 else 0
        assert [kinds.count(kind) for kind in (SF, RF, SB, RB)] == [boundaries * m] * 4


def test_interleaving_multiplies_the_messages() -> None:
    for p, v in product(range(2, 9), range(2, 5)):
        plain, chunked = shape_of(p, 1, 2 * p), shape_of(p, v, 2 * p)
        ratio = count_messages(Interleaved1F1B(), chunked) / count_messages(OneFOneB(), plain)
        assert ratio == pytest.approx((p * v - 1) / (p - 1))


def count_messages(schedule: Schedule, shape: PipelineShape) -> int:
    return sum(action.kind in (SF, SB) for actions in lower(schedule, shape) for action in actions)


@pytest.mark.parametrize(
    ("schedule", "shape", "depth"),
    [(GPipe(), (4, 1, 8), 0), (OneFOneB(), (4, 1, 8), 1), (Interleaved1F1B(), (4, 2, 8), 2)],
    ids=["gpipe", "1f1b", "interleaved_1f1b"],
)
def test_smallest_depth_of_the_built_in_schedules(
    schedule: Schedule, shape: tuple[int, int, int], depth: int
) -> None:
    assert depth_of(schedule, shape_of(*shape)) == depth


def test_smallest_depth_is_the_least_that_the_validator_accepts() -> None:
    for schedule, shape in accepted_shapes():
        if shape.num_microbatches > 8:
            continue
        depth = depth_of(schedule, shape)
        compute = compute_of(schedule, shape)
        splits = schedule.splits_backward
        validate(add_communication(compute, shape, depth), shape, splits_backward=splits)
        if depth:
            with pytest.raises(PlanError, match="deadlock with blocking sends: waits for pp_rank"):
                validate(add_communication(compute, shape, depth - 1), shape, splits_backward=splits)


def test_receives_are_posted_in_the_order_of_the_sends_even_when_needed_otherwise() -> None:
    # Rank 0 sends the forwards of microbatches 0 and 1, rank 1 needs 1 first.
    shape = shape_of(2, 1, 2)
    compute = [from_text("0F0 0F1 0B1 0B0"), from_text("1F1 1B1 1F0 1B0")]
    lists = add_communication(compute, shape, 0)
    assert to_text(lists[1]) == "1RF0 1RF1 1F1 1B1 1SB1 1F0 1B0 1SB0"
    validate(lists, shape)


@st.composite
def random_order(draw: st.DrawFn) -> tuple[PipelineShape, list[list[Action]], bool]:
    """Any lists whose data graph is acyclic: each rank's share of one random global order. The last value
    is whether the backward is split."""
    is_split = draw(st.booleans())
    shape = shape_of(draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    last = shape.num_stages - 1
    ready = [Action(0, F, microbatch) for microbatch in range(shape.num_microbatches)]
    lists: list[list[Action]] = [[] for _ in range(shape.num_pp_ranks)]
    while ready:
        action = ready.pop(draw(st.integers(0, len(ready) - 1)))
        lists[shape.pp_rank(action.stage)].append(action)
        if action.kind == F:
            ready.append(
                Action(last, B, action.microbatch)
                if action.stage == last
                else action._replace(stage=action.stage + 1)
            )
        if action.kind == B and is_split:
            ready.append(action._replace(kind=W))
        if action.kind == B and action.stage:
            ready.append(action._replace(stage=action.stage - 1))
    return shape, lists, is_split


@settings(max_examples=150, deadline=None)
@given(random_order())
def test_any_acyclic_order_can_be_lowered(case: tuple[PipelineShape, list[list[Action]], bool]) -> None:
    shape, lists, is_split = case
    lowered = lower(Given(lists, splits_backward=is_split), shape)
    assert [[action for action in actions if action.kind in COMPUTE] for actions in lowered] == lists


class Given(Schedule):
    """A schedule that gives the lists it was made with."""

    def __init__(self, lists: Lists, faults: Sequence[Fault] = (), *, splits_backward: bool = False) -> None:
        self.lists = lists
        self.splits_backward = splits_backward
        self.faults = faults

    def check(self, shape: PipelineShape) -> Sequence[Fault]:
        return self.faults

    def actions(self, shape: PipelineShape, pp_rank: int) -> Sequence[Action]:
        return self.lists[pp_rank]

    def bubble_fraction(self, shape: PipelineShape) -> None:
        return None


def test_lower_raises_the_faults_of_a_refused_shape() -> None:
    with pytest.raises(
        PlanError, match=r"batch.num_microbatches=10.*Set batch.num_microbatches=8 or 12, or "
    ):
        lower(Interleaved1F1B(), shape_of(4, 2, 10))


@pytest.mark.parametrize(
    ("faults", "lists", "message"),
    [
        (None, [[]], r"Given\.check gave None: it has to yield or return each Fault, if any"),
        (["no"], [[]], r"Given\.check gave 'no', which is no Fault"),
        ((), [["0F0", "0B0"]], r"Given\.actions of pp_rank 0 gave '0F0', which is no Action"),
        ((), [[(0, "F", 0)]], r"Given\.actions of pp_rank 0 gave \(0, 'F', 0\), which is no Action"),
        ((), [None], r"Given\.actions of pp_rank 0 gave None: it has to yield or return each Action, if any"),
    ],
)
def test_lower_names_a_schedule_that_gives_something_else(faults: Any, lists: Any, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        lower(Given(lists, faults), shape_of(1, 1, 1))


def test_lower_names_a_cycle_in_the_data_flow() -> None:
    # Each rank wants the other's backward or forward first.
    lists = [from_text("0F0 0B0 0F1 0B1"), from_text("1F1 1B1 1F0 1B0")]
    with pytest.raises(PlanError) as raised:
        lower(Given(lists), shape_of(2, 1, 2))
    text = str(raised.value)
    assert (
        "=0B0: deadlock even with buffered sends: waits for pp_rank 1 to send 1SB0, which comes after 1F1 "
        in text
    )
    assert (
        "=1F1: deadlock even with buffered sends: waits for pp_rank 0 to send 0SF1, which comes after 0B0 "
        in text
    )
    assert ">0B0<" in text
    assert ">1F1<" in text


def rendezvous_makespan(lists: Lists, seconds: dict[str, float], transfer_s: float) -> float:
    """Brute force: a transfer starts when the send has started *and* the receive is posted."""
    posted: dict[tuple[int, str, int], float] = {}
    sent: dict[tuple[int, str, int], float] = {}
    clock, position = [0.0] * len(lists), [0] * len(lists)
    while any(place < len(actions) for place, actions in zip(position, lists, strict=True)):
        for rank, actions in enumerate(lists):
            if position[rank] == len(actions):
                continue
            stage, kind, microbatch = action = actions[position[rank]]
            if kind in (RF, RB):
                posted[action] = clock[rank]
            elif kind == SF:
                sent[stage + 1, RF, microbatch] = clock[rank]
            elif kind == SB:
                sent[stage - 1, RB, microbatch] = clock[rank]
            else:
                message = (stage, {F: RF, B: RB, W: ""}[kind], microbatch)
                if message in posted:
                    if message not in sent:
                        continue
                    clock[rank] = max(clock[rank], posted[message] + transfer_s, sent[message] + transfer_s)
                clock[rank] += seconds[kind]
            position[rank] += 1
    return max(clock)


@pytest.mark.parametrize("transfer_s", [0.25, 1.0, 1.5])
def test_receives_of_lowered_lists_delay_no_transfer(transfer_s: float) -> None:
    shapes: list[tuple[Schedule, tuple[int, int, int]]] = [
        (GPipe(), (4, 1, 8)),
        (OneFOneB(), (4, 1, 8)),
        (OneFOneB(), (2, 1, 8)),
    ]
    shapes += [(Interleaved1F1B(), (4, 2, 8)), (Interleaved1F1B(), (2, 3, 8)), (ZBH1(), (4, 1, 8))]
    for schedule, (p, v, m) in shapes:
        shape = shape_of(p, v, m)
        is_split = schedule.splits_backward
        costs = replace(textbook_costs(shape, splits_backward=is_split), transfer_s=transfer_s)
        lists = lower(schedule, shape)
        seconds = {F: 1.0, B: 1.0 if is_split else 2.0, W: 1.0}
        assert rendezvous_makespan(lists, seconds, transfer_s) == simulate(lists, shape, costs).makespan_s


def test_receives_posted_late_delay_the_step() -> None:
    shape = shape_of(4, 1, 8)
    compute = compute_of(OneFOneB(), shape)
    seconds = {F: 1.0, B: 2.0}
    late = rendezvous_makespan(add_communication(compute, shape, 0), seconds, 1.0)
    assert late > rendezvous_makespan(lower(OneFOneB(), shape), seconds, 1.0)


@pytest.mark.parametrize("schedule", [Naive(), GPipe(), OneFOneB(), Interleaved1F1B(), ZBH1()])
def test_no_gradient_goes_to_frozen_stages(schedule):
    shape = shape_of(4, 2 if isinstance(schedule, Interleaved1F1B) else 1, 8)
    whole = lower(schedule, shape)
    for num_frozen in range(shape.num_stages):
        partly = replace(shape, num_frozen=num_frozen)
        lists = lower(schedule, partly)
        needless = {(SB, s) for s in range(num_frozen + 1)} | {(RB, s) for s in range(num_frozen)}
        for before, after in zip(whole, lists, strict=True):
            sent = [action for action in before if (action.kind, action.stage) not in needless]
            assert sorted(after) == sorted(sent)
        costs = textbook_costs(partly, splits_backward=schedule.splits_backward)
        assert simulate(lists, partly, costs).makespan_s <= simulate(whole, shape, costs).makespan_s
