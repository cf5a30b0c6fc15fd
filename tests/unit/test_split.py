import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.base.errors import LauncherError
from launcher.contract.mesh import AXES, Mesh
from launcher.contract.records import REPORT_KINDS, RunRecords
from launcher.metrics.blocked_time import groups, split
from launcher.metrics.read import read_run
from tests.helpers.fake_runs import MS, FakeRun
from tests.helpers.objects import inside


def records_of(run: FakeRun) -> RunRecords:
    """What the reader would give, without files."""
    rows = [run.records(rank) for rank in range(run.mesh.num_ranks)]
    return RunRecords(
        headers=tuple(inside(row[0]) for row in rows),
        steps={0: tuple(inside(row[1]) for row in rows)},
        evals=(),
        num_torn_lines=0,
        num_incomplete_steps=0,
        num_starts=1,
    )


def split_first(records: RunRecords) -> tuple[dict[str, int], ...]:
    """The kinds of every rank in step 0."""
    return split(records.headers, records.steps[0])


def split_ms(run: FakeRun) -> list[dict[str, float]]:
    """The kinds of every rank that are not 0, in milliseconds."""
    return [{kind: ns / MS for kind, ns in kinds.items() if ns} for kinds in split_first(records_of(run))]


def test_shortest_member_of_a_collective_is_its_transfer():
    run = FakeRun(mesh=Mesh(pp=1, dp=2, tp=1), kinds_ms={0: {"dp": 3}, 1: {"dp": 10}})
    assert split_ms(run) == [{"transfer": 3}, {"transfer": 3, "peer_wait": 7}]


def test_waiting_that_changes_sides_within_a_step_is_found_call_by_call():
    # Both ranks spend 6 ms in the calls: step totals would show no waiting at all.
    run = FakeRun(
        mesh=Mesh(pp=1, dp=1, tp=2),
        kinds_ms={0: {}, 1: {}},
        calls_ms={0: {"tp": (1, 5)}, 1: {"tp": (5, 1)}},
    )
    assert split_ms(run) == [{"transfer": 2, "peer_wait": 4}, {"transfer": 2, "peer_wait": 4}]


def test_groups_wait_only_for_their_own_members():
    run = FakeRun(
        mesh=Mesh(pp=1, dp=2, tp=2), kinds_ms={0: {"dp": 1}, 1: {"dp": 9}, 2: {"dp": 2}, 3: {"dp": 7}}
    )
    assert split_ms(run) == [
        {"transfer": 1},
        {"transfer": 7, "peer_wait": 2},
        {"transfer": 1, "peer_wait": 1},
        {"transfer": 7},
    ]


def test_pipeline_time_up_to_the_calibrated_messages_is_transfer():
    run = FakeRun(
        mesh=Mesh(pp=2, dp=1, tp=1),
        kinds_ms={0: {"pipeline": 10}, 1: {"pipeline": 3}},
        header={"p2p_latency_ns": MS},
    )
    # 4 receives of 1 ms: 4 of rank 0's 10 ms; all of rank 1's 3 ms, and no more.
    assert split_ms(run) == [{"transfer": 4, "pipeline_wait": 6}, {"transfer": 3}]


def test_tied_collective_is_between_first_and_last_stage():
    run = FakeRun(
        mesh=Mesh(pp=3, dp=1, tp=1),
        kinds_ms={0: {"tied": 2}, 1: {"compute": 1}, 2: {"tied": 5}},
    )
    assert split_ms(run) == [{"transfer": 2}, {"compute": 1}, {"transfer": 2, "peer_wait": 3}]


def test_tied_calls_of_a_middle_stage_are_refused():
    run = FakeRun(mesh=Mesh(pp=3, dp=1, tp=1), kinds_ms={rank: {"tied": 2} for rank in range(3)})
    with pytest.raises(LauncherError, match="step 0: rank 1 made tied calls, but holds no tied weights"):
        split_first(records_of(run))


def test_members_with_different_numbers_of_calls_are_refused():
    run = FakeRun(
        mesh=Mesh(pp=1, dp=1, tp=2), kinds_ms={0: {}, 1: {}}, calls_ms={0: {"tp": (1, 1)}, 1: {"tp": (1,)}}
    )
    problem = "step 0: rank 1 made 1 tp calls, rank 0 of the same group 2; they cannot be matched"
    with pytest.raises(LauncherError, match=problem):
        split_first(records_of(run))


@pytest.mark.parametrize("order", [("pp", "dp", "tp"), ("tp", "pp", "dp"), ("dp", "tp", "pp")])
@pytest.mark.parametrize(("kind", "axes"), [("tp", "tp"), ("dp", "dp"), ("model", ("pp", "tp"))])
def test_groups_from_coordinates_are_those_of_the_mesh(order, kind, axes):
    mesh = Mesh(pp=2, dp=3, tp=2, order=order)
    run = FakeRun(mesh=mesh, kinds_ms={rank: {} for rank in range(12)})
    assert sorted(map(tuple, groups(records_of(run).headers, kind))) == sorted(mesh.groups(axes))


@settings(deadline=None, max_examples=50)
@given(data=st.data(), sizes=st.tuples(*[st.integers(1, 2)] * len(AXES)))
def test_kinds_of_every_rank_sum_to_its_step(data, sizes):
    mesh = Mesh(**dict(zip(AXES, sizes, strict=True)))
    times = st.integers(0, 50)
    plain_kinds = st.fixed_dictionaries(dict.fromkeys(("compute", "replicated", "pipeline", "other"), times))
    calls = st.fixed_dictionaries(
        {"tp": st.tuples(times, times), "dp": st.tuples(times), "model": st.tuples(times)}
    )
    ranks = range(mesh.num_ranks)
    records = records_of(
        FakeRun(
            mesh=mesh,
            num_steps=1,
            kinds_ms={rank: data.draw(plain_kinds) for rank in ranks},
            calls_ms={rank: data.draw(calls) for rank in ranks},
            header={"p2p_latency_ns": 7 * MS},
        )
    )
    found = split_first(records)
    for row, kinds in zip(records.steps[0], found, strict=True):
        assert set(kinds) == set(REPORT_KINDS)
        assert sum(kinds.values()) == row.duration_ns
        assert min(kinds.values()) >= 0


def test_split_of_records_from_files_is_the_same(tmp_path):
    run = FakeRun(mesh=Mesh(pp=1, dp=2, tp=1), kinds_ms={0: {"dp": 3}, 1: {"dp": 10}})
    records = read_run(run.write(tmp_path / "run"))
    assert split(records.headers, records.steps[5]) == split_first(records_of(run))
