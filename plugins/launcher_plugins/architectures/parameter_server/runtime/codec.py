"""How gradients are packed for the way to a server: whole, rounded, or the largest alone."""

from __future__ import annotations

from math import ceil
from typing import Protocol

import torch
from torch import Tensor

from launcher.runtime.api import DTYPES, RankContext
from launcher_plugins.architectures.parameter_server.config import settings_of


class Codec(Protocol):
    """Packs a flat part of the gradients, and takes it out again on the other side."""

    is_whole: bool
    """Whether nothing is lost, so that there is nothing to add to the next step's."""

    def empty(self, numel: int) -> Tensor:
        """A buffer for the packed form of so many gradients."""
        ...

    def pack(self, values: Tensor) -> Tensor:
        """The packed form; it may share the memory of ``values``."""
        ...

    def unpack(self, packed: Tensor, numel: int) -> Tensor:
        """The gradients that a packed form stands for, fp32."""
        ...


class Whole:
    """The gradients as they are."""

    is_whole = True

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def empty(self, numel: int) -> Tensor:
        """A buffer for so many gradients."""
        return torch.empty(numel, dtype=self._dtype)

    def pack(self, values: Tensor) -> Tensor:
        """They themselves."""
        return values

    def unpack(self, packed: Tensor, numel: int) -> Tensor:
        """They themselves in fp32."""
        return packed.float()


class Rounded(Whole):
    """Gradients in bf16."""

    is_whole = False

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)

    def pack(self, values: Tensor) -> Tensor:
        """Rounded to the nearest."""
        return values.to(torch.bfloat16)


class Largest:
    """The gradients of the largest magnitude, each as a 4-byte index and an fp32 value."""

    is_whole = False

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def empty(self, numel: int) -> Tensor:
        """A buffer of two rows: indices, and values by their bits."""
        return torch.empty((2, num_kept(numel, self._fraction)), dtype=torch.int32)

    def pack(self, values: Tensor) -> Tensor:
        """int32 [2, kept]."""
        indices = values.abs().topk(num_kept(values.numel(), self._fraction), sorted=False).indices
        return torch.stack([indices.to(torch.int32), values[indices].float().view(torch.int32)])

    def unpack(self, packed: Tensor, numel: int) -> Tensor:
        """Zero wherever nothing was sent."""
        values = torch.zeros(numel, device=packed.device)
        values[packed[0].long()] = packed[1].view(torch.float32)
        return values


def num_kept(numel: int, fraction: float) -> int:
    """How many of some gradients are sent.

    >>> num_kept(1000, 0.01), num_kept(3, 0.01)
    (10, 1)
    """
    return max(1, ceil(numel * fraction))


def codec_of(ctx: RankContext) -> Codec:
    """The codec that the run is set to."""
    settings = settings_of(ctx.config)
    if settings.compression == "bf16":
        return Rounded()
    if settings.compression == "top_k":
        assert settings.top_k_fraction is not None, "the plan refuses top_k without its fraction"
        return Largest(settings.top_k_fraction)
    return Whole(DTYPES[ctx.config.precision.gradients])


class Feedback:
    """Packs gradients, and adds what a packed form left out to the next step's.

    Source: Karimireddy et al., Error Feedback Fixes SignSGD (2019), algorithm 2.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._left_out: dict[tuple[int, int], Tensor] = {}

    def pack(self, values: Tensor, place: tuple[int, int]) -> Tensor:
        """The packed form of the gradients of one place (bucket, server)."""
        if self.codec.is_whole:
            return self.codec.pack(values)
        wanted = values.float()
        if (before := self._left_out.get(place)) is not None:
            wanted = wanted + before
        packed = self.codec.pack(wanted)
        self._left_out[place] = wanted - self.codec.unpack(packed, values.numel())
        return packed
