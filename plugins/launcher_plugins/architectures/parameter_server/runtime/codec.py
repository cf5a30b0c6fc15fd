"""Compression of the gradients that are sent to a server: none, bf16, or the top k alone."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from launcher.runtime.api import DTYPES, RankContext
from launcher_plugins.architectures.parameter_server.config import settings_of


class Cast:
    """All gradients, in one number format."""

    def __init__(self, dtype: torch.dtype, *, is_lossless: bool) -> None:
        """``is_lossless``: it is the gradients' own format, so that error feedback has nothing to add."""
        self._dtype, self.is_lossless = dtype, is_lossless

    def empty(self, numel: int) -> Tensor:
        """A buffer for the packed form of so many gradients."""
        return torch.empty(numel, dtype=self._dtype)

    def pack(self, values: Tensor) -> Tensor:
        """The gradients of a flat tensor, rounded to the nearest; themselves where nothing is lost."""
        return values.to(self._dtype)

    def unpack(self, packed: Tensor, numel: int) -> Tensor:
        """The gradients of a packed form, fp32."""
        return packed.float()


class TopK:
    """The gradients of the largest magnitude, each as a 4-byte index and an fp32 value."""

    is_lossless = False

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def empty(self, numel: int) -> Tensor:
        """A buffer of two rows: indices, and the bits of the values."""
        return torch.empty((2, num_kept(numel, self._fraction)), dtype=torch.int32)

    def pack(self, values: Tensor) -> Tensor:
        """int32 [2, kept]."""
        indices = values.abs().topk(num_kept(values.numel(), self._fraction), sorted=False).indices
        return torch.stack([indices.to(torch.int32), values[indices].float().view(torch.int32)])

    def unpack(self, packed: Tensor, numel: int) -> Tensor:
        """Zero for the gradients that were not sent."""
        values = torch.zeros(numel, device=packed.device)
        values[packed[0].long()] = packed[1].view(torch.float32)
        return values


def num_kept(numel: int, fraction: float) -> int:
    """How many of ``numel`` gradients are sent.

    >>> num_kept(1000, 0.01), num_kept(3, 0.01)
    (10, 1)
    """
    return max(1, ceil(numel * fraction))


Codec = Cast | TopK
"""Packs a flat part of the gradients on a worker, and unpacks it on the server."""


def codec_of(ctx: RankContext) -> Codec:
    """The codec of the run."""
    settings = settings_of(ctx.config)
    if settings.compression == "bf16":
        return Cast(torch.bfloat16, is_lossless=False)
    if settings.compression == "top_k":
        assert settings.top_k_fraction is not None, "the plan rejects top_k without its fraction"
        return TopK(settings.top_k_fraction)
    return Cast(DTYPES[ctx.config.precision.gradients], is_lossless=True)


class ErrorFeedback:
    """Packs gradients, and adds the compression error to those of the next step.

    Source: Karimireddy et al., Error Feedback Fixes SignSGD (2019), algorithm 2.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._errors: dict[tuple[int, int], Tensor] = {}

    def pack(self, values: Tensor, key: tuple[int, int]) -> Tensor:
        """The packed form of the gradients of one key (bucket, server)."""
        if self.codec.is_lossless:
            return self.codec.pack(values)
        wanted = values.float()
        if (error := self._errors.get(key)) is not None:
            wanted = wanted + error
        packed = self.codec.pack(wanted)
        self._errors[key] = wanted - self.codec.unpack(packed, values.numel())
        return packed
