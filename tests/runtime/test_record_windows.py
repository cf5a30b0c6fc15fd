"""Ranks that train fold their steps into sums, which are those of the same steps kept whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from launcher.contract.records import RunRecords
from launcher.metrics.blocked_time import split, waited_ns
from launcher.metrics.read import read_run
from launcher.runtime.measure import windows
from launcher.runtime.process.rank import make_context
from launcher.runtime.train import loop
from launcher_plugins.architectures.parameter_server.runtime import server
from tests.helpers.equality import CPU, job
from tests.helpers.objects import substitute
from tests.helpers.ranks import run_ranks
from tests.helpers.record_windows import files_of
from tests.helpers.run_folders import make_folders
from tests.helpers.servers import serve_and_train, servers_job

NUM_STEPS, WINDOW = 11, 4


def start(rank: int, run_dir: Path, layout: dict[str, int], interval: int = 0) -> None:
    """Trains; of the records every window is kept whole, too."""
    train = {"num_steps": NUM_STEPS, "eval_batches": 1, "eval_interval": 5, "keep_checkpoints": 3}
    plan = job(parallel=layout, train=train | {"checkpoint_interval": interval}, report={"warmup_steps": 2})
    substitute(windows, "WINDOW_STEPS", WINDOW)
    make_folders(run_dir)
    has_saved = (run_dir / "checkpoints").exists()
    dist.barrier()
    loop.train(make_context(plan.rank(rank), CPU), run_dir, resume=has_saved)


def whole(run_dir: Path, copy: Path, num_ranks: int) -> Path:
    """The same records as if there were no windows."""
    make_folders(copy)
    for rank in range(num_ranks):
        current, _, earlier = files_of(run_dir, rank)
        lines = [line for path in (*earlier, current) for line in path.read_text().splitlines(keepends=True)]
        text = "".join(line for line in lines if '"type":"segment"' not in line)
        files_of(copy, rank)[0].write_text(text)
    return copy


def totals(records: RunRecords) -> list[dict[str, int]]:
    """The time of each rank by kind, over all steps."""
    found: list[dict[str, int]] = [{} for _ in records.headers]
    for rows in records.parts:
        for total, kinds in zip(found, split(records.headers, rows), strict=True):
            for kind, time in kinds.items():
                total[kind] = total.get(kind, 0) + time
    return found


@pytest.mark.parametrize("layout", [{"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_sums_of_ranks_that_train_are_those_of_their_steps(tmp_path, layout):
    run_ranks(4, start, tmp_path / "run", layout)
    sums, steps = read_run(tmp_path / "run"), read_run(whole(tmp_path / "run", tmp_path / "copy", 4))
    assert [(rows[0].first_step, rows[0].num_steps) for rows in sums.windows] == [(0, 2), (2, 2), (4, 4)]
    assert (list(sums.steps), list(steps.steps)) == ([8, 9, 10], list(range(NUM_STEPS)))
    assert totals(sums) == totals(steps)
    for kind in ("tp", "dp", "model", "tied"):
        found, expected = (
            sum(waited_ns(each.headers, rows, [kind]) for rows in each.parts) for each in (sums, steps)
        )
        assert found == expected
    assert any("transfer" in kinds and kinds["peer_wait"] for kinds in totals(sums))


def test_sums_without_the_other_members_times_are_not_those_of_the_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(windows.StepWindows, "_over_group", lambda self, calls, group: calls)
    run_ranks(2, start, tmp_path / "run", {"dp": 2})
    steps = read_run(whole(tmp_path / "run", tmp_path / "copy", 2))
    with pytest.raises(Exception, match=r"did not make the same .* calls; they cannot be matched"):
        assert totals(read_run(tmp_path / "run")) == totals(steps)


def test_a_run_of_an_earlier_version_goes_on_with_its_starts_and_evaluations(tmp_path):
    run_ranks(1, start, tmp_path / "new", {}, 5)
    run_dir = whole(tmp_path / "new", tmp_path / "old", 1)
    (tmp_path / "new" / "checkpoints").rename(run_dir / "checkpoints")
    for step in (10, 11):
        shutil.rmtree(run_dir / "checkpoints" / f"step-{step:08d}")
    run_ranks(1, start, run_dir, {}, 5)
    records = read_run(run_dir)
    assert (records.num_starts, records.num_lost_steps, records.num_steps) == (2, 6, 6)
    assert [(rows[0].first_step, rows[0].num_steps) for rows in records.windows] == [(5, 2), (7, 1)]
    assert [record.step for record in records.evals] == [5, 10, 11]
    assert files_of(run_dir)[1].read_text().count('"type":"eval"') == 5


def test_a_server_sums_its_updates_up(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "WINDOW_STEPS", 3)
    served = serve_and_train(servers_job(), tmp_path, num_steps=8)
    current, sums, earlier = files_of(tmp_path, 2)
    written = [json.loads(line) for line in sums.read_text().splitlines()]
    assert [(line["num_updates"], line["first_step"]) for line in written if line["type"] == "updates"] == [
        (3, 0),
        (3, 3),
    ]
    assert [record["step"] for record in served.updates[0]] == [6, 7]
    texts = [path.read_text() for path in (*earlier, current)]
    assert [text.count('"type":"update"') for text in texts] == [3, 3, 2]


def test_a_window_ends_with_the_baseline_also_of_a_training_that_began_with_an_optimizer():
    begins = {"init_from": "r/checkpoints/step-00000300", "init_optimizer": True}
    plan = job(train=begins | {"num_steps": 1000}, report={"warmup_steps": 2, "baseline_steps": 20})
    ctx: Any = SimpleNamespace(config=plan.config)
    writer: Any = None
    assert windows.StepWindows(ctx, writer, 310, 0)._edges == (312, 322)
