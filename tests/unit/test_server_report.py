"""What a report tells of parameter servers, measured beside predicted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.base import registry
from launcher.base.errors import LauncherError
from launcher.contract.mesh import Mesh
from launcher.contract.plan import RolePlan, Section
from launcher.contract.records import COMPUTE, SERVER, Header, MemoryRecord
from launcher.report.speedup import compare, to_json
from launcher.report.tables import speedup_text
from launcher.typed.read import plain
from launcher_plugins.architectures.parameter_server.report import UpdateRecord, summed
from tests.helpers.fake_runs import MS, FakeRun, write_records

TIMES = {rank: {COMPUTE: own_ms, SERVER: 10} for rank, own_ms in enumerate((90, 190, 92))}
"""Of three workers, the second of which is late."""
EXCHANGE = {
    "num_servers": 1,
    "push_s": 0.004,
    "pull_s": 0.004,
    "total_s": 0.008,
    "all_reduce_s": 0.005,
    "even_servers": None,
    "pulls_last": True,
    "update_s": 0.002,
    "mixed_s": None,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three workers on their own, and a server that makes an update of each gradient."""
    fake = FakeRun(mesh=Mesh(pp=1, dp=3, tp=1), kinds_ms=TIMES, global_size=6, num_devices=4)
    path = fake.write(tmp_path / "served")
    server = RolePlan(name="server", first_rank=3, num_ranks=1, trains=False)
    plan = fake.plan()
    memory = replace(plan.memory[0], optimizer_bytes=0, persistent_bytes={"pulled parameters": 4_000_000})
    workers = replace(plan.roles[0], is_expendable=True)
    told = Section(plugin="parameter_server", title="Exchange", lines=(), values=EXCHANGE)
    used = (registry.record("launcher.architectures", "parameter_server"),)
    plan = replace(plan, roles=(workers, server), sections=(told,), memory=(memory,), plugins=used)
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


def test_sums_of_updates_give_what_the_updates_give(run: Path) -> None:
    text = speedup_text([run], None, width=100, ascii_only=True)
    records = run / "metrics" / "rank-00003.jsonl"
    header, *lines = map(json.loads, records.read_text().splitlines())
    updates = [UpdateRecord(**values) for values in lines]
    sums = [summed(updates[first:last]).values() for first, last in ((0, 6), (6, 13))]
    (run / "metrics" / "sums").mkdir()
    (run / "metrics" / "sums" / records.name).write_text("\n".join(map(json.dumps, [header, *sums])) + "\n")
    write_records(run, 3, [header, *lines[13:]])
    assert speedup_text([run], None, width=100, ascii_only=True) == text
    write_records(run, 3, [header, *lines[14:]])
    assert speedup_text([run], None, width=100, ascii_only=True) != text


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


def test_a_plan_that_an_older_launcher_stored_is_read(run: Path) -> None:
    text = speedup_text([run], None)
    plan = json.loads((run / "plan.json").read_text())
    del plan["sections"], plan["num_update_copies"]
    plan["exchange"] = EXCHANGE
    plan["batch"]["padded_vocab_size"] = 256
    for memory in plan["memory"]:
        memory["states_by_zero_stage"] = []
    (run / "plan.json").write_text(json.dumps(plan))
    assert speedup_text([run], None) == text
    assert "predicted for the whole exchange: 8 ms" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"type":"rest","step":4}', "the records of a server: type 'rest' is none of update, loss"),
        ('{"type":"loss","worker":4}', "the records of a server: .* missing .* 'step'"),
    ],
)
def test_what_no_server_writes_is_refused(run: Path, line: str, message: str) -> None:
    with (run / "metrics" / "rank-00003.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(LauncherError, match=message):
        speedup_text([run], None)


def test_a_run_is_reported_where_its_architecture_is_not_installed(run: Path) -> None:
    text = (run / "plan.json").read_text()
    (run / "plan.json").write_text(text.replace('"name": "parameter_server"', '"name": "nonesuch"'))
    shown = speedup_text([run], None)
    assert "served (dp=3 tp=1 pp=1 decentralized server=1)" in shown.replace("servers=", "server=")
    assert "predicted for the whole exchange" not in shown
