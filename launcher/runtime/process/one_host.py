"""torchrun's rendezvous where it starts every rank itself: it has nobody to meet, and nothing listens.

torchrun finds it by the entry point ``torchrun.handlers``, under the name of its option --rdzv-backend.
"""

from __future__ import annotations

from collections.abc import Callable

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from launcher.contract.job import ONE_HOST


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
