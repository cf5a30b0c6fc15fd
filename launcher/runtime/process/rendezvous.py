"""Where the ranks of a run meet: the store in which they find each other's addresses.

torch's TCPStore listens on every interface, asks nobody who he is, and lists its keys. The ranks of one host
meet in a file of the run directory instead, which only its owner can open.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from launcher.runtime.process.environment import ProcessRank, rendezvous_file, rendezvous_key


def init_process_group(backend: str, process: ProcessRank, timeout: timedelta) -> None:
    """Joins the default process group: through the file that the executor names, else through the TCPStore
    of ``MASTER_ADDR`` and ``MASTER_PORT``. Collective over all ranks."""
    rank, world_size = process.rank, process.world_size
    if path := rendezvous_file():
        store: Store = FileStore(path, world_size)
    else:
        found, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
        store = PrefixStore(rendezvous_key(), found)
    store.set_timeout(timeout)  # torch leaves that of a store that it is given as it is
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
