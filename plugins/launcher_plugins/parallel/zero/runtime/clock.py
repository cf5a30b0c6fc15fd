"""DeepSpeed's own messages on the rank's clock: without it they would count as compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launcher.runtime.api import RankContext

_COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")
"""What ZeRO sends with, by the names of DeepSpeed's communication backend."""


def time_messages(backend: Any, kinds: dict[Any, str], ctx: RankContext) -> None:
    """Times every collective of a backend whose group is in ``kinds``, as that kind."""
    for name in _COLLECTIVES:
        setattr(backend, name, _timed(getattr(backend, name), kinds, ctx))


def _timed(send: Callable[..., Any], kinds: dict[Any, str], ctx: RankContext) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        kind = kinds.get(kwargs.get("group"))
        if kind is None:
            return send(*args, **kwargs)
        with ctx.clock.section(kind):
            handle = send(*args, **kwargs)
        return _TimedHandle(handle, kind, ctx) if kwargs.get("async_op") else handle

    return timed


class _TimedHandle:
    """A message under way, waited for on the clock."""

    def __init__(self, handle: Any, kind: str, ctx: RankContext) -> None:
        self._handle, self._kind, self._ctx = handle, kind, ctx

    def wait(self, *args: Any) -> Any:
        """Returns when the tensor may be used."""
        with self._ctx.clock.section(self._kind):
            return self._handle.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)
