"""Every setting is read by what plans, starts or trains a run, but for those declared to be unread."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.app.planning import make_plan
from launcher.config.paths import value_at
from launcher.contract.config import LaunchConfig
from launcher.contract.plan import Plan
from launcher.plan.rules.unread import conditions
from launcher.runs.render import render
from launcher.runtime.process.rank import make_context
from launcher.runtime.train.loop import train
from launcher.typed.read import REST, field_types
from tests.helpers.configs import SMALL_RUN
from tests.helpers.contexts import CPU
from tests.helpers.ranks import run_ranks

COPIES = ("dataclasses.py", "typed/read.py", "config/paths.py", "rules.py", "rules/checks.py", "/unread.py")
"""Code that reads settings only to copy, compare or check them."""
ELSEWHERE = {
    *("name", "model.name", "data.name", "precision.name", "device.name", "cluster.name", "site.name"),
    *("optim.name", "data.tokenizer", "run.dir", "run.root", "run.timeout_s", "run.start_timeout_s"),
    *("report.baseline", "report.warmup_steps", "device.measured_in", "site.is_one_machine"),
    *("model.options", "data.options", "site.container_mounts", "device.memory_check"),
}
"""Labels; what has one value; what is read before a plan is made, by the process around the training, by the
report, or where a rank does not fit; and what a rule refuses without the setting that it belongs to."""


def every_setting(cls: type = LaunchConfig, path: str = "") -> Iterator[tuple[str, type, str]]:
    """Config path, class and name of every setting but the options of plugins."""
    for item in dataclasses.fields(cls):
        kind, inner = field_types(cls)[item.name], f"{path}.{item.name}".lstrip(".")
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from every_setting(kind, inner)
        elif item.metadata != REST:
            yield inner, cls, item.name


CLASSES = {cls for _, cls, _ in every_setting()}


def recorded(work: Any, *args: Any, **more: Any) -> tuple[Any, set[tuple[str, str]]]:
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
        return work(*args, **more), seen


def planned(folder: Path, *words: str) -> tuple[Plan, set[tuple[str, str]]]:
    """A plan with its script, and the settings that were read for both."""
    text = folder / "text.txt"
    text.write_text("all work and no play " * 400)
    small = (word for word in SMALL_RUN if not word.startswith("train."))
    run = ["data=text", f"data.source={text}", f"data.cache_dir={folder}", *small, *words]
    plan, seen = recorded(lambda: make_plan("quickstart", run).plan)
    _, more = recorded(render, plan, folder)
    return plan, seen | more


def trained(rank: int, plan: Plan, folder: Path) -> set[tuple[str, str]]:
    """The settings that were read as a rank trained."""
    return recorded(train, make_context(plan.rank(rank), CPU), folder, resume=False)[1]


def unread(folder: Path, *words: str) -> tuple[set[str], set[str]]:
    """The settings that neither a run on one rank nor a job on two nodes reads; and those of the run that
    are declared."""
    plan, seen = planned(folder, "parallel.pp=1", "train.num_steps=3", "optim.warmup_steps=1", *words)
    (folder / "metrics").mkdir()
    _, of_job = planned(
        folder, "executor=slurm", "parallel.pp=2", "cluster.nodes=2", "cluster.devices_per_node=1"
    )
    seen |= of_job | run_ranks(1, trained, plan, folder)[0]
    declared = {path for path, condition in conditions(LaunchConfig)
                if not condition.holds(value_at(plan.config, condition.path))}  # fmt: skip
    return {path for path, cls, name in every_setting() if (cls.__name__, name) not in seen}, declared


@pytest.mark.parametrize(
    "words",
    [
        ("train.eval_batches=1", "train.checkpoint_interval=2"),
        ("train.eval_batches=0", "optim.decay=constant"),
        ("train.eval_batches=0", "model.family=llama"),
    ],
)
def test_what_a_run_does_not_read_is_declared(tmp_path: Path, words: tuple[str, ...]) -> None:
    found, declared = unread(tmp_path, *words)
    assert found - ELSEWHERE <= declared


def test_a_setting_that_nothing_reads_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recording sees what is not read: without its declaration, the base of rotary frequencies."""
    monkeypatch.setattr("launcher.plan.rules.unread.condition_of", lambda item: None)
    found, declared = unread(tmp_path, "train.eval_batches=0")
    assert found - ELSEWHERE - declared >= {
        "model.rope_theta",
        "train.keep_checkpoints",
        "train.eval_interval",
    }
