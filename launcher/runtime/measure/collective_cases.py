"""One collective operation of one size: its buffers, the call, and whether the value is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.contract.bench import ELEMENT_BYTES
from launcher.runtime.process.groups import Group

_PERIOD = 7
"""Values repeat after so many elements, so that a misplaced part is noticed."""


@dataclass(frozen=True)
class Case:
    """An operation that can be called repeatedly."""

    call: Callable[[], object]
    """Runs it once; returns when this rank's part is done, on CUDA when it is on the stream."""
    output: Tensor
    expected: Tensor | None
    """The output after the first call; None on a rank that receives nothing."""
    inputs: Sequence[Tensor] = ()
    """Its other buffers."""

    def is_right(self) -> bool:
        """Whether the output of one call is what it should be."""
        return self.expected is None or bool(torch.equal(self.output, self.expected))

    def clear(self) -> None:
        """Sets all buffers to zero: sums of sums would overflow."""
        for tensor in (*self.inputs, self.output):
            tensor.zero_()


def real_bytes(num_bytes: int, num_ranks: int) -> int:
    """The next larger size that splits into equal parts of whole elements.

    >>> real_bytes(1000, 2), real_bytes(1000, 3)
    (1000, 1008)
    """
    unit = ELEMENT_BYTES * num_ranks
    return -(-num_bytes // unit) * unit


def make_case(operation: str, group: Group, num_bytes: int, device: torch.device) -> Case:
    """The operation with fresh buffers. ``num_bytes``: one of `real_bytes`."""
    builder: Callable[[Group, _Buffers], Case] = _BUILDERS[operation]
    return builder(group, _Buffers(group=group, numel=num_bytes // ELEMENT_BYTES, device=device))


@dataclass(frozen=True, kw_only=True)
class _Buffers:
    """Makes tensors whose values identify their rank."""

    group: Group
    numel: int
    """Elements of a whole buffer."""
    device: torch.device

    def whole(self, rank: int | None = None) -> Tensor:
        """The whole buffer of a rank of the group, of this one by default: small integers, whose sums are
        exact."""
        offset = 10.0 * (self.group.rank if rank is None else rank)
        return torch.arange(self.numel, device=self.device).remainder_(_PERIOD).float().add_(offset)

    def sum(self) -> Tensor:
        """The sum of all ranks' whole buffers."""
        return self.whole(0).mul_(self.group.size).add_(10.0 * sum(range(self.group.size)))

    def part(self, rank: int, of: Tensor) -> Tensor:
        """A rank's part of a buffer that is split equally over the group."""
        return of.chunk(self.group.size)[rank].clone()

    def gathered(self) -> Tensor:
        """Every rank's part of its own whole buffer, in the order of ranks."""
        return torch.cat([self.part(rank, self.whole(rank)) for rank in range(self.group.size)])

    def empty(self, *, is_part: bool = False) -> Tensor:
        """A buffer to receive into."""
        return torch.zeros(self.numel // (self.group.size if is_part else 1), device=self.device)


def _broadcast(group: Group, make: _Buffers) -> Case:
    buffer = make.whole() if group.rank == 0 else make.empty()
    return Case(lambda: dist.broadcast(buffer, group.ranks[0], group.handle), buffer, make.whole(0))


def _reduce(group: Group, make: _Buffers) -> Case:
    buffer, expected = make.whole(), make.sum() if group.rank == 0 else None
    return Case(lambda: dist.reduce(buffer, group.ranks[0], group=group.handle), buffer, expected)


def _all_reduce(group: Group, make: _Buffers) -> Case:
    buffer = make.whole()
    return Case(lambda: dist.all_reduce(buffer, group=group.handle), buffer, make.sum())


def _gather(group: Group, make: _Buffers) -> Case:
    own, output, is_root = make.part(group.rank, make.whole()), make.empty(), group.rank == 0
    parts, expected = (list(output.chunk(group.size)), make.gathered()) if is_root else (None, None)
    return Case(lambda: dist.gather(own, parts, group.ranks[0], group.handle), output, expected, [own])


def _scatter(group: Group, make: _Buffers) -> Case:
    whole, output = make.whole(0), make.empty(is_part=True)
    parts, expected = list(whole.chunk(group.size)) if group.rank == 0 else None, make.part(group.rank, whole)
    return Case(lambda: dist.scatter(output, parts, group.ranks[0], group.handle), output, expected, [whole])


def _all_gather(group: Group, make: _Buffers) -> Case:
    own, output = make.part(group.rank, make.whole()), make.empty()
    call = partial(dist.all_gather_into_tensor, output, own, group.handle)
    return Case(call, output, make.gathered(), [own])


def _reduce_scatter(group: Group, make: _Buffers) -> Case:
    whole, output = make.whole(), make.empty(is_part=True)
    call = partial(dist.reduce_scatter_tensor, output, whole, group=group.handle)
    return Case(call, output, make.part(group.rank, make.sum()), [whole])


def _all_to_all(group: Group, make: _Buffers) -> Case:
    whole, output = make.whole(), make.empty()
    expected = torch.cat([make.part(group.rank, make.whole(rank)) for rank in range(group.size)])
    return Case(lambda: dist.all_to_all_single(output, whole, group=group.handle), output, expected, [whole])


def _send_recv(group: Group, make: _Buffers) -> Case:
    own, output = make.whole(), make.empty()
    before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size

    def call() -> None:
        send = dist.P2POp(dist.isend, own, group.ranks[after], group.handle)
        receive = dist.P2POp(dist.irecv, output, group.ranks[before], group.handle)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return Case(call, output, make.whole(before), [own])


_BUILDERS = {
    "broadcast": _broadcast,
    "scatter": _scatter,
    "reduce": _reduce,
    "all_reduce": _all_reduce,
    "gather": _gather,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
}
