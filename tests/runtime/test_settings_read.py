"""Every setting is read by what plans, starts or trains a run, but for those that the schema declares unread."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.app.planning import make_plan
from launcher.contract.config import LaunchConfig
from launcher.contract.job import JobRequest
from launcher.contract.plan import Plan
from launcher.plan.rules.unread import conditions
from launcher.config.paths import value_at
from launcher.runs.render import executor_of
from launcher.runtime.train.loop import train
from launcher.typed.read import REST, field_types
from tests.helpers.configs import SMALL_RUN
from tests.helpers.contexts import make_context
from tests.helpers.ranks import run_ranks

COPIES = (
    "dataclasses.py",
    "typed/read.py",
    "config/paths.py",
    "/rules.py",
    "_rules.py",
    "/rules/",
    "moved.py",
)
"""Code that reads settings only to copy, compare or check them."""
ELSEWHERE = {
    *("model.name", "data.name", "precision.name", "device.name", "cluster.name", "site.name", "optim.name"),
    *("run.dir", "run.root", "report.baseline", "device.measured_in", "site.is_one_machine", "name"),
}
"""Labels, and what is read before a plan is made or after a run has ended."""


def every_setting(cls: type = LaunchConfig, path: str = "") -> Iterator[tuple[str, type, str]]:
    """Config path, class and name of every setting but the options of plugins."""
    for item in dataclasses.fields(cls):
        kind, inner = field_types(cls)[item.name], f"{path}.{item.name}".lstrip(".")
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from every_setting(kind, inner)
        elif item.metadata != REST:
            yield inner, cls, item.name


CLASSES = {cls for _, cls, _ in every_setting()}


def recorded(work: Any, *args: Any) -> tuple[Any, set[tuple[str, str]]]:
    """What a function returns, and the classes and names of the settings that are read meanwhile."""
    seen: set[tuple[str, str]] = set()

    def get(self: Any, name: str) -> Any:
        if name in type(self).__dataclass_fields__:
            caller = sys._getframe(1).f_code.co_filename
            if not any(part in caller for part in COPIES):
                seen.add((type(self).__name__, name))
        return object.__getattribute__(self, name)

    with pytest.MonkeyPatch.context() as patch:
        for cls in CLASSES:
            patch.setattr(cls, "__getattribute__", get, raising=False)
        return work(*args), seen


def trained(rank: int, plan: Plan, folder: Path) -> set[tuple[str, str]]:
    return recorded(train, make_context(plan, rank), folder)[1]
