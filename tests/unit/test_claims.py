"""A pipeline's promises beside what its ranks measured."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.app.planning import one_device
from launcher.base.errors import ConfigError
from launcher.config.load import load
from launcher.contract.job import ReportConfig
from launcher.contract.mesh import Mesh
from launcher.contract.plan import Plan
from launcher.plan.build import build
from launcher.report.claims import (
    Promise,
    claims,
    counted_bytes,
    first_backwards_s,
    grown_bytes,
    held_microbatches,
    num_messages,
)
from launcher.report.runs import Run, load_run
from launcher.report.tables import speedup_text
from tests.helpers.configs import compose_sound, launch_config
from tests.helpers.fake_runs import FakeRun

MICROBATCHES = 4
GPIPE = FakeRun(
    mesh=Mesh(pp=2, dp=1, tp=1),
    kinds_ms={0: {"compute": 120, "pipeline": 30}, 1: {"compute": 120, "pipeline": 30}},
    global_size=MICROBATCHES,
    config={"report": {"claims": True}},
    held_bytes={0: (4_000_000, 4_000_000), 1: (2_000_000, 8_000_000)},
    first_backward_ms={0: 70, 1: 50},
)
"""Two ranks, all forwards first; the second is said to have let go of half of it in between."""


def promise(plan: Plan, run: Run | None = None, label: str = "here") -> Promise:
    return Promise(label=label, plan=plan, run=run, end="succeeded" if run else "pending")


def _plan(schedule: str, *, num_chunks: int, num_layers: int, pp: int = 2) -> Plan:
    report = ReportConfig(baseline="none", warmup_steps=2, claims=True)
    return build(
        launch_config(
            model={"num_layers": num_layers},
            batch={"global_size": MICROBATCHES},
            parallel={"pp": pp, "schedule": schedule, "num_chunks": num_chunks},
            report=report,
        )
    )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return load_run(GPIPE.write(tmp_path / "run"))


def test_microbatches_held_are_bytes_over_the_bytes_of_one(run: Run) -> None:
    assert held_microbatches(run) == [4.0, 1.0]


def test_microbatches_held_are_unknown_where_one_rank_was_not_followed(tmp_path: Path) -> None:
    run = load_run(replace(GPIPE, held_bytes={0: (400, 400)}).write(tmp_path / "run"))
    assert held_microbatches(run) is None


def test_a_chunk_of_a_microbatch_counts_as_one(run: Run) -> None:
    parallel = replace(run.plan.config.parallel, num_chunks=2)
    config = replace(run.plan.config, parallel=parallel)
    assert held_microbatches(replace(run, plan=replace(run.plan, config=config))) == [8.0, 2.0]


def test_bytes_are_those_of_live_tensors_and_of_what_autograd_held(run: Run) -> None:
    assert counted_bytes(run) == [4_000_001, 2_000_001]
    assert grown_bytes(run) == [8_000_000, 4_000_000]


def test_the_first_backward_is_told_of_every_pipeline_rank(run: Run) -> None:
    assert first_backwards_s(run) == [0.07, 0.05]


def test_messages_are_those_of_one_replica(tmp_path: Path) -> None:
    kinds = {rank: {"compute": 120, "pipeline": 30} for rank in range(4)}
    two = replace(GPIPE, mesh=Mesh(pp=2, dp=2, tp=1), kinds_ms=kinds)
    assert num_messages(load_run(two.write(tmp_path / "run"))) == 8  # 4 receives on each rank


def test_the_table_sets_theory_beside_what_was_measured(run: Run) -> None:
    plan = _plan("gpipe", num_chunks=1, num_layers=4)
    times = replace(plan.schedule, forward_s=(0.01, 0.01), backward_s=(0.02, 0.02), transfer_s=0.0)
    memory = tuple(replace(part, activations_bytes=2_000_000) for part in plan.memory)
    plan = replace(plan, schedule=times, memory=memory)
    device = replace(plan.config.device, memory_bytes=9_000_000)
    plan = replace(plan, config=replace(plan.config, device=device))
    full = replace(plan, memory=tuple(replace(part, activations_bytes=9_000_000) for part in memory))
    told = claims([promise(plan, run), promise(full, label="later")], [("never", "too much for it")])
    assert told == [
        "What the schedule promises, and what was measured of a step",
        "  point  bubble  measured  idle ms  measured  messages  measured  layers of rank 0",
        "  here   20.0 %    20.0 %       30        30         8         8               1-2",
        "  later  20.0 %                 30                   8                         1-2",
        "",
        "On each rank of the pipeline: microbatches held at once, and ms until the first backward",
        "  point  held  measured  first backward  measured",
        "  here    4 4   4.0 1.0           70 50     70 50",
        "  later   4 4                     70 50",
        "",
        "MB of each rank: planned; counted, as tensors alive before the update (batches read ahead, too)",
        "and the most that autograd held; and what its process grew by in training. Then the limit, what",
        "the plan says, and what came of it",
        "  point  planned  counted  process grew  limit     plan        run",
        "  here       4 4      4 2           8 4      9   passes  succeeded",
        "  later    11 11                             9    warns    pending",
        "  never                                         refuses",
        "    never: too much for it",
    ]


def test_where_the_terminal_is_too_narrow_a_point_has_its_name_above_its_numbers() -> None:
    point = promise(_plan("gpipe", num_chunks=1, num_layers=4), label="a point with a long name")
    wide = claims([point])
    narrow = claims([point], room=len(wide[1]) - 1)
    assert narrow[1:5] == [
        "  point",
        "    bubble  measured  idle ms  measured  messages  measured  layers of rank 0",
        "  a point with a long name",
        f"    {wide[2].removeprefix('  a point with a long name').lstrip()}",
    ]
    assert claims([point], room=max(map(len, wide))) == wide


def test_layers_are_placed_as_in_the_textbook() -> None:
    plan = _plan("interleaved_1f1b", num_chunks=2, num_layers=16, pp=4)
    assert claims([promise(plan)])[2].endswith("1-2, 9-10")


def test_runs_that_do_not_ask_have_no_table(run: Run) -> None:
    report = replace(run.plan.config.report, claims=False)
    plan = replace(run.plan, config=replace(run.plan.config, report=report))
    assert claims([promise(plan, run)]) == []


def test_the_report_of_a_run_that_asks_ends_with_the_table(run: Run) -> None:
    text = speedup_text([run.path], None, ascii_only=True)
    assert "What the schedule promises, and what was measured of a step\n  point" in text
    assert "4.0 1.0" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parallel.pp=1"], "report.claims=true: measures pipeline schedules, and parallel.pp is 1. "
         "Set report.claims=false, or a larger parallel.pp."),
        (["fusion.compile=block"], "fuses operations. Set report.claims=false, or fusion.compile=none."),
        (["report.warmup_steps=1"], "report.warmup_steps=1: includes the second step, which report.claims "
         "slows down. Set report.warmup_steps=2."),
    ],
)  # fmt: skip
def test_claims_that_cannot_be_measured_are_refused(words: list[str], message: str) -> None:
    composed = compose_sound("quickstart", ["report.claims=true", *words])
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(composed.values, composed.sources)


def test_the_baseline_of_a_run_that_asks_does_not() -> None:
    assert not one_device(_plan("gpipe", num_chunks=1, num_layers=4)).report.claims
