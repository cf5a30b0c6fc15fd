"""The ranks of `trireme bench collectives`: every value is checked, and a wrong one has no times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from launcher.contract.bench import OPERATIONS, BenchRequest, BenchResult, Placement
from launcher.runtime.measure.collective_cases import make_case, real_bytes
from launcher.runtime.measure.collectives import Bench
from launcher.runtime.process.groups import Group
from tests.helpers.ranks import RankError, run_ranks

CPU = torch.device("cpu")
PAIR = Placement(link="intra_node", groups=((0, 1),))
PAIRS = Placement(link="inter_node", groups=((0, 2), (1, 3)))
REQUEST = BenchRequest(sizes=(8, 1000), placements=(PAIR, PAIRS), num_rounds=2)


def verdicts(rank: int, size: int, sabotage: str) -> dict[str, bool]:
    """Whether each operation gives the right value on this rank."""
    group = Group(ranks=tuple(range(size)), rank=rank, handle=dist.group.WORLD)
    found = {}
    for operation in OPERATIONS:
        case = make_case(operation, group, real_bytes(1000, size), CPU)
        if sabotage != "no call":
            case.call()
        if sabotage == "one element" and case.expected is not None:
            case.output[-1] += 1
        found[operation] = case.is_right()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_every_operation_gives_the_right_value(size: int) -> None:
    assert run_ranks(size, verdicts, size, "") == [dict.fromkeys(OPERATIONS, True)] * size


@pytest.mark.parametrize("sabotage", ["no call", "one element"])
def test_the_check_sees_a_value_that_is_wrong(sabotage: str) -> None:
    found = run_ranks(3, verdicts, 3, sabotage)
    assert not any(all(rank[operation] for rank in found) for operation in OPERATIONS)


def measured(rank: int, broken: str, message: str) -> BenchResult:
    """What all ranks find, with an operation of torch replaced."""
    if broken:

        def call(*arguments: object, **options: object) -> None:
            if message:
                raise RuntimeError(message)

        setattr(dist, broken, call)
    return Bench(REQUEST, rank, CPU, timedelta(seconds=20)).result()


def test_groups_of_every_kind_are_measured_in_every_round() -> None:
    results = run_ranks(4, measured, "", "")
    assert all(result == results[0] for result in results)
    found = {(m.operation, m.link, m.num_ranks, m.num_bytes) for m in results[0].measurements}
    links = ("intra_node", "inter_node")
    assert found == {(o, link, 2, size) for o in OPERATIONS for link in links for size in (8, 1000)}
    assert all(len(m.times_s) == 2 and min(m.times_s) > 0 for m in results[0].measurements)
    assert results[0].not_measured == ()
    assert results[0].backend == "gloo"


def test_an_operation_that_the_backend_lacks_is_named_with_the_reason() -> None:
    result, *_ = run_ranks(4, measured, "all_to_all_single", "ProcessGroup does not support alltoall")
    assert {(m.operation, m.link, m.is_wrong, m.reason) for m in result.not_measured} == {
        (
            "all_to_all",
            link,
            False,
            "gloo has no such operation: ProcessGroup does not support alltoall",
        )
        for link in ("intra_node", "inter_node")
    }
    assert {m.operation for m in result.measurements} == set(OPERATIONS) - {"all_to_all"}


def test_an_operation_with_a_wrong_value_has_no_times() -> None:
    result, *_ = run_ranks(4, measured, "all_gather_into_tensor", "")
    assert {(m.operation, m.is_wrong, m.reason) for m in result.not_measured} == {
        ("all_gather", True, "a wrong value for 8 bytes")
    }
    assert {m.operation for m in result.measurements} == set(OPERATIONS) - {"all_gather"}


def test_a_failure_of_another_kind_ends_the_ranks() -> None:
    with pytest.raises(RankError, match="the cable is cut"):
        run_ranks(4, measured, "all_reduce", "the cable is cut")


def test_the_verb_measures_with_real_ranks_and_a_plan_uses_what_it_saved(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CONFIG_HOME": str(tmp_path / "config")}

    def trireme(*words: str) -> str:
        command = [sys.executable, "-m", "launcher", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    files = ("--json", "all.json", "--plot", "all.svg", "--save", "mine")
    shown = trireme("bench", "collectives", "--ranks", "2", "--sizes", "1KB,8MB", *files)
    assert "2 ranks inside a node: time of one operation" in shown
    (run,) = (tmp_path / "runs").iterdir()
    assert run.stat().st_mode & 0o077 == 0
    measured = json.loads((run / "measured.json").read_text())
    assert {m["operation"] for m in measured["measurements"]} == set(OPERATIONS)
    found = json.loads((tmp_path / "all.json").read_text())["links"]["intra_node"]
    plan = json.loads(
        trireme("plan", "quickstart", "parallel.pp=1", "parallel.dp=2", "cluster=mine", "--json")
    )
    (row,) = (row for row in plan["traffic"] if row["purpose"] == "gradients")
    seconds = 2 * found["latency_s"] + row["sent_bytes"] / found["bandwidth"]
    assert row["time_s"] == pytest.approx(seconds, rel=1e-3)
