"""Which sample stands at a position of the training: a new permutation of the samples for every epoch.

Position t * global_size + s is slot s of step t, whatever the layout; a step may span two epochs.

A permutation of 10^10 samples as a table takes 80 GB, on every rank. Here each number of it is computed
on its own, from the seed, the epoch and the index, by a Feistel network on pairs:

    index = left * width + right        left < height, right < width, num_samples <= height * width

    left  += mix(right, key 0)  mod height
    right += mix(left,  key 1)  mod width           each line can be undone, so all of them together are
    left  += mix(right, key 2)  mod height          a permutation of the height * width pairs
    ...

A pair beyond the last sample goes through the network again until it lands on a sample ("cycle
walking"), which is a permutation of the samples alone. Fewer than one pair in height lies beyond it.

Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (CT-RSA 2002), methods 2 and 3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from math import isqrt
from typing import Protocol

from launcher.contract.data.blend import Blend
from launcher.runtime.api import NEWEST_ORDER
from launcher.runtime.data.own_data import Pick
from launcher.runtime.model.randomness import philox_generator

_NUM_ROUNDS = 8
_LOW_64_BITS = (1 << 64) - 1


class SampleOrder:
    """The sample at every position of a training."""

    def __init__(self, num_samples: int, seed: int | str, version: int = NEWEST_ORDER) -> None:
        """``version``: 1, a table that is shuffled, as trainings took it that began before version 2."""
        self._num_samples = num_samples
        make = {1: _shuffled_table, 2: Permutation}[version]
        self._permutation: Callable[[int], _Indexed] = lru_cache(maxsize=2)(
            lambda epoch: make(num_samples, f"{seed}/order/{epoch}")
        )

    def pick(self, position: int) -> Pick:
        """The sample at a position."""
        epoch, index = divmod(position, self._num_samples)
        return epoch, int(self._permutation(epoch)[index])


class BlendOrder:
    """The sample at every position of a training on several sources, each in an order of its own, in which an
    epoch of one begins where its last has ended. Samples are numbered one source after the other."""

    def __init__(self, sizes: Sequence[int], blend: Blend, seed: int, version: int = NEWEST_ORDER) -> None:
        """``sizes``: samples of each source. ``version``: as of `SampleOrder`."""
        self._blend = blend
        self._firsts = [0, *accumulate(sizes)]
        self._orders = [SampleOrder(size, f"{seed}/{source}", version) for source, size in enumerate(sizes)]

    def pick(self, position: int) -> Pick:
        """The sample at a position."""
        source, number = self._blend.at(position)
        epoch, index = self._orders[source].pick(number)
        return epoch, self._firsts[source] + index


class _Indexed(Protocol):
    def __getitem__(self, index: int) -> int: ...


class Permutation:
    """A permutation of ``range(size)`` in constant memory, the same for the same ``key``."""

    def __init__(self, size: int, key: str) -> None:
        self._size = size
        self._height = isqrt(size - 1) + 1
        self._width = -(-size // self._height)
        digests = (
            hashlib.blake2b(f"{key}/{number}".encode(), digest_size=8).digest()
            for number in range(_NUM_ROUNDS)
        )
        self._keys = [int.from_bytes(digest, "little") for digest in digests]

    def __getitem__(self, index: int) -> int:
        """Where an index goes."""
        if not 0 <= index < self._size:
            raise IndexError(f"{index} is not in range({self._size})")
        index = self._pass(index)
        while index >= self._size:
            index = self._pass(index)
        return index

    def _pass(self, index: int) -> int:
        height, width = self._height, self._width
        left, right = divmod(index, width)
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                left = (left + _mix(right ^ key)) % height
            else:
                right = (right + _mix(left ^ key)) % width
        return left * width + right


def _shuffled_table(size: int, key: str) -> _Indexed:
    table: _Indexed = philox_generator(key).permutation(size)
    return table


def _mix(x: int) -> int:
    """A bijection of the 64-bit integers in which every input bit changes half of the output bits.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), variant 13 of Stafford.
    """
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _LOW_64_BITS
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _LOW_64_BITS
    return x ^ x >> 31
