"""What a server saves of its key range, and goes on from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launcher.runtime.api import GlobalSlice
from launcher.runtime.checkpoint import store as checkpoint
from launcher.runtime.checkpoint.fragments import STEP
from launcher.runtime.checkpoint.shard import save_shard
from launcher.runtime.process.rank import make_context
from launcher_plugins.architectures.parameter_server.runtime.shard import ParameterLayout, Shard
from tests.helpers.equality import CPU
from tests.helpers.servers import servers_job

LAYOUT = ParameterLayout(buckets=((GlobalSlice.unsharded("w", (4, 3)),),), num_servers=2)
NUM_UPDATES = (2, 5)
"""Of the two servers: a worker's gradients come to one of them sooner than to the other."""


def server(number: int) -> Shard:
    plan = servers_job(options={"mode": "async", "servers": 2})
    shard = Shard(make_context(plan.rank(plan.mesh.num_ranks + number), CPU), LAYOUT, number)
    for piece in shard.pieces.values():
        piece.master.fill_(1.0)
    return shard


def update(shard: Shard) -> None:
    for piece in shard.pieces.values():
        piece.gradient.fill_(1.0 + shard.num_updates)
        piece.update(lr=0.1, factor=1.0)
    shard.num_updates += 1


def saved(root: Path) -> tuple[list[Shard], checkpoint.Checkpoint]:
    """Two servers after updates of their own, and the checkpoint that they have made."""
    servers = [server(0), server(1)]
    folder = checkpoint.unfinished_folder(root, 1)
    for rank, shard in enumerate(servers):
        for _ in range(NUM_UPDATES[rank]):
            update(shard)
        save_shard(folder, rank, list(shard.state()))
    checkpoint.complete(root, 1, num_shards=2)
    return servers, checkpoint.Checkpoint(checkpoint.folder_of(root, 1))


def test_each_of_several_servers_on_their_own_goes_on_with_its_own_count(tmp_path: Path) -> None:
    servers, found = saved(tmp_path)
    for number, before in enumerate(servers):
        after = server(number)
        after.load(found.read)
        assert after.num_updates == NUM_UPDATES[number]
        update(before)
        update(after)
        assert torch.equal(after.pieces[0].master, before.pieces[0].master)
    assert int(found.read(STEP, (), ())) == NUM_UPDATES[0]


def test_a_server_with_the_count_of_another_computes_something_else(tmp_path: Path) -> None:
    servers, found = saved(tmp_path)
    after = server(1)
    after.load(lambda name, *box: found.read(STEP if name.startswith(STEP) else name, *box))
    after.num_updates = servers[1].num_updates  # so that both are given the same gradient
    update(servers[1])
    update(after)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(after.pieces[0].master, servers[1].pieces[0].master)
