"""The memory of a rank, measured and never by a formula; and a limit on it, to emulate a smaller device."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from launcher.base.errors import JobError
from launcher.contract.records import MemoryRecord
from launcher.runtime.model.deferred_weight_gradients import SplitBackward

_SAMPLED_STEP = 2
"""The step after a start at whose end memory is sampled: by then the optimizer has its state."""
_STATUS = Path("/proc/self/status")


class MemoryGauge:
    """Created before the model is built; samples allocated memory once, and the peak in the end."""

    def __init__(self, device: torch.device, *, tracks_saved: bool = False) -> None:
        """``tracks_saved``: it also counts the bytes that autograd saves in the sampled step."""
        self._device = device
        self._tracks_saved = tracks_saved
        self._saved: SavedBytes | None = None
        self._resident = self._built = resident_bytes()
        self._num_steps = 0
        self._states: int | None = None

    def model_built(self) -> None:
        """Called when the model is built: from now on the process grows by what the training takes."""
        self._built = resident_bytes()

    def tracking(
        self, modules: Iterable[nn.Module], deferral: SplitBackward
    ) -> AbstractContextManager[object]:
        """A context for the schedule of every step."""
        if not self._tracks_saved or self._num_steps + 1 != _SAMPLED_STEP:
            return nullcontext()
        self._saved = SavedBytes((param for module in modules for param in module.parameters()), deferral)
        return self._saved

    def sample(self, *holders: object) -> None:
        """Called between the schedule of a step and its update, when all gradients exist.

        ``holders``: what the states can be reached from.
        """
        self._num_steps += 1
        if self._num_steps == _SAMPLED_STEP:
            self._states = live_bytes(self._device, *holders)

    def record(self, step: int) -> MemoryRecord | None:
        """The measurements after ``step`` steps; None where there were too few."""
        if self._states is None:
            return None
        grown = None
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            peak, grown = (max(0, peak_resident_bytes() - then) for then in (self._resident, self._built))
        saved = self._saved
        return MemoryRecord(
            step=step,
            states_bytes=self._states,
            peak_bytes=peak,
            held_peak_bytes=saved.peak if saved else None,
            held_total_bytes=saved.total if saved else None,
            grown_bytes=grown,
        )


def live_bytes(device: torch.device, *holders: object) -> int:
    """Bytes of the tensors on a device that can be reached from some objects, and of their gradients, each
    storage once; on a GPU of all tensors."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    storages = [tensor.untyped_storage() for tensor in _tensors(holders) if tensor.device == device]
    # A compiler's fake tensor has a device, too, but no storage on it.
    real = [storage for storage in storages if storage.device == device]
    return sum({storage.data_ptr(): storage.nbytes() for storage in real}.values())


def _tensors(holders: Iterable[object]) -> Iterator[Tensor]:
    """Every tensor that can be reached from some objects, but not through modules and classes: from there all
    can.

    Nothing else is touched. Of all objects of the process (`gc.get_objects`) some are tuples that other
    threads are still building, which fails once anything refers to them.
    """
    seen: dict[int, object] = {}
    todo = list(holders)
    while todo:
        item: Any = todo.pop()
        kind = type(item)  # a proxy would give that of what it stands for
        if id(item) in seen or issubclass(kind, ModuleType | type | FrameType):
            continue
        seen[id(item)] = item
        if issubclass(kind, Tensor):
            yield item
            todo += [item.grad] if item.is_leaf else []
        is_function = kind is FunctionType  # refers to its module
        todo += (item.__closure__, item.__defaults__) if is_function else gc.get_referents(item)


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    statm = Path("/proc/self/statm")
    if not statm.exists():  # not Linux: the peak so far is the nearest value
        return peak_resident_bytes()
    return int(statm.read_text().split()[1]) * resource.getpagesize()


def peak_resident_bytes() -> int:
    """The most memory that this process ever had in RAM."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def limit_memory(device: torch.device, limit_bytes: int, *holders: object) -> None:
    """Limits this process to so much memory on its device, including what is already allocated; an allocation
    beyond it fails as on a device that is full.

    On a CPU what is already allocated are the tensors of ``holders``, and what libraries and threads take
    from now on counts too.

    Raises:
        JobError: where the system has no such limit.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
        return
    if not _STATUS.exists():
        raise JobError("device.limits_memory=true needs Linux on a CPU. Set device.limits_memory=false.")
    held = live_bytes(device, *holders)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_written_bytes() - held + limit_bytes, most))


def _written_bytes() -> int:
    """Writable memory of this process, as the kernel compares it with the limit."""
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024


class SavedBytes:
    """Counts the bytes that autograd saves inside this context, and those that deferred weight gradients
    still read: from storages, each once, parameters not at all."""

    def __init__(self, parameters: Iterable[Tensor], deferral: SplitBackward) -> None:
        self.now = 0
        self.peak = 0
        self.total = 0
        """Bytes of all storages that autograd ever saved; one that is saved again after it was freed counts
        again."""
        self._deferral = deferral
        self._save_hook = deferral.save_hook
        self._uses: dict[int, int] = {}
        self._own = {param.untyped_storage().data_ptr() for param in parameters}
        self._hooks = saved_tensors_hooks(
            lambda tensor: _Saved(self, tensor, by_autograd=True), lambda saved: saved.tensor
        )

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        self._deferral.save_hook = lambda tensor: _Saved(self, tensor, by_autograd=False)
        return self

    def __exit__(self, *error: object) -> None:
        self._deferral.save_hook = self._save_hook
        self._hooks.__exit__(*error)

    def add(self, storage: torch.UntypedStorage, *, by_autograd: bool) -> None:
        """One more use of a storage, by autograd or by a deferred weight gradient."""
        address = storage.data_ptr()
        if address in self._own:
            return
        if self._uses.setdefault(address, 0) == 0:
            self.now += storage.nbytes()
            self.total += storage.nbytes() if by_autograd else 0
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


class _Saved:
    """A saved tensor; lives as long as the graph, or the deferred gradient, that refers to it."""

    def __init__(self, counter: SavedBytes, tensor: Tensor, *, by_autograd: bool) -> None:
        self.tensor, self._counter = tensor, counter
        counter.add(tensor.untyped_storage(), by_autograd=by_autograd)

    def __del__(self) -> None:
        self._counter.drop(self.tensor.untyped_storage())
