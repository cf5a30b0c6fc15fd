"""Every nanosecond of a step is in exactly one section."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from launcher.contract.records import COMPUTE, OTHER, SINGLE_RANK, EvalRecord, Header
from launcher.runtime.measure.clock import Clock, RecordWriter

CPU = torch.device("cpu")
MS = 1_000_000


def test_the_kinds_of_a_step_sum_to_it_and_steps_leave_no_gap() -> None:
    clock = Clock(CPU)
    clock.start()
    with clock.action(), clock.section("tp"):
        pass
    first = clock.lap()
    with clock.section("dp"):
        pass
    second = clock.lap()
    for times in (first, second):
        assert sum(times["kinds_ns"].values()) == times["duration_ns"]
    assert second["start_ns"] - (first["start_ns"] + first["duration_ns"]) < MS


def test_an_inner_section_is_taken_out_of_the_outer_one() -> None:
    clock = Clock(CPU)
    clock.start()
    with clock.action():
        time.sleep(0.01)
        with clock.section("tp"):
            time.sleep(0.03)
    times = clock.lap()
    assert times["kinds_ns"]["tp"] >= 30 * MS
    assert 10 * MS <= times["kinds_ns"][COMPUTE] < 30 * MS
    assert times["compute_ns"] == [times["kinds_ns"][COMPUTE]]


def test_every_call_of_a_collective_is_kept_by_itself() -> None:
    clock = Clock(CPU)
    clock.start()
    for _ in range(3):
        with clock.section("tp"):
            pass
    times = clock.lap()
    assert len(times["collectives_ns"]["tp"]) == 3
    assert sum(times["collectives_ns"]["tp"]) == times["kinds_ns"]["tp"]


def test_a_sealed_section_keeps_what_runs_inside_it() -> None:
    clock = Clock(CPU)
    clock.start()
    with clock.section(SINGLE_RANK, sealed=True), clock.action(), clock.section("dp"):
        time.sleep(0.002)
    times = clock.lap()
    assert set(times["kinds_ns"]) == {SINGLE_RANK, OTHER}
    assert times["compute_ns"] == []
    assert times["collectives_ns"] == {}


def test_nothing_is_measured_before_the_first_step() -> None:
    clock = Clock(CPU)
    with clock.section("dp"):
        pass
    clock.start()
    assert set(clock.lap()["kinds_ns"]) == {OTHER}


def header() -> Header:
    return Header(
        rank=3,
        role="trainer",
        pp_rank=0,
        dp_rank=0,
        tp_rank=0,
        hostname="h",
        device="d",
        num_threads=1,
        num_cores=2,
        torch_version="2",
        p2p_latency_ns=0,
    )


def test_a_line_cut_by_a_kill_stays_apart_from_what_a_resumed_rank_writes(tmp_path: Path) -> None:
    path = tmp_path / "rank-00003.jsonl"
    path.write_text('{"type": "st')
    writer = RecordWriter(tmp_path, header())
    writer.write(EvalRecord(step=1, loss=2.0, num_tokens=3))
    writer.close()
    cut, first, second = path.read_text().splitlines()
    assert cut == '{"type": "st'
    assert json.loads(first)["rank"] == 3
    assert json.loads(second) == {"type": "eval", "step": 1, "loss": 2.0, "num_tokens": 3}


def test_the_first_backward_of_each_step_is_told_from_its_start() -> None:
    clock = Clock(CPU)
    clock.start()
    with clock.action():
        time.sleep(0.02)
    for _ in range(2):
        with clock.action(is_backward=True):
            time.sleep(0.02)
    first, second = clock.lap(), clock.lap()
    assert 20 * MS <= first["first_backward_ns"] < first["duration_ns"] - 40 * MS + MS
    assert second["first_backward_ns"] is None
