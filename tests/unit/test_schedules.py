"""The built-in schedules: their lists, their rules, and the claims made about them."""

import inspect
from itertools import product
from typing import Any

import pytest

from launcher.contract.actions import B, F, PipelineShape, to_text
from launcher.contract.strategy import Schedule
from launcher.schedule.drawing.grid import draw, phases
from launcher.schedule.passes import lower
from launcher.schedule.simulate import Costs, peak_held, simulate, textbook_costs
from launcher.testing.conformance import ScheduleConformance
from launcher_plugins.schedules.gpipe import GPipe
from launcher_plugins.schedules.interleaved_1f1b import Interleaved1F1B, InterleavedConfig
from launcher_plugins.schedules.naive import Naive
from launcher_plugins.schedules.one_f_one_b import OneFOneB
from launcher_plugins.schedules.zb_h1 import ZBH1

SINGLE_CHUNK = [(p, m) for p in range(1, 9) for m in range(1, 17)]
UNEVEN = [(p, v, m) for p, v, m in product(range(1, 9), range(2, 5), range(1, 17)) if m >= p]
INTERLEAVED = [(p, v, m) for p, v, m in UNEVEN if m % p == 0]


def shape_of(p: int, v: int, m: int) -> PipelineShape:
    return PipelineShape(num_pp_ranks=p, num_chunks=v, num_microbatches=m)


def texts(schedule: Schedule, shape: PipelineShape) -> list[str]:
    return [to_text(schedule.actions(shape, pp_rank)) for pp_rank in range(shape.num_pp_ranks)]


class TestNaiveConforms(ScheduleConformance):
    plugin = Naive
    name = "naive"


class TestGPipeConforms(ScheduleConformance):
    plugin = GPipe
    name = "gpipe"


class TestOneFOneBConforms(ScheduleConformance):
    plugin = OneFOneB
    name = "1f1b"


class TestInterleaved1F1BConforms(ScheduleConformance):
    plugin = Interleaved1F1B
    name = "interleaved_1f1b"


class UnevenGroups(Interleaved1F1B):
    """Interleaved 1F1B that takes any number of microbatches from p on."""

    def __init__(self) -> None:
        super().__init__(InterleavedConfig(uneven_groups=True))


class TestZBH1Conforms(ScheduleConformance):
    plugin = ZBH1
    name = "zb_h1"


def test_naive_runs_one_microbatch_at_a_time() -> None:
    assert texts(Naive(), shape_of(2, 1, 3)) == ["0F0 0B0 0F1 0B1 0F2 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]


def test_gpipe_runs_all_forwards_then_all_backwards() -> None:
    assert texts(GPipe(), shape_of(2, 1, 3)) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


def test_1f1b_lists_of_three_ranks_and_four_microbatches() -> None:
    assert texts(OneFOneB(), shape_of(3, 1, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_1f1b_with_fewer_microbatches_than_ranks() -> None:
    assert texts(OneFOneB(), shape_of(4, 1, 2)) == [
        "0F0 0F1 0B0 0B1",
        "1F0 1F1 1B0 1B1",
        "2F0 2F1 2B0 2B1",
        "3F0 3B0 3F1 3B1",
    ]


def test_zb_h1_lists_of_three_ranks_and_four_microbatches() -> None:
    assert texts(ZBH1(), shape_of(3, 1, 4)) == [
        "0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3",
        "1F0 1F1 1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2W2 2W3",
    ]


def test_zb_h1_with_fewer_microbatches_than_ranks() -> None:
    assert texts(ZBH1(), shape_of(4, 1, 2)) == [
        "0F0 0F1 0B0 0W0 0B1 0W1",
        "1F0 1F1 1B0 1B1 1W0 1W1",
        "2F0 2F1 2B0 2B1 2W0 2W1",
        "3F0 3B0 3F1 3B1 3W0 3W1",
    ]


def test_zb_h1_without_weight_gradients_is_1f1b() -> None:
    for p, m in SINGLE_CHUNK:
        for pp_rank in range(p):
            shape = shape_of(p, 1, m)
            others = [action for action in ZBH1().actions(shape, pp_rank) if action.kind in (F, B)]
            assert others == list(OneFOneB().actions(shape, pp_rank))


def test_interleaved_lists_of_two_ranks_two_chunks_and_four_microbatches() -> None:
    assert texts(Interleaved1F1B(), shape_of(2, 2, 4)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_a_rank_holds_every_pth_stage() -> None:
    # 16 layers on 4 ranks with 2 chunks: stages of 2 layers, rank 0 has layers 1-2 and 9-10.
    shape = shape_of(4, 2, 4)
    assert [list(shape.stages(pp_rank)) for pp_rank in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    for pp_rank in range(4):
        stages = {action.stage for action in Interleaved1F1B().actions(shape, pp_rank)}
        assert {(shape.pp_rank(s), shape.chunk(s)) for s in stages} == {(pp_rank, 0), (pp_rank, 1)}


@pytest.mark.parametrize(
    "schedule", [Naive(), GPipe(), OneFOneB(), ZBH1()], ids=["naive", "gpipe", "1f1b", "zb_h1"]
)
def test_one_chunk_schedules_refuse_two_and_name_the_one_that_interleaves(schedule: Schedule) -> None:
    (fault,) = schedule.check(shape_of(4, 2, 8))
    assert str(fault).startswith("parallel.num_chunks=2: ")
    assert str(fault).endswith(
        "runs one model chunk per pipeline rank. "
        "Set parallel.num_chunks=1, or parallel.schedule=interleaved_1f1b."
    )


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (4, 2, 10),
            "batch.num_microbatches=10: interleaved_1f1b runs microbatches in groups of pp=4, so they must "
            "be a multiple of 4. Set batch.num_microbatches=8 or 12, or "
            "parallel.schedule_options.uneven_groups=true.",
        ),
        (
            (6, 2, 3),
            "batch.num_microbatches=3: 6 ranks need at least 6 microbatches; you have 3. "
            "Set batch.num_microbatches=6, or parallel.pp=3, or parallel.schedule=1f1b.",
        ),
        (
            (4, 1, 8),
            "parallel.num_chunks=1: interleaved_1f1b needs at least 2 model chunks on each pipeline rank. "
            "Set parallel.num_chunks=2, or parallel.schedule=1f1b.",
        ),
    ],
)
def test_interleaved_refuses_with_the_nearest_choice(shape: tuple[int, int, int], message: str) -> None:
    (fault,) = Interleaved1F1B().check(shape_of(*shape))
    assert str(fault) == message


def test_interleaved_reports_both_faults_of_a_shape() -> None:
    paths = [fault.path for fault in Interleaved1F1B().check(shape_of(4, 1, 10))]
    assert paths == ["parallel.num_chunks", "batch.num_microbatches"]


def test_what_interleaved_offers_it_accepts() -> None:
    for p, m in product(range(2, 9), range(1, 30)):
        for fault in Interleaved1F1B().check(shape_of(p, 2, m)):
            for way in fault.ways:
                schedule = (
                    UnevenGroups() if "parallel.schedule_options.uneven_groups" in way else Interleaved1F1B()
                )
                if "parallel.schedule" not in way:
                    sizes = way.get("parallel.pp", p), 2, way.get("batch.num_microbatches", m)
                    assert not list(schedule.check(shape_of(*sizes)))


def test_uneven_groups_run_any_number_of_microbatches_from_p_on_in_the_same_idle_time() -> None:
    for p, v, m in UNEVEN:
        shape = shape_of(p, v, m)
        lower(UnevenGroups(), shape)
        assert_bubble(UnevenGroups(), shape, (p - 1) / (v * m + p - 1))


def test_uneven_groups_change_nothing_where_p_divides_the_microbatches() -> None:
    for p, v, m in INTERLEAVED:
        assert texts(UnevenGroups(), shape_of(p, v, m)) == texts(Interleaved1F1B(), shape_of(p, v, m))


def test_uneven_groups_hold_what_their_largest_group_asks_for() -> None:
    for p, v, m in UNEVEN:
        largest = -(-m // (m // p))
        expected = tuple(min(v * m, (v - 1) * largest + 2 * (p - 1 - r) + 1) for r in range(p))
        assert held(UnevenGroups(), shape_of(p, v, m)) == expected


def test_uneven_groups_of_five_microbatches_on_two_ranks() -> None:
    assert texts(UnevenGroups(), shape_of(2, 2, 5)) == [
        "0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1 0B2 2B3 2B4 0B3 0B4",
        "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4",
    ]


@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB()], ids=["gpipe", "1f1b"])
def test_bubble_is_the_closed_form(schedule: Schedule) -> None:
    for p, m in SINGLE_CHUNK:
        assert_bubble(schedule, shape_of(p, 1, m), (p - 1) / (m + p - 1))


def test_naive_leaves_all_but_one_rank_idle() -> None:
    for p, m in SINGLE_CHUNK:
        assert_bubble(Naive(), shape_of(p, 1, m), (p - 1) / p)


def idle_s(schedule: Schedule, shape: PipelineShape, costs: Costs) -> float:
    """Seconds that each rank is idle; the same on all, for they do equal work."""
    lists = [list(schedule.actions(shape, pp_rank)) for pp_rank in range(shape.num_pp_ranks)]
    timeline = simulate(lists, shape, costs)
    assert len(set(timeline.busy_s)) == 1
    return timeline.makespan_s - timeline.busy_s[0]


def test_zb_h1_idles_f_plus_b_minus_w_where_1f1b_idles_f_plus_b_plus_w() -> None:
    for p, extra, f, b, w in product(range(1, 7), range(4), (2, 3, 5), (2, 3, 5), (1, 2)):
        shape = shape_of(p, 1, p + extra)
        whole = Costs(forward_s=(f,) * p, backward_s=(b + w,) * p)
        halves = Costs(forward_s=(f,) * p, backward_s=(b,) * p, weight_s=(w,) * p)
        assert idle_s(OneFOneB(), shape, whole) == (p - 1) * (f + b + w)
        assert idle_s(ZBH1(), shape, halves) == (p - 1) * (f + b - w)


def test_zb_h1_idles_by_the_shortest_of_the_three_whatever_the_number_of_microbatches() -> None:
    for p, m, f, b, w in product(range(1, 6), range(1, 9), (1, 2, 3), (1, 2, 3), (1, 2, 3)):
        halves = Costs(forward_s=(f,) * p, backward_s=(b,) * p, weight_s=(w,) * p)
        expected = (p - 1) * (f + b) - (min(m, p) - 1) * min(f, b, w)
        assert idle_s(ZBH1(), shape_of(p, 1, m), halves) == expected, (p, m, f, b, w)


def test_zb_h1_has_a_third_of_the_idle_time_of_1f1b() -> None:
    for p, m in SINGLE_CHUNK:
        if m >= p:
            assert_bubble(ZBH1(), shape_of(p, 1, m), (p - 1) / (3 * m + p - 1))


def test_interleaving_divides_the_idle_time_by_v() -> None:
    for p, v, m in INTERLEAVED:
        assert_bubble(Interleaved1F1B(), shape_of(p, v, m), (p - 1) / (v * m + p - 1))


def assert_bubble(schedule: Schedule, shape: PipelineShape, expected: float) -> None:
    costs = textbook_costs(shape, splits_backward=schedule.splits_backward)
    lists = [list(schedule.actions(shape, pp_rank)) for pp_rank in range(shape.num_pp_ranks)]
    assert simulate(lists, shape, costs).bubble_fraction == pytest.approx(expected, abs=1e-12), shape
    assert schedule.bubble_fraction(shape) == pytest.approx(expected, abs=1e-15), shape


def held(schedule: Schedule, shape: PipelineShape) -> tuple[int, ...]:
    return peak_held([list(schedule.actions(shape, r)) for r in range(shape.num_pp_ranks)], shape)


def test_naive_holds_one_microbatch() -> None:
    for p, m in SINGLE_CHUNK:
        assert held(Naive(), shape_of(p, 1, m)) == (1,) * p


def test_zb_h1_holds_on_every_rank_what_1f1b_holds_on_its_worst() -> None:
    for p, m in SINGLE_CHUNK:
        shape = shape_of(p, 1, m)
        assert held(ZBH1(), shape) == (max(held(OneFOneB(), shape)),) * p == (min(m, p),) * p


def test_gpipe_holds_all_microbatches() -> None:
    for p, m in SINGLE_CHUNK:
        assert held(GPipe(), shape_of(p, 1, m)) == (m,) * p


def test_1f1b_holds_at_most_its_distance_from_the_end() -> None:
    for p, m in SINGLE_CHUNK:
        assert held(OneFOneB(), shape_of(p, 1, m)) == tuple(min(m, p - r) for r in range(p))


def test_interleaved_holds_a_round_more() -> None:
    for p, v, m in INTERLEAVED:
        expected = tuple(min(v * m, (v + 1) * p - 1 - 2 * r) for r in range(p))
        assert held(Interleaved1F1B(), shape_of(p, v, m)) == expected


def test_1f1b_reaches_its_first_backward_sooner_than_gpipe() -> None:
    shape = shape_of(4, 1, 8)
    costs = Costs(forward_s=(1.0,) * 4, backward_s=(2.0,) * 4)
    first = {}
    for schedule in (GPipe(), OneFOneB()):
        lists = [list(schedule.actions(shape, r)) for r in range(4)]
        timeline = simulate(lists, shape, costs)
        first[type(schedule)] = [
            min(start for action, start, _ in spans if action.kind == "B") for spans in timeline.spans
        ]
    assert first[GPipe] == [17, 15, 13, 11]
    assert first[OneFOneB] == [10, 8, 6, 4]


def test_warmup_of_1f1b_shrinks_along_the_pipeline() -> None:
    for p, m in SINGLE_CHUNK:
        for pp_rank in range(max(0, p - m), p):
            num_warmup, num_steady, num_cooldown = phases(
                list(OneFOneB().actions(shape_of(p, 1, m), pp_rank))
            )
            assert num_warmup == num_cooldown == min(m, p - 1 - pp_rank)
            assert num_steady == 2 * (m - num_warmup)


def test_warmup_of_interleaved_grows_by_a_round_per_chunk() -> None:
    shape = shape_of(4, 2, 16)
    warmups = [phases(list(Interleaved1F1B().actions(shape, r)))[0] for r in range(4)]
    assert warmups == [10, 8, 6, 4]


def test_forwards_of_a_stage_keep_the_order_of_the_microbatches() -> None:
    for p, v, m in INTERLEAVED:
        for kind in (F, B):
            actions = [a for a in Interleaved1F1B().actions(shape_of(p, v, m), p - 1) if a.kind == kind]
            for stage in shape_of(p, v, m).stages(p - 1):
                assert [a.microbatch for a in actions if a.stage == stage] == list(range(m))


@pytest.mark.parametrize(
    ("schedule", "shape"),
    [
        (Naive(), (3, 1, 2)),
        (GPipe(), (3, 1, 4)),
        (OneFOneB(), (3, 1, 4)),
        (Interleaved1F1B(), (2, 2, 4)),
        (ZBH1(), (3, 1, 4)),
    ],
    ids=["naive", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1"],
)
def test_the_drawing_in_the_docstring_is_the_schedule(schedule: Any, shape: tuple[int, int, int]) -> None:
    drawn = draw(lower(schedule, shape_of(*shape)), shape_of(*shape), width=200, color=False)
    rows = [row.strip() for row in drawn.splitlines()[1 : shape[0] + 1]]
    documented = inspect.getdoc(inspect.getmodule(type(schedule)))
    assert documented is not None
    assert "\n    ".join(["", *rows]) in documented
