"""Small number theory behind "the nearest valid choice", and what a ring of ranks sends."""

from __future__ import annotations

from collections.abc import Iterable


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def nearest_first(wanted: int, choices: Iterable[int]) -> list[int]:
    """The choices by their distance from ``wanted``; of two equally close the larger first.

    >>> nearest_first(3, (1, 2, 4, 8))
    [4, 2, 1, 8]
    """
    return sorted(choices, key=lambda choice: (abs(choice - wanted), -choice))


def multiples_around(wanted: int, unit: int) -> tuple[int, ...]:
    """The positive multiples of ``unit`` next below and above a number that is not one.

    >>> multiples_around(256, 14), multiples_around(5, 14)
    ((252, 266), (14,))
    """
    below = wanted // unit * unit
    return (below, below + unit) if below else (unit,)


def listed(numbers: Iterable[int], separator: str = ", ") -> str:
    """Numbers as text, the middle left out of more than 16 when they are for reading.

    >>> listed((1, 2, 4))
    '1, 2, 4'
    """
    words = [str(number) for number in numbers]
    if separator == ", " and len(words) > 16:
        words = [*words[:8], "...", *words[-4:]]
    return separator.join(words)


def weighted_median(values: Iterable[tuple[float, int]]) -> float:
    """The median of numbers of which each stands for so many, its weight.

    >>> weighted_median([(1.0, 1), (2.0, 1), (4.0, 1), (8.0, 1)]), weighted_median([(1.0, 1), (2.0, 10)])
    (3.0, 2.0)
    """
    ordered = sorted(values)
    total, seen, low = sum(weight for _, weight in ordered), 0, None
    for value, weight in ordered:
        seen += weight
        if low is None and 2 * seen >= total:
            low = value
        if low is not None and 2 * seen > total:
            return (low + value) / 2
    raise ValueError("the median of nothing")


def ring_share(operation: str, num_ranks: int) -> float:
    """The part of an operation's buffer that each rank of a ring of n sends, and every link has to carry.

        operation                                    share        steps that follow one another
        all_reduce                                   2 (n-1)/n    2 (n-1)
        all_gather, reduce_scatter, all_to_all         (n-1)/n      n-1
        gather, scatter                                (n-1)/n      n-1
        broadcast, reduce                            1              n-1
        send_recv, push, pull                        1            1

    Source: PERFORMANCE.md of nccl-tests.

    >>> ring_share("all_reduce", 4), ring_share("all_gather", 4), ring_share("reduce", 4)
    (1.5, 0.75, 1.0)
    """
    if num_ranks == 1:
        return 0.0
    if operation in ("broadcast", "reduce", "send_recv", "push", "pull"):
        return 1.0
    others = (num_ranks - 1) / num_ranks
    return 2 * others if operation == "all_reduce" else others


def ring_steps(operation: str, num_ranks: int) -> int:
    """Messages between neighbours that follow one another when an operation goes round a ring.

    >>> ring_steps("all_reduce", 4), ring_steps("gather", 4), ring_steps("send_recv", 4)
    (6, 3, 1)
    """
    if num_ranks == 1:
        return 0
    one = dict.fromkeys(("send_recv", "push", "pull"), 1)
    return {"all_reduce": 2 * (num_ranks - 1), **one}.get(operation, num_ranks - 1)
