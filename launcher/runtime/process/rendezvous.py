"""Where the ranks of a run meet: the store in which they find each other's addresses.

torch's TCPStore listens on every interface, asks nobody who he is, and lists its keys. The ranks of one host
meet in a file of the run directory instead, which only its owner can open, and torchrun needs no store there.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.rendezvous import rendezvous

from launcher.contract.job import ONE_HOST
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
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


class OneHost(RendezvousHandler):
    """torchrun's rendezvous where its one agent starts every rank: nothing listens."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        assert parameters.max_nodes == 1, "torchrun was started for several hosts"
        self._run_id = parameters.run_id

    def get_backend(self) -> str:
        """Its name, as torchrun's option has it."""
        return ONE_HOST

    def next_rendezvous(self) -> RendezvousInfo:
        """The agent alone, with a store that is in its own memory."""
        address = RendezvousStoreInfo(master_addr="127.0.0.1", master_port=0)
        return RendezvousInfo(HashStore(), 0, 1, address)

    def get_run_id(self) -> str:
        """That of torchrun's options."""
        return self._run_id

    def is_closed(self) -> bool:
        """Never: nobody else could join."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def num_nodes_waiting(self) -> int:
        """None ever waits."""
        return 0

    def shutdown(self) -> bool:
        """Nothing to end."""
        return True


def one_host() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What torchrun loads from the entry point ``torchrun.handlers``."""
    return OneHost
