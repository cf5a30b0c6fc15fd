"""Random numbers as a function of position: the same under every layout of the ranks.

Initial weights depend on (seed, tensor name, row block), dropout on (seed, step, site, sample,
position, feature). No generator state exists, so a rank makes only its own slice, a recomputed
forward drops the same elements, and a checkpoint needs only the seed and the step.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from launcher.runtime.api import GlobalSlice

ROWS_PER_BLOCK = 64
"""Rows of a tensor that are drawn together: 13 MB of memory at a width of 53,248."""


def init_slice(param: Tensor, where: GlobalSlice, *, seed: int, std: float) -> None:
    """Fills a local slice with its part of the global tensor's normal values; padding with zeros.

    One row block is in memory at a time. The blocks come from NumPy's Philox, keyed with 128 bits:
    torch's CPU generator keeps 32 bits of its seed, so that blocks of a large model would repeat.
    """
    unpadded = where.unpadded_shape(param.shape)
    first, end = where.offset[0], where.offset[0] + unpadded[0]
    columns = tuple(slice(o, o + n) for o, n in zip(where.offset[1:], unpadded[1:], strict=True))
    target = param.detach()
    target.zero_()
    for block in range(first // ROWS_PER_BLOCK, -(-end // ROWS_PER_BLOCK)):
        start = block * ROWS_PER_BLOCK
        low, high = max(first, start), min(end, start + ROWS_PER_BLOCK)
        values = _block(where, block, seed)[(slice(low - start, high - start), *columns)]
        local = (slice(low - first, high - first), *(slice(0, n) for n in unpadded[1:]))
        target[local] = torch.from_numpy(values * np.float32(std)).to(target)


def _block(where: GlobalSlice, block: int, seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """A whole row block; rows beyond the tensor's last are drawn too, so that its size never matters."""
    shape = (ROWS_PER_BLOCK, *where.shape[1:])
    return philox_generator(f"{seed}/{where.name}/{block}").standard_normal(shape, dtype=np.float32)


def philox_generator(key: str) -> np.random.Generator:
    """NumPy's Philox, keyed with a 128-bit hash of ``key``."""
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def dropout(x: Tensor, p: float, seeds: Tensor) -> Tensor:
    """Zeroes each element with probability ``p`` and scales the others by 1 / (1 - p).

    Shapes: ``x`` [batch, seq(local), features]; ``seeds`` from `token_seeds`, of the same part.
    """
    keep = _uniform31(seeds, x.shape[-1]) >= round(p * 2**31)
    return torch.where(keep, x * (1 / (1 - p)), 0)


def token_seeds(samples: Tensor, positions: slice, *, seed: int, step: int, site: int) -> Tensor:
    """A 64-bit seed for each token, from which `dropout` derives a number for each element.

    Shapes: ``samples`` int64 [batch], the sample's slot in the step's global batch; ``positions``: this
    rank's part of the sequence. Returns int64 [batch, seq(local)]. ``site``: index of the dropout in the
    model, the same under every layout.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{site}".encode(), digest_size=8).digest()
    scalar_key = int.from_bytes(digest, "little", signed=True)
    indices = torch.arange(positions.start, positions.stop, device=samples.device)
    return _mix64((samples[:, None] << 32 | indices) ^ scalar_key)


def _uniform31(seeds: Tensor, num_features: int) -> Tensor:
    """A number of 31 bits for each feature of each token, by a hash of its global position.

    For each token, a 32-bit hash of the feature is mixed with both halves of the seed. int32 arithmetic
    wraps in the same way on every device.
    """
    seeds = seeds[:, :, None]
    low, high = _low32(seeds), _low32(seeds >> 32)
    columns = _mix32(torch.arange(1, num_features + 1, device=seeds.device, dtype=torch.int32))
    return _mix32((columns ^ low).add_(high)).bitwise_and_(0x7FFFFFFF)


def _mix64(x: Tensor) -> Tensor:
    """A bijection of int64 in which every input bit changes half of the output bits.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), variant 13 of Stafford.
    """
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ (x >> 31 & (1 << 33) - 1)


def _mix32(x: Tensor) -> Tensor:
    """As `_mix64`, for int32, in place. The mask makes torch's arithmetic shift a logical one.

    Source: the hash "lowbias32" of C. Wellons, Prospecting for Hash Functions (2018).
    """
    x ^= x >> 16 & 0xFFFF
    x *= 0x7FEB352D
    x ^= x >> 15 & 0x1FFFF
    x *= 0x846CA68B - (1 << 32)
    x ^= x >> 16 & 0xFFFF
    return x


def _low32(x: Tensor) -> Tensor:
    """The low 32 bits of an int64, as an int32."""
    return ((x & 0xFFFFFFFF) - (1 << 31)).to(torch.int32)
