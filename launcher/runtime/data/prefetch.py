"""Prepares items in a background thread, ahead of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """An iterator over ``source`` that prepares up to ``num_ahead`` items ahead.

    An error of the source is raised from `__next__`, after the items before it.
    """

    def __init__(self, source: Generator[T, None, None], num_ahead: int) -> None:
        assert num_ahead > 0, "without items ahead, iterate the source itself"
        self._source = source
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ahead: deque[Future[T]] = deque(self._thread.submit(next, source) for _ in range(num_ahead))

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        if not self._ahead:
            raise StopIteration
        item = self._ahead[0].result()  # an error stays the first, to be raised again
        self._ahead.popleft()
        self._ahead.append(self._thread.submit(next, self._source))
        return item

    def close(self) -> None:
        """Ends the thread, after its current item, and closes the source."""
        self._thread.shutdown(cancel_futures=True)
        self._ahead.clear()
        self._source.close()
