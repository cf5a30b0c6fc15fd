"""Every nanosecond of a step is in exactly one section."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from launcher.contract.records import COMPUTE, OTHER, SINGLE_RANK
from launcher.runtime.measure import clock as clocks
from launcher.runtime.measure.clock import Clock

CPU = torch.device("cpu")


@dataclass
class Host:
    """The monotonic clock of a host, which goes on when a test says so."""

    now_ns: int = 1_000

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def goes_on(self, by_ns: int) -> None:
        self.now_ns += by_ns


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host()
    monkeypatch.setattr(clocks, "time", host)
    return host


def test_the_kinds_of_a_step_sum_to_it_and_steps_leave_no_gap() -> None:
    """By the clock of this host."""
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


def test_a_step_begins_when_the_one_before_has_ended(host: Host) -> None:
    clock = Clock(CPU)
    clock.start()
    host.goes_on(7)
    first = clock.lap()
    host.goes_on(5)
    second = clock.lap()
    assert (first["start_ns"], first["duration_ns"]) == (1_000, 7)
    assert (second["start_ns"], second["duration_ns"]) == (1_007, 5)


def test_an_inner_section_is_taken_out_of_the_outer_one(host: Host) -> None:
    clock = Clock(CPU)
    clock.start()
    with clock.action():
        host.goes_on(10)
        with clock.section("tp"):
            host.goes_on(30)
        host.goes_on(2)
    times = clock.lap()
    assert times["kinds_ns"] == {"tp": 30, COMPUTE: 12, OTHER: 0}
    assert times["compute_ns"] == [12]


def test_every_call_of_a_collective_is_kept_by_itself() -> None:
    clock = Clock(CPU)
    clock.start()
    for _ in range(3):
        with clock.section("tp"):
            pass
    times = clock.lap()
    assert len(times["collectives_ns"]["tp"]) == 3
    assert sum(times["collectives_ns"]["tp"]) == times["kinds_ns"]["tp"]


def test_a_sealed_section_keeps_what_runs_inside_it(host: Host) -> None:
    clock = Clock(CPU)
    clock.start()
    with clock.section(SINGLE_RANK, sealed=True), clock.action(), clock.section("dp"):
        host.goes_on(3)
    times = clock.lap()
    assert times["kinds_ns"] == {SINGLE_RANK: 3, OTHER: 0}
    assert times["compute_ns"] == []
    assert times["collectives_ns"] == {}


def test_nothing_is_measured_before_the_first_step() -> None:
    clock = Clock(CPU)
    with clock.section("dp"):
        pass
    clock.start()
    assert set(clock.lap()["kinds_ns"]) == {OTHER}


def test_the_first_backward_of_each_step_is_told_from_its_start(host: Host) -> None:
    clock = Clock(CPU)
    clock.start()
    with clock.action():
        host.goes_on(20)
    for _ in range(2):
        with clock.action(is_backward=True):
            host.goes_on(30)
    first, second = clock.lap(), clock.lap()
    assert (first["first_backward_ns"], first["duration_ns"]) == (20, 80)
    assert second["first_backward_ns"] is None
