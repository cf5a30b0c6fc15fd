"""Bytes that autograd really holds, counted from storages; nothing here knows a formula."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from launcher.runtime.model.split_backward import SplitBackward


class HeldBytes:
    """Follows what autograd holds while it is entered, and what a split backward keeps for later: each
    storage once, parameters not at all."""

    def __init__(self, parameters: Iterable[Tensor], split: SplitBackward) -> None:
        self.now = 0
        self.peak = 0
        self.total = 0
        """Bytes of all storages that autograd ever came to hold; one that is held again counts again."""
        self._split = split
        self._keep = split.keep
        self._uses: dict[int, int] = {}
        self._own = {param.untyped_storage().data_ptr() for param in parameters}
        self._hooks = saved_tensors_hooks(self._hold, lambda held: held.tensor)

    def __enter__(self) -> HeldBytes:
        self._hooks.__enter__()
        self._split.keep = lambda tensor: _Held(self, tensor, is_saved=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._split.keep = self._keep
        self._hooks.__exit__(kind, error, trace)

    def _hold(self, tensor: Tensor) -> _Held:
        return _Held(self, tensor, is_saved=True)

    def add(self, storage: torch.UntypedStorage, *, is_saved: bool) -> None:
        """One more use of a storage, by autograd or by a product that was put off."""
        address = storage.data_ptr()
        if address in self._own:
            return
        if self._uses.setdefault(address, 0) == 0:
            self.now += storage.nbytes()
            self.total += storage.nbytes() if is_saved else 0
            self.peak = max(self.peak, self.now)
        self._uses[address] += 1

    def drop(self, storage: torch.UntypedStorage) -> None:
        """One use less."""
        address = storage.data_ptr()
        if address in self._own:
            return
        self._uses[address] -= 1
        if self._uses[address] == 0:
            self.now -= storage.nbytes()


class _Held:
    """A tensor that is kept; lives as long as the graph, or the product, that keeps it."""

    def __init__(self, counter: HeldBytes, tensor: Tensor, *, is_saved: bool) -> None:
        self.tensor, self._counter = tensor, counter
        counter.add(tensor.untyped_storage(), is_saved=is_saved)

    def __del__(self) -> None:
        self._counter.drop(self.tensor.untyped_storage())
