"""Which source of a blend stands at a position of the training, in constant memory."""

from __future__ import annotations

from collections.abc import Sequence

NUM_PARTS = 10_000
"""Positions after which the sources repeat: weights are kept to 1/10,000 of their sum."""


class Blend:
    """Spreads sources evenly: after any number of samples, each has had its share of them to about one.

    >>> blend = Blend([3, 1])
    >>> [blend.at(position) for position in range(5)]
    [(0, 0), (0, 1), (1, 0), (0, 2), (0, 3)]
    >>> blend.num_samples(1, 10**9)
    250000000
    """

    def __init__(self, weights: Sequence[float]) -> None:
        shares = _shares(weights)
        num_parts = 1 if len(weights) == 1 else NUM_PARTS
        taken = [0] * len(weights)
        self._sources, self._numbers = [], []
        for position in range(1, num_parts + 1):
            # As Megatron: the source that is furthest behind its share.
            source = max(range(len(shares)), key=lambda k: shares[k] * position / NUM_PARTS - taken[k])
            self._sources.append(source)
            self._numbers.append(taken[source])
            taken[source] += 1
        self._per_round = taken

    def at(self, position: int) -> tuple[int, int]:
        """The source at a position, and how many samples of it stand before that."""
        round_, index = divmod(position, len(self._sources))
        source = self._sources[index]
        return source, round_ * self._per_round[source] + self._numbers[index]

    def num_samples(self, source: int, num_positions: int) -> int:
        """How many of the first positions a source has."""
        rounds, rest = divmod(num_positions, len(self._sources))
        return rounds * self._per_round[source] + self._sources[:rest].count(source)


def _shares(weights: Sequence[float]) -> list[int]:
    """The weights as parts of `NUM_PARTS`, which they add up to: the largest remainders are rounded up.

    >>> _shares([1, 1, 1])
    [3334, 3333, 3333]
    """
    exact = [weight / sum(weights) * NUM_PARTS for weight in weights]
    shares = [int(part) for part in exact]
    order = sorted(range(len(exact)), key=lambda source: shares[source] - exact[source])
    for source in order[: NUM_PARTS - sum(shares)]:
        shares[source] += 1
    return shares


def smallest_share(weights: Sequence[float]) -> int:
    """Parts of `NUM_PARTS` that the source of the smallest weight gets."""
    return min(_shares(weights))
