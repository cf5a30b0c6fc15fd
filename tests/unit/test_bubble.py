"""The measured bubble beside what the measured times of the actions explain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.contract.mesh import Mesh
from launcher.report.bubble import bubble
from launcher.report.runs import load_run
from launcher.report.tables import speedup_text
from tests.helpers.fake_runs import FakeRun

MICROBATCHES = 8


def pipeline(second_compute_ms: int = 240, wait_ms: int = 60) -> FakeRun:
    """GPipe of two ranks: 10 ms forward, 20 ms backward on the first."""
    kinds = {0: {"compute": 240, "pipeline": wait_ms}, 1: {"compute": second_compute_ms, "pipeline": wait_ms}}
    return FakeRun(mesh=Mesh(pp=2, dp=1, tp=1), kinds_ms=kinds, global_size=MICROBATCHES)


def test_equal_stages_give_the_closed_form(tmp_path: Path) -> None:
    found = bubble(load_run(pipeline().write(tmp_path / "run")))
    assert found is not None
    assert found.replayed == pytest.approx(1 / (MICROBATCHES + 1))
    assert found.measured == pytest.approx(60 / (60 + 240))
    assert found.idle_s == pytest.approx(0.06)
    assert [(stage.forward_s, stage.backward_s, stage.weight_s) for stage in found.stages] == [
        pytest.approx((0.01, 0.02, 0.0))
    ] * 2


def test_waiting_for_the_last_stage_after_the_schedule_is_idle_time_too(tmp_path: Path) -> None:
    kinds = {
        0: {"compute": 240, "pipeline": 40, "model": 2},
        1: {"compute": 240, "pipeline": 20, "model": 22},
    }
    found = bubble(load_run(replace(pipeline(), kinds_ms=kinds).write(tmp_path / "run")))
    assert found is not None
    assert found.measured == pytest.approx((40 + 20 + 20) / (40 + 20 + 20 + 480))


def test_a_slow_stage_shows_in_the_replay(tmp_path: Path) -> None:
    found = bubble(load_run(pipeline(second_compute_ms=480).write(tmp_path / "run")))
    assert found is not None
    makespan = 8 * (20 + 40) + 10 + 20  # the slow stage never waits but for the first and the last
    assert found.replayed == pytest.approx(1 - (240 + 480) / (2 * makespan))


def test_a_run_without_a_pipeline_has_no_bubble(tmp_path: Path) -> None:
    assert bubble(load_run(FakeRun().write(tmp_path / "run"))) is None


def test_the_report_sets_measured_replayed_and_predicted_side_by_side(tmp_path: Path) -> None:
    text = speedup_text([pipeline().write(tmp_path / "run")], None, width=100)
    assert "bubble, idle / (idle + compute) of the pipeline: measured 20.0 %" in text
    assert "11.1 % by simulation with the measured time of every action" in text
    assert "predicted before the run: 20.0 % by formula, 25.0 % by simulation" in text
