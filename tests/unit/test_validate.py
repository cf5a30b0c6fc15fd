"""Every way to spoil a valid schedule is caught, and the message names the place."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import PlanError
from launcher.contract.actions import Action, PipelineShape, from_text
from launcher.contract.strategy import Schedule
from launcher.schedule.passes import lower
from launcher.schedule.simulate import peak_held
from launcher.schedule.validation.validate import validate, validate_compute
from launcher.schedule.validation.violation import ScheduleError
from launcher_plugins.schedules.interleaved_1f1b import Interleaved1F1B
from launcher_plugins.schedules.one_f_one_b import OneFOneB
from launcher_plugins.schedules.zb_h1 import ZBH1
from tests.helpers.schedules import add_communication

SHAPE = PipelineShape(num_pp_ranks=3, num_microbatches=4)
Lists = list[list[Action]]


@pytest.fixture
def lists() -> Lists:
    return [list(actions) for actions in lower(OneFOneB(), SHAPE)]


def act(text: str) -> Action:
    return Action.parse(text)


def message(lists: Lists, shape: PipelineShape = SHAPE) -> str:
    with pytest.raises(PlanError) as raised:
        validate(lists, shape)
    return str(raised.value)


def test_dropped_microbatch_is_named_with_its_rank(lists: Lists) -> None:
    lists[1] = [action for action in lists[1] if action.microbatch != 2]
    text = message(lists)
    assert "pp_rank 1, action 18=end: 1B2 1F2 1RB2 1RF2 1SB2 1SF2 missing;" in text
    assert text.splitlines()[0].endswith("Add what is missing.")
    assert ">end<" in text


def test_dropped_forward_is_shown_beside_its_backward(lists: Lists) -> None:
    lists[0].remove(act("0F3"))
    assert "pp_rank 0, action 10=0SF3: 0F3 missing; each stage runs every microbatch once" in message(lists)


def test_dropped_receive_is_named(lists: Lists) -> None:
    lists[2].remove(act("2RF1"))
    assert (
        "2RF1 missing; each stage runs every microbatch once forward and once backward, and each "
        in message(lists)
    )


def test_repeated_action_is_named_with_its_first_place(lists: Lists) -> None:
    lists[2].append(act("2F0"))
    first = lists[2].index(act("2F0"))
    assert f"=2F0: repeated; it is already at action {first}. Remove one of them." in message(lists)


def test_action_of_another_rank_is_named(lists: Lists) -> None:
    lists[0].insert(3, act("1F0"))
    expected = (
        "pp_rank 0, action 3=1F0: not among the actions of pp_rank 0 "
        "(stage 0; microbatch 0 to 3; F, B and messages). Remove it."
    )
    assert expected in message(lists)


def test_microbatch_out_of_range_is_named(lists: Lists) -> None:
    lists[0].append(act("0F4"))
    assert "=0F4: not among the actions of pp_rank 0" in message(lists)


def test_send_from_the_last_stage_is_named(lists: Lists) -> None:
    lists[2].append(act("2SF0"))
    assert "=2SF0: not among the actions of pp_rank 2" in message(lists)


def test_faults_of_all_ranks_come_at_once(lists: Lists) -> None:
    lists[0].remove(act("0F3"))
    lists[2].remove(act("2B1"))
    text = message(lists)
    assert text.startswith("2 faults:")
    assert "0F3 missing" in text
    assert "2B1 missing" in text


@pytest.mark.parametrize(
    ("early", "needed"), [("1B1", "1F1"), ("1SF2", "1F2"), ("1SB0", "1B0"), ("1F3", "1RF3")]
)
def test_swapped_actions_are_named_with_what_they_need(lists: Lists, early: str, needed: str) -> None:
    first, second = lists[1].index(act(needed)), lists[1].index(act(early))
    lists[1][first], lists[1][second] = lists[1][second], lists[1][first]
    expected = f"pp_rank 1, action {first}={early}: needs {needed}, which comes later, at action {second}. "
    text = message(lists)
    assert expected + f"Put {needed} before it." in text
    assert f">{early}<" in text


def test_receive_after_its_backward_is_named(lists: Lists) -> None:
    lists[0].remove(act("0RB2"))
    lists[0].append(act("0RB2"))
    assert "=0B2: needs 0RB2, which comes later, at action 15. Put 0RB2 before it." in message(lists)


def test_stages_of_one_rank_in_the_wrong_order_are_named() -> None:
    shape = PipelineShape(num_pp_ranks=1, num_chunks=2, num_microbatches=1)
    text = message([list(from_text("1F0 0F0 1B0 0B0"))], shape)
    assert "pp_rank 0, action 0=1F0: needs 0F0, which comes later, at action 1. Put 0F0 before it." in text


def test_receives_in_another_order_than_the_sends_are_named(lists: Lists) -> None:
    first, second = lists[2].index(act("2RF0")), lists[2].index(act("2RF1"))
    lists[2][first], lists[2][second] = lists[2][second], lists[2][first]
    assert (
        "pp_rank 2, action 0=2RF1: is posted before 2RF0, whose message pp_rank 1 sends first; receives from "
        "one rank are posted in the order of its sends. Put 2RF0 before 2RF1."
    ) in message(lists)


def test_deadlock_of_blocking_sends_alone_shows_who_waits_for_whom() -> None:
    shape = PipelineShape(num_pp_ranks=2, num_microbatches=3)
    compute = [list(OneFOneB().actions(shape, pp_rank)) for pp_rank in range(2)]
    text = message([list(actions) for actions in add_communication(compute, shape, 0)], shape)
    assert text == (
        "2 faults:\n"
        "  1. pp_rank 0, action 3=0SF1: deadlock with blocking sends: waits for pp_rank 1 to "
        "post 1RF1, which comes after 1SB0 there. Let pp_rank 1 post 1RF1 before 1SB0.\n"
        "  2. pp_rank 1, action 3=1SB0: deadlock with blocking sends: waits for pp_rank 0 to "
        "post 0RB0, which comes after 0SF1 there. Let pp_rank 0 post 0RB0 before 0SF1.\n"
        "\n"
        "  pp_rank 0  0F0 0SF0 0F1 >0SF1< 0RB0 0B0 0F2 0SF2 ...\n"
        "  pp_rank 1  1RF0 1F0 1B0 >1SB0< 1RF1 1F1 1B1 1SB1 ..."
    )


def test_cyclic_order_over_three_ranks_names_only_the_ranks_of_the_cycle() -> None:
    # Ranks 0 and 1 want each other's microbatch first; rank 2 only waits for rank 1.
    compute = [from_text("0F0 0B0 0F1 0B1"), from_text("1F1 1B1 1F0 1B0"), from_text("2F0 2B0 2F1 2B1")]
    shape = PipelineShape(num_pp_ranks=3, num_microbatches=2)
    text = message([list(actions) for actions in add_communication(compute, shape, 2)], shape)
    assert text.startswith("2 faults:")
    assert (
        "=0B0: deadlock even with buffered sends: waits for pp_rank 1 to send 1SB0, which comes after 1F1 "
        in text
    )
    assert (
        "=1F1: deadlock even with buffered sends: waits for pp_rank 0 to send 0SF1, which comes after 0B0 "
        in text
    )
    assert "pp_rank 2" not in text


def test_wrong_number_of_lists_is_refused(lists: Lists) -> None:
    with pytest.raises(PlanError, match="pipeline lists=2: one list for each of 3 pp_ranks"):
        validate(lists[:2], SHAPE)


def test_schedule_that_gives_messages_itself_is_refused(lists: Lists) -> None:
    with pytest.raises(
        ScheduleError,
        match=r"not among .* pp_rank 0 \(stage 0; .*; F and B only, the launcher adds messages\)\. Remove it",
    ):
        validate_compute(lists, SHAPE)


def test_weight_gradients_of_a_schedule_that_does_not_split_are_refused_with_how_to_say_so() -> None:
    compute = [from_text("0F0 0B0 0W0")]
    expected = (
        r"action 2=0W0: not among the actions of pp_rank 0 \(stage 0; microbatch 0 to 0; F and B only, .*\)"
        r"\. Set splits_backward = True on the schedule, or remove every W\."
    )
    with pytest.raises(ScheduleError, match=expected):
        validate_compute(compute, PipelineShape(num_pp_ranks=1))


def test_missing_weight_gradients_are_named() -> None:
    compute = [from_text("0F0 0F1 0B0 0B1 0W1")]
    expected = "action 0=0F0: 0W0 missing; .* once backward, once for its weight gradients, and each message"
    with pytest.raises(ScheduleError, match=expected):
        validate_compute(compute, PipelineShape(num_pp_ranks=1, num_microbatches=2), splits_backward=True)


def test_weight_gradients_before_their_backward_are_named() -> None:
    compute = [from_text("0F0 0W0 0B0")]
    with pytest.raises(ScheduleError, match=r"=0W0: needs 0B0, which comes later, at action 2\. Put 0B0 bef"):
        validate_compute(compute, PipelineShape(num_pp_ranks=1), splits_backward=True)


@pytest.mark.parametrize("schedule", [OneFOneB(), ZBH1()], ids=["1f1b", "zb_h1"])
def test_the_memory_high_water_mark_of_complete_lists(schedule: Schedule) -> None:
    marks = peak_held(lower(schedule, SHAPE), SHAPE)
    assert marks == ((3, 3, 3) if schedule.splits_backward else (3, 2, 1))


def test_long_lists_of_faults_are_cut() -> None:
    shape = PipelineShape(num_pp_ranks=20, num_microbatches=8)
    with pytest.raises(PlanError) as raised:
        validate_compute([[] for _ in range(20)], shape)
    text = str(raised.value)
    assert "0B0 0B1 0B2 0B3 0B4 0B5 and 10 more missing" in text
    assert "  ... and 8 more violations" in text


def drop(lists: Lists, rank: int, index: int) -> None:
    del lists[rank][index]


def repeat(lists: Lists, rank: int, index: int) -> None:
    lists[rank].insert(0, lists[rank][index])


def renumber(lists: Lists, rank: int, index: int) -> None:
    lists[rank][index] = lists[rank][index]._replace(microbatch=99)


@given(
    spoil=st.sampled_from([drop, repeat, renumber]),
    rank=st.integers(0, 1),
    place=st.floats(0, 1, exclude_max=True),
)
def test_any_single_spoilt_action_is_caught(
    spoil: Callable[[Lists, int, int], None], rank: int, place: float
) -> None:
    shape = PipelineShape(num_pp_ranks=2, num_chunks=2, num_microbatches=2)
    lists = [list(actions) for actions in lower(Interleaved1F1B(), shape)]
    index = int(place * len(lists[rank]))
    spoil(lists, rank, index)
    with pytest.raises(PlanError, match=f"pp_rank {rank}, action"):
        validate(lists, shape)
