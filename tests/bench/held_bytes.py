"""Bytes that a step really holds, counted from storages; nothing here knows a formula."""

from __future__ import annotations

import resource
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from launcher.runtime.loop import Trainer


class HeldBytes:
    """Follows what autograd holds while it is entered: each storage once, parameters not at all."""

    def __init__(self, trainer: Trainer) -> None:
        self.peak = self._now = 0
        self._uses: dict[int, int] = {}
        self._own = {
            p.untyped_storage().data_ptr() for m in trainer.part.modules.values() for p in m.parameters()
        }
        self._hooks = saved_tensors_hooks(self._hold, lambda held: held.tensor)

    def __enter__(self) -> HeldBytes:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _hold(self, tensor: Tensor) -> _Held:
        return _Held(self, tensor)

    def add(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        if address in self._own:
            return
        if self._uses.setdefault(address, 0) == 0:
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
        self._uses[address] += 1

    def drop(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        if address in self._own:
            return
        self._uses[address] -= 1
        if self._uses[address] == 0:
            self._now -= storage.nbytes()


class _Held:
    """A saved tensor; lives as long as the graph that saved it."""

    def __init__(self, counter: HeldBytes, tensor: Tensor) -> None:
        self.tensor, self._counter = tensor, counter
        counter.add(tensor.untyped_storage())

    def __del__(self) -> None:
        self._counter.drop(self.tensor.untyped_storage())


def reset_peak_resident() -> int:
    """Forgets the peak resident size of this process; returns its size now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """The peak resident size since `reset_peak_resident`."""
    return _status_bytes("VmHWM")


def limit_memory(more_bytes: int) -> None:
    """Lets this process allocate so much more, and no more: a device of that size."""
    allowed = _status_bytes("VmData") + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
