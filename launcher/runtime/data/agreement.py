"""Every rank must have the same sample at the same index: one reads the inputs, another the targets."""

from __future__ import annotations

import json

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from launcher.base.errors import ConfigError, Fault
from launcher.base.units import counted
from launcher.contract.heartbeat import PEERS
from launcher.contract.plan import RankPlan
from launcher.runtime.data.reader import Reader
from launcher.runtime.measure.clock import Clock

_NUM_COMPARED = 8
"""Items that are read for it, spread over the dataset."""
_KEY = "own_data"
"""In the store of the process group."""


def compared_items(plan: RankPlan, reader: Reader, clock: Clock) -> dict[int, str]:
    """Compares a user's own dataset with that of the first trainer, which reads it in any layout. Returns
    the digests of the items that are compared, by index.

    Goes through the store of the process group: ranks of some architectures share no other collective.

    Raises:
        ConfigError: when its length or an item differs, naming the ranks and the index.
    """
    length, target = len(reader), plan.plan.config.data.target
    indices = range(0, length, max(1, length // _NUM_COMPARED))
    mine = reader.fingerprints(indices)
    found = dict(zip(indices, mine, strict=True))
    if not dist.is_initialized():
        return found
    store, first = _get_default_store(), plan.role.first_rank
    if plan.rank == first:
        store.set(_KEY, json.dumps([length, mine]))
        return found
    with clock.doing(PEERS):
        num_theirs, theirs = json.loads(store.get(_KEY))
    if num_theirs != length:
        rule = f"rank {plan.rank} has {counted(length, 'sample')}, rank {first} {num_theirs}"
        raise ConfigError([Fault("data.target", target, rule, "Read the same files on every rank.")])
    differing = [index for index, own, other in zip(indices, mine, theirs, strict=True) if own != other]
    if differing:
        rule = (
            f"item {differing[0]} of rank {plan.rank} is not item {differing[0]} of rank {first} "
            f"({len(differing)} of {len(indices)} compared differ)"
        )
        fix = (
            "Sort what comes from a set or a folder, and seed generators of your own by the index; random, "
            "numpy.random and torch draw the same on every rank."
        )
        raise ConfigError([Fault("data.target", target, rule, fix)])
    return found
