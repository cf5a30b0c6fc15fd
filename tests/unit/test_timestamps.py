"""Wall time is written, and decides nothing."""

from __future__ import annotations

import faulthandler
import re
import time
from pathlib import Path

import pytest

from launcher.base.timestamps import stamped, steady_time
from launcher.contract.heartbeat import heartbeat_name, unpack
from launcher.runtime.process import heartbeat
from launcher.runtime.process.heartbeat import HeartbeatWriter
from launcher.runtime.process.log import StampedOutput

HOUR_S = 3600.0
STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


class Clocks:
    """Both clocks of the system, set by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.monotonic = time.time(), time.monotonic()
        monkeypatch.setattr(time, "time", lambda: self.wall)
        monkeypatch.setattr(time, "monotonic", lambda: self.monotonic)

    def goes_on(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


@pytest.fixture
def resets(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The timeouts with which the watchdog was set."""
    found: list[float] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda timeout, **_: found.append(timeout))
    return found


@pytest.mark.parametrize("set_by_s", [-HOUR_S, HOUR_S])
def test_the_watchdog_of_a_healthy_rank_is_reset_though_the_wall_clock_was_set(
    tmp_path: Path, clocks: Clocks, resets: list[float], set_by_s: float
) -> None:
    heart = HeartbeatWriter(tmp_path, 0, 10.0, 60.0)
    heart.end_startup()
    clocks.wall += set_by_s
    heart.beat("compute")
    assert resets == [60.0, 10.0]  # at once after another
    clocks.goes_on(2)
    heart.beat("dp")
    assert resets == [60.0, 10.0, 10.0]
    beat = unpack((tmp_path / heartbeat_name(0)).read_bytes())
    assert (beat.doing, beat.ends - beat.time) == ("dp", 10.0)
    heart.close()


def test_by_the_wall_clock_the_watchdog_would_not_have_been_reset(
    tmp_path: Path, clocks: Clocks, resets: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "steady_time", lambda: time.time())
    heart = HeartbeatWriter(tmp_path, 0, 10.0, 60.0)
    heart.end_startup()
    clocks.wall -= HOUR_S
    clocks.goes_on(9)
    heart.beat("compute")
    assert resets == [60.0, 10.0]
    heart.close()


def test_the_time_that_ranks_compare_goes_on_by_the_monotonic_clock_alone(clocks: Clocks) -> None:
    begin = steady_time()
    clocks.wall -= HOUR_S
    clocks.goes_on(2.5)
    assert steady_time() - begin == pytest.approx(2.5)


def test_the_time_that_ranks_compare_is_about_that_of_the_wall_clock() -> None:
    assert abs(steady_time() - time.time()) < 30  # the clock of a machine may be corrected


def test_a_stamp_is_in_utc_with_milliseconds() -> None:
    before = time.strftime("%Y-%m-%dT%H:%M", time.gmtime())
    text = stamped("resumed after step 3")
    assert re.fullmatch(f"{STAMP} resumed after step 3", text)
    assert text[:16] >= before


def test_every_line_that_a_rank_prints_begins_with_the_time(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        stream = StampedOutput(file.fileno())
        print("one", "two", file=stream)
        print("a\nb\n", file=stream)
        stream.write("half")
        stream.write(" a line\nfl\udc80t\n")
        stream.write("")
    lines = path.read_text().split("\n")
    assert [re.sub(f"^{STAMP} ", "", line) for line in lines[:-1]] == [
        "one two",
        "a",
        "b",
        "",
        "half a line",
        r"fl\udc80t",
    ]
    assert all(re.match(f"{STAMP} ", line) for line in lines[:-1])
    assert lines[-1] == ""
