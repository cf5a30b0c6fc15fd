"""One collective operation of one size: its buffers, the call, and whether the value is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.contract.bench import ELEMENT_BYTES
from launcher.runtime.process.groups import Group

_PERIOD = 7
"""Values repeat after so many elements, so that a part in the wrong place is seen."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """An operation that can be called again and again."""

    call: Callable[[], object]
    """Does it once; returns when this rank's part is done, on CUDA when it is on the stream."""
    inputs: Sequence[Tensor]
    output: Tensor
    expected: Tensor | None
    """What the output holds after the first call; None on a rank that receives nothing."""

    def is_right(self) -> bool:
        """Whether the output of one call is what it should be."""
        return self.expected is None or bool(torch.equal(self.output, self.expected))

    def clear(self) -> None:
        """Puts zeros everywhere: sums of sums would overflow."""
        for tensor in (*self.inputs, self.output):
            tensor.zero_()


def real_bytes(num_bytes: int, num_ranks: int) -> int:
    """The next size that can be cut into equal parts of whole elements.

    >>> real_bytes(1000, 2), real_bytes(1000, 3)
    (1000, 1008)
    """
    unit = ELEMENT_BYTES * num_ranks
    return -(-num_bytes // unit) * unit


def make_case(operation: str, group: Group, num_bytes: int, device: torch.device) -> Case:
    """The operation with fresh buffers. ``num_bytes``: one of `real_bytes`."""
    builder: Callable[[_Buffers], Case] = _BUILDERS[operation]
    return builder(_Buffers(group=group, numel=num_bytes // ELEMENT_BYTES, device=device))


@dataclass(frozen=True, kw_only=True)
class _Buffers:
    """Makes tensors whose values tell whose they are."""

    group: Group
    numel: int
    """Elements of the largest buffer."""
    device: torch.device

    def whole(self, place: int) -> Tensor:
        """What the member at a place holds for an operation on whole buffers: small whole numbers, whose
        sums are exact."""
        return torch.arange(self.numel, device=self.device).remainder_(_PERIOD).float().add_(10.0 * place)

    def sum(self) -> Tensor:
        """The sum of all members' whole buffers."""
        places = range(self.group.size)
        return self.whole(0).mul_(self.group.size).add_(10.0 * sum(places))

    def part(self, place: int, of: Tensor) -> Tensor:
        """One of as many equal parts of a buffer as there are members."""
        return of.chunk(self.group.size)[place].clone()

    def empty(self, *, is_part: bool = False) -> Tensor:
        """A buffer for what is received."""
        return torch.zeros(self.numel // (self.group.size if is_part else 1), device=self.device)


def _broadcast(make: _Buffers) -> Case:
    group = make.group
    buffer = make.whole(0) if group.rank == 0 else make.empty()
    return Case(
        call=lambda: dist.broadcast(buffer, group.ranks[0], group.handle),
        inputs=(),
        output=buffer,
        expected=make.whole(0),
    )


def _reduce(make: _Buffers) -> Case:
    group, buffer = make.group, make.whole(make.group.rank)
    return Case(
        call=lambda: dist.reduce(buffer, group.ranks[0], group=group.handle),
        inputs=(),
        output=buffer,
        expected=make.sum() if group.rank == 0 else None,
    )


def _all_reduce(make: _Buffers) -> Case:
    group, buffer = make.group, make.whole(make.group.rank)
    return Case(
        call=lambda: dist.all_reduce(buffer, group=group.handle),
        inputs=(),
        output=buffer,
        expected=make.sum(),
    )


def _gather(make: _Buffers) -> Case:
    group, is_root = make.group, make.group.rank == 0
    own, output = make.part(group.rank, make.whole(group.rank)), make.empty()
    parts = list(output.chunk(group.size)) if is_root else None
    return Case(
        call=lambda: dist.gather(own, parts, group.ranks[0], group.handle),
        inputs=(own,),
        output=output,
        expected=_collected(make) if is_root else None,
    )


def _scatter(make: _Buffers) -> Case:
    group, is_root = make.group, make.group.rank == 0
    whole, output = make.whole(0), make.empty(is_part=True)
    parts = list(whole.chunk(group.size)) if is_root else None
    return Case(
        call=lambda: dist.scatter(output, parts, group.ranks[0], group.handle),
        inputs=(whole,),
        output=output,
        expected=make.part(group.rank, make.whole(0)),
    )


def _all_gather(make: _Buffers) -> Case:
    group = make.group
    own, output = make.part(group.rank, make.whole(group.rank)), make.empty()
    return Case(
        call=lambda: dist.all_gather_into_tensor(output, own, group.handle),
        inputs=(own,),
        output=output,
        expected=_collected(make),
    )


def _reduce_scatter(make: _Buffers) -> Case:
    group, whole, output = make.group, make.whole(make.group.rank), make.empty(is_part=True)
    return Case(
        call=lambda: dist.reduce_scatter_tensor(output, whole, group=group.handle),
        inputs=(whole,),
        output=output,
        expected=make.part(group.rank, make.sum()),
    )


def _all_to_all(make: _Buffers) -> Case:
    group, whole, output = make.group, make.whole(make.group.rank), make.empty()
    mine = [make.part(group.rank, make.whole(place)) for place in range(group.size)]
    return Case(
        call=lambda: dist.all_to_all_single(output, whole, group=group.handle),
        inputs=(whole,),
        output=output,
        expected=torch.cat(mine),
    )


def _send_recv(make: _Buffers) -> Case:
    group, own, output = make.group, make.whole(make.group.rank), make.empty()
    before = (group.rank - 1) % group.size
    following = group.ranks[(group.rank + 1) % group.size]

    def call() -> None:
        send = dist.P2POp(dist.isend, own, following, group.handle)
        receive = dist.P2POp(dist.irecv, output, group.ranks[before], group.handle)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return Case(call=call, inputs=(own,), output=output, expected=make.whole(before))


def _collected(make: _Buffers) -> Tensor:
    """Every member's part of its own whole buffer, one after the other."""
    return torch.cat([make.part(place, make.whole(place)) for place in range(make.group.size)])


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
