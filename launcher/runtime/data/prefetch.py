"""Prepares items in a background thread, ahead of their use."""

from __future__ import annotations

import threading
from collections.abc import Generator
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """An iterator over ``source`` that prepares up to ``num_ahead`` items ahead.

    An error of the source is raised from `__next__`, after the items before it.
    """

    def __init__(self, source: Generator[T, None, None], num_ahead: int) -> None:
        assert num_ahead > 0, "without items ahead, iterate the source itself"
        self._source = source
        self._room = threading.Semaphore(num_ahead)
        self._ready: SimpleQueue[T | _End] = SimpleQueue()
        self._end: _End | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        if self._end is None:
            item = self._ready.get()
            if not isinstance(item, _End):
                self._room.release()
                return item
            self._end = item
        raise self._end.error or StopIteration

    def close(self) -> None:
        """Ends the thread, after its current item, and closes the source."""
        self._is_closed = True
        self._room.release()
        self._thread.join()
        self._source.close()
        self._end = self._end or _End(None)

    def _fill(self) -> None:
        error: BaseException | None = None
        try:
            while self._room.acquire() and not self._is_closed:
                self._ready.put(next(self._source))
        except StopIteration:
            pass
        except BaseException as raised:  # of any kind: the consumer has to see it
            error = raised
        self._ready.put(_End(error))


class _End:
    """The last item; ``error``: why the source ended, None at its normal end."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error
