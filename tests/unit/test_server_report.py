"""What a report tells of parameter servers, measured beside predicted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.contract.mesh import Mesh
from launcher.contract.plan import ExchangePlan, RolePlan
from launcher.contract.records import COMPUTE, SERVER, Header, MemoryRecord, UpdateRecord
from launcher.report.speedup import compare, to_json
from launcher.report.tables import speedup_text
from launcher.typed.read import plain
from tests.helpers.fake_runs import MS, FakeRun, write_records

TIMES = {rank: {COMPUTE: own_ms, SERVER: 10} for rank, own_ms in enumerate((90, 190, 92))}
"""Of three workers, the second of which is late."""
EXCHANGE = ExchangePlan(
    num_servers=1,
    push_s=0.004,
    pull_s=0.004,
    total_s=0.008,
    all_reduce_s=0.005,
    even_servers=None,
    pulls_last=True,
    update_s=0.002,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three workers on their own, and a server that makes an update of each gradient."""
    fake = FakeRun(mesh=Mesh(pp=1, dp=3, tp=1), kinds_ms=TIMES, global_size=6, num_devices=4)
    path = fake.write(tmp_path / "served")
    server = RolePlan(name="server", first_rank=3, num_ranks=1, trains=False)
    plan = fake.plan()
    memory = replace(plan.memory[0], optimizer_bytes=0, kept_bytes={"pulled parameters": 4_000_000})
    plan = replace(plan, roles=(*plan.roles, server), exchange=EXCHANGE, memory=(memory,))
    (path / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    header = next(record for record in fake.records(0) if isinstance(record, Header))
    updates = [
        UpdateRecord(update=n, step=n // 3, busy_ns=3 * MS, worker=n % 3, pulled_at=max(0, n - 1 - n % 2))
        for n in range(18)
    ]
    write_records(path, 3, [plain(record) for record in (replace(header, rank=3, role="server"), *updates)])
    return path


def test_the_exchange_and_the_late_worker_are_told_beside_what_was_predicted(run: Path) -> None:
    text = speedup_text([run], None, width=100, ascii_only=True)
    assert (
        "  waiting for the servers: measured 10 ms a step\n"
        "    predicted for the whole exchange: 8 ms; 5 ms as an all-reduce\n"
        "  a worker's step without that wait: 92 ms in the middle; 190 ms at most, of worker 1\n"
        "  a server's work on an update: measured 3 ms; predicted 2 ms\n"
        "  staleness, other updates since the pull: 1: 50%, 2: 50% (at most 2)\n"
    ) in text


def test_buffers_that_are_kept_are_in_what_is_predicted_for_the_update(run: Path) -> None:
    record = MemoryRecord(step=6, states_bytes=12_500_000, peak_bytes=20_000_000)
    with (run / "metrics" / "rank-00000.jsonl").open("a") as file:
        file.write(json.dumps(plain(record)) + "\n")
    assert (
        "  held by rank 0 at the update: measured 12.5 MB; "
        "predicted 12.0 MB\n    of weights, gradients and pulled parameters\n"
        "  memory of rank 0 at most: measured 20.0 MB (growth of the whole process); predicted 16.5 MB\n"
    ) in speedup_text([run], None, width=100, ascii_only=True)


def test_the_loss_of_a_run_that_lost_a_worker_is_that_of_the_others_in_the_end(run: Path) -> None:
    assert "  training loss 2.5000 after 6 steps of served\n" in speedup_text([run], None)
    records = run / "metrics" / "rank-00000.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join(lines[:-2]))
    with (run / "metrics" / "rank-00003.jsonl").open("a") as file:
        file.write('{"type":"loss","worker":0,"step":4}\n')
    text = speedup_text([run], None)
    assert "  training loss 2.5000 after 6 steps of served\n" in text
    assert "served lost worker 0 after 4 steps; the others went on." in text


def test_the_same_is_there_for_programs(run: Path) -> None:
    (result,) = json.loads(to_json(compare([run], None)))["results"]
    assert result["measured"]["own_step_s"] == {"0": 0.09, "1": 0.19, "2": 0.092}
    assert result["predicted"]["exchange"]["total_s"] == 0.008
    assert sum(result["measured"]["staleness"].values()) == 18
