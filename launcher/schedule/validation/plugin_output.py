"""What a schedule plugin gives, checked to be what the launcher works with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from launcher.base.errors import Fault, PluginError
from launcher.contract.actions import Action, PipelineShape
from launcher.contract.strategy import Schedule

T = TypeVar("T")


def given_faults(schedule: Schedule, shape: PipelineShape) -> tuple[Fault, ...]:
    """The faults that a schedule finds in a shape.

    Raises:
        PluginError: when it gives something else.
    """
    return _all(Fault, schedule.check(shape), f"{_name(schedule)}.check")


def given_actions(schedule: Schedule, shape: PipelineShape) -> list[tuple[Action, ...]]:
    """The compute actions of every pp_rank, as a schedule gives them.

    Raises:
        PluginError: when it gives something else.
    """
    where = f"{_name(schedule)}.actions"
    ranks = range(shape.num_pp_ranks)
    return [_all(Action, schedule.actions(shape, rank), f"{where} of pp_rank {rank}") for rank in ranks]


def _name(schedule: Schedule) -> str:
    return f"{type(schedule).__module__}:{type(schedule).__qualname__}"


def _all(kind: type[T], found: Any, where: str) -> tuple[T, ...]:
    """What was found, when it is any number of one kind.

    >>> _all(Action, "0F0", "mine:Mine.actions of pp_rank 0")
    Traceback (most recent call last):
    launcher.base.errors.PluginError: mine:Mine.actions of pp_rank 0 gave '0', which is no Action
    """
    if not isinstance(found, Iterable):
        raise PluginError(f"{where} gave {found!r}: it has to yield or return each {kind.__name__}, if any")
    items = tuple(found)
    if set(map(type, items)) - {kind}:
        for item in items:
            if not isinstance(item, kind):
                raise PluginError(f"{where} gave {item!r}, which is no {kind.__name__}")
    return items
