"""Keeps the garbage collector out of the work on large schedules."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pauses the cyclic garbage collector; also a decorator.

    A large schedule is a million small tuples and no cycle. The collector would walk all of them
    again and again while they are made, for a third of the whole time. What was made in between then
    counts as old, or the next young collection would walk it, too. Nested pauses are fine.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()
