"""A role with nodes of its own, on a real Slurm: one heterogeneous job through its whole life."""

import pytest

from tests.helpers.slurm_cluster import SAVES, saving_rank
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.needs("slurm")
SERVERS = (
    "architecture=parameter_server",
    "architecture.servers=2",
    "parallel.pp=1",
    "parallel.dp=4",
    "+site.roles.server.partition=short",
    "site.time_limit=00:05:00",
)


def test_servers_on_nodes_of_their_own_save_and_go_on_with_the_trainers(slurm):
    _, job = slurm.submit(saving_rank(2), SAVES, *SERVERS)
    wait_until(lambda: len(slurm.told()) == 6)
    assert "restart" not in slurm.trireme("status", "run")
    slurm.ask("scancel", "--batch", "--signal=USR1", job)
    slurm.trireme("wait", "run")
    first, second = sorted(slurm.told()[:6]), sorted(slurm.told()[6:])
    assert [words[:3] for words in first] == [
        *([str(rank), str(rank % 2), "6"] for rank in range(4)),
        *([str(rank), "0", "6"] for rank in (4, 5)),
    ]
    assert [words[3] for words in first] == ["node0", "node0", "node1", "node1", "node2", "node3"]
    assert [len({words[4] for words in start}) for start in (first, second)] == [1, 1]
    assert [words[5] == "--resume" for words in (*first, *second)] == [False] * 6 + [True] * 6
    assert [name for name, _ in slurm.rendezvous()] == [f"{job}.0", f"{job}.1"]
    assert "succeeded" in slurm.trireme("status", "run")
    parts = slurm.ask(
        "squeue", "--noheader", "--all", "--states=all", f"--jobs={job}", "--format=%i %P %D %T"
    )
    assert sorted(parts.splitlines()) == [f"{job}+0 batch 2 COMPLETED", f"{job}+1 short 2 COMPLETED"]


def test_the_server_that_fails_is_named_by_its_rank(slurm):
    slurm.submit('[ "$RANK" != 5 ] || exit 17; exec sleep 60', *SERVERS)
    output = slurm.trireme("wait", "run", code=1)
    assert "rank 5 failed: ended with exit code 17\n" in output


def test_servers_are_cancelled_with_the_trainers(slurm):
    slurm.submit("exec sleep 60", *SERVERS)
    wait_until(lambda: len(slurm.told()) == 6)
    slurm.trireme("cancel", "run")
    wait_until(lambda: not slurm.ask("squeue", "--noheader"))
