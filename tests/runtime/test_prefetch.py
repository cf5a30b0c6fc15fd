"""Items are made ahead of their use, in a thread that ends when it is told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator

import pytest

from launcher.runtime.data.prefetch import Prefetcher
from tests.helpers.waiting import wait_until


def counting(made: list[int], end: int = 100) -> Generator[int, None, None]:
    for number in range(end):
        made.append(number)
        yield number


def test_items_come_in_order_and_end() -> None:
    assert list(Prefetcher(counting([], 5), 2)) == [0, 1, 2, 3, 4]


def test_no_more_than_the_given_number_is_made_ahead() -> None:
    made: list[int] = []
    ahead = Prefetcher(counting(made), 3)
    wait_until(lambda: len(made) == 3)
    time.sleep(0.02)
    assert len(made) == 3
    next(ahead)
    wait_until(lambda: len(made) == 4)
    time.sleep(0.02)
    assert len(made) == 4
    ahead.close()


def test_the_next_item_is_made_while_the_one_before_is_in_use() -> None:
    made: list[int] = []
    ahead = Prefetcher(counting(made), 1)
    used: list[int] = []
    while len(used) < 8:
        used.append(next(ahead))
        wait_until(lambda: len(made) == len(used) + 1)
    assert used == list(range(8))
    ahead.close()


def test_an_error_comes_after_the_items_before_it_and_again_on_every_call() -> None:
    def broken() -> Generator[int, None, None]:
        yield 1
        raise ValueError("the source broke")

    ahead = Prefetcher(broken(), 4)
    assert next(ahead) == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="the source broke"):
            next(ahead)


def test_the_error_shows_where_the_source_raised_it() -> None:
    def broken() -> Generator[int, None, None]:
        raise ValueError("here")
        yield 1

    with pytest.raises(ValueError, match="here") as caught:
        next(Prefetcher(broken(), 1))
    assert any(entry.name == "broken" for entry in caught.traceback)


def test_closing_ends_the_thread_and_the_source() -> None:
    closed = []

    def source() -> Generator[int, None, None]:
        try:
            while True:
                yield 1
        finally:
            closed.append(True)

    before = threading.active_count()
    ahead = Prefetcher(source(), 2)
    next(ahead)
    ahead.close()
    assert threading.active_count() == before
    assert closed == [True]
    ahead.close()
