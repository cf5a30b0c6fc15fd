"""Warm-up, steady phase and cool-down of one rank's work."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.schedule.actions import Action, B, F, W


def phases(actions: Sequence[Action]) -> tuple[int, int, int]:
    """Compute actions of one rank in warm-up, steady phase and cool-down.

    Warm-up: the forwards before the first forward-backward pair. Cool-down: what stands after the
    last such pair and, where the schedule splits the backward, the W that follows it.

    >>> from launcher.schedule.actions import from_text
    >>> phases(from_text("0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"))
    (2, 4, 2)
    >>> phases(from_text("1F0 1F1 1B0 1F2 1B1 1W0 1B2 1W1 1W2"))
    (1, 5, 3)
    """
    kinds = [kind for _, kind, _ in actions]
    if F not in kinds or B not in kinds:
        return 0, len(kinds), 0
    num_warmup = max(0, kinds.index(B) - 1)
    after_last_forward = kinds[len(kinds) - kinds[::-1].index(F) :]
    num_paired = 2 if after_last_forward[1:2] == [W] else 1
    num_cooldown = max(0, len(after_last_forward) - num_paired)
    return num_warmup, len(kinds) - num_warmup - num_cooldown, num_cooldown
