"""Follows what faults advise, as their reader would, and notes which places of the code have made one.

`watch` is called before any test is imported: every plan that a test is refused is planned again under each
way out that its faults offer. `unreached_places` are those that make a fault and that no test has reached.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.app.request import Request
from launcher.base import registry
from launcher.base.errors import LEFT_OUT, ConfigError, Fault, as_override
from launcher.contract.executor import Executor

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("launcher", "plugins/launcher_plugins")
NOTES = "TRIREME_TEST_FAULT_PLACES"
"""The variable with the file into which every process of the tests writes the places that made a fault."""
_MOST_ALIKE = 12
"""Refusals by one rule, each of another value, that one process follows: a further one is the same code with
other numbers."""
_NUMBER = re.compile(r"[\d.]+")
_OVERRIDE = re.compile(r"(?<![\w.~])[a-z_]+(\.\w+)*=[\"'\[{]?[a-z0-9](?!\S*\|)")
_COMMAND = re.compile(r"trireme (run|submit) .*")
"""A whole command to type."""

Plan = Callable[..., Any]


def watch() -> None:
    """Notes every place that makes a fault, and follows the advice of every plan that is refused."""
    from launcher.app import launch, planning  # not where this is imported: it takes a while

    _note_places()
    starting: Any = launch
    done: Counter[Any] = Counter()
    starting.make_plan = _following(planning.make_plan, done)
    vars(planning)["make_plan"] = starting.make_plan
    from launcher.app.sweep import planning as sweeping  # takes the one that is followed

    vars(sweeping)["plan_sweep"] = _following_sweep(sweeping, done)
    from launcher.plan import build as building  # what tests call themselves; make_plan has its own

    vars(building)["build"] = _following_build(building.build)
    starting.launch = _following_start(launch.launch, is_here=True)
    starting.submit = _following_start(launch.submit, is_here=False)
    for name in registry.own_plugins(Executor.entry_group):
        executor: Any = type(registry.load(Executor, name))
        executor.check = following_check(executor.check)


def followed(overrides: Sequence[str], way: Mapping[str, Any]) -> tuple[str, ...]:
    """The overrides of a command after a way out: what it sets replaces what was typed for it.

    >>> followed(["parallel.typo=2", "seed=1"], {"parallel.typo": LEFT_OUT, "parallel.pp": 2})
    ('seed=1', 'parallel.pp=2')
    """
    words = list(overrides)
    for path, value in way.items():
        kept = [word for word in words if not f"{_key_of(word)}.".startswith(f"{path}.")]
        if value != LEFT_OUT or kept == words:
            kept += shlex.split(as_override(path, value))
        words = kept
    return tuple(words)


def check(error: ConfigError, plan: Plan, recipe: str, overrides: Sequence[str], done: Counter[Any]) -> None:
    """Follows each way of each fault, and the first ways of all faults together.

    Raises:
        AssertionError: when a fault is still there, another one contradicts, or there is no plan in the end.
    """
    for fault in error.faults:
        for way in fault.ways if _is_new(fault, done) else ():
            words = followed(overrides, way)
            left = refused(plan, recipe, words)
            told = f"{fault}\n  followed: {shlex.join(words)}\n  " + "\n  ".join(map(str, left))
            assert fault.path not in {other.path for other in left}, f"the fault is not gone: {told}"
            assert not way.keys() & {other.path for other in left}, f"what was advised is refused: {told}"
    together = dict(error.together)
    if not together and len(error.faults) > 1 and all(fault.ways for fault in error.faults):
        for fault in error.faults:
            together |= fault.ways[0]
    if together:
        words = followed(overrides, together)
        left = refused(plan, recipe, words)
        told = f"{error}\n  followed: {shlex.join(words)}\n  " + "\n  ".join(map(str, left))
        assert not left, f"the advice does not go together: {told}"


def _is_new(fault: Fault, done: Counter[Any]) -> bool:
    """Whether a fault is to be followed: its rule has not refused this value, nor many of this setting."""
    rule = (fault.path, tuple(map(tuple, fault.ways)), _NUMBER.sub("", fault.allowed))
    done[value := (*rule, str(fault.given))] += 1
    done[rule] += done[value] == 1
    return done[value] == 1 and done[rule] <= _MOST_ALIKE


def _key_of(word: str) -> str:
    return word.lstrip("+~\\").partition("=")[0]


def refused(plan: Plan, recipe: str, overrides: Sequence[str]) -> tuple[Fault, ...]:
    """The faults of a plan; none where it is planned."""
    try:
        plan(recipe, overrides)
    except ConfigError as error:
        return error.faults
    return ()


def places() -> Iterator[str]:
    """Every place of the code that makes a fault, as ``FILE:LINE``."""
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and _makes_a_fault(node.func):
                yield f"{path.relative_to(ROOT)}:{node.lineno}"


def _makes_a_fault(function: ast.expr) -> bool:
    name = getattr(function, "id", None)
    return name in ("Fault", "left_out", "retyped") or getattr(function, "attr", None) in ("fault", "retyped")


def _note_places() -> None:
    known: set[tuple[str, int]] = set()
    make = Fault.__init__

    @functools.wraps(make)
    def noted(self: Fault, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        frame = sys._getframe(1)
        if "/tests/" not in frame.f_code.co_filename:
            text = _COMMAND.sub("", self.fix)
            assert not _OVERRIDE.search(text) or self.ways, f"tells what is not in its ways: {self}"
        for caller in (frame, frame.f_back, frame.f_back and frame.f_back.f_back):
            if caller is not None and (place := (caller.f_code.co_filename, caller.f_lineno)) not in known:
                known.add(place)
                if path := os.environ.get(NOTES):
                    with open(path, "a") as file:
                        file.write(f"{os.path.relpath(place[0], ROOT)}:{place[1]}\n")

    made: Any = Fault
    made.__init__ = noted


def unreached_places() -> list[str]:
    """Those that no process has noted."""
    notes = Path(os.environ[NOTES])
    return sorted(set(places()) - set(notes.read_text().split() if notes.exists() else ()))


def _following(plan: Plan, done: Counter[Any]) -> Plan:
    @functools.wraps(plan)
    def make_plan(recipe: str, overrides: Sequence[str], *others: Any, **named: Any) -> Any:
        try:
            return plan(recipe, overrides, *others, **named)
        except ConfigError as error:
            check(error, plan, recipe, overrides, done)
            vars(error)["is_followed"] = True
            raise

    return make_plan


def _following_build(build: Callable[..., Any]) -> Callable[..., Any]:
    """Planning a configuration, whose ways are followed where they are settings."""
    from launcher.config.paths import changed

    done: Counter[Any] = Counter()

    def left(config: Any, way: Mapping[str, Any], *args: Any, **kwargs: Any) -> set[str]:
        """Paths that are refused under a way out."""
        try:
            new = changed(config, way)
            if new.model.family != "custom" or "inputs" in kwargs:  # else its shape is not known
                build(new, *args, **kwargs)
        except KeyError:  # a whole file of a group, which only a recipe can choose
            pass
        except ConfigError as error:
            return {fault.path for fault in error.faults}
        return set()

    @functools.wraps(build)
    def built(config: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return build(config, *args, **kwargs)
        except ConfigError as error:
            for fault in error.faults:
                for way in fault.ways if _is_new(fault, done) else ():
                    own = {fault.path, *(way if len(error.faults) == 1 else ())}
                    paths = left(config, way, *args, **kwargs) & own
                    assert not paths, f"{fault}\n  followed: {way}, refused: {paths}"
            raise

    return built


def _following_sweep(sweeping: Any, done: Counter[Any]) -> Callable[..., Any]:
    """Planning a sweep: what is wrong with its words, and with the start of each point."""
    plan_sweep = sweeping.plan_sweep

    @functools.wraps(plan_sweep)
    def planned(given: Request, *, starts: bool = False) -> Any:
        def try_sweep(recipe: str, words: Sequence[str]) -> None:
            plan_sweep(replace(given, recipe=recipe, overrides=tuple(words)), starts=starts)

        def try_point(recipe: str, words: Sequence[str]) -> None:
            made = sweeping.make_plan(recipe, words)
            sweeping.refuse(sweeping._faults(made.plan, starts=starts), made.composed.sources)

        try:
            found = plan_sweep(given, starts=starts)
        except ConfigError as error:
            check(error, try_sweep, given.recipe, given.overrides, done)
            raise
        for point in found.refused:
            check(ConfigError(point.faults), try_point, given.recipe, point.overrides, done)
        return found

    return planned


def _following_start(start: Callable[..., Any], *, is_here: bool) -> Callable[..., Any]:
    from launcher.app import launch as of_launch

    launch: Any = of_launch
    done: Counter[Any] = Counter()

    @functools.wraps(start)
    def started(given: Request, *args: Any, **kwargs: Any) -> Any:
        def try_start(recipe: str, words: Sequence[str]) -> None:
            again = replace(given, recipe=recipe, overrides=tuple(words))
            asked = again if is_here else launch.with_executor(again)
            planned = launch.make_plan(asked.recipe, asked.overrides)
            run = launch.prepared(planned.plan, resume=given.resume)
            launch.refuse(launch.start_faults(run, is_here=is_here), planned.composed.sources)

        try:
            return start(given, *args, **kwargs)
        except ConfigError as error:
            if not hasattr(error, "is_followed"):
                check(error, try_start, given.recipe, given.overrides, done)
            raise

    return started


def following_check(check_plan: Callable[..., Iterable[Fault]]) -> Callable[..., Iterable[Fault]]:
    """What an executor finds wrong with a plan, followed in the configuration of the plan."""
    from launcher.config.paths import changed
    from launcher.plan.build import build

    done: Counter[Any] = Counter()
    following: list[Fault] = []  # planning asks the executor, too

    @functools.wraps(check_plan)
    def checked(self: Any, plan: Any, run_dir: str | None = None) -> Iterable[Fault]:
        faults = tuple(check_plan(self, plan, run_dir))
        for fault in () if following or plan.config.model.target or plan.config.data.target else faults:
            following.append(fault)
            try:
                for way in fault.ways if _is_new(fault, done) else ():
                    try:
                        left = tuple(check_plan(self, build(changed(plan.config, way)), run_dir))
                    except ConfigError as error:
                        left = error.faults
                    paths = {other.path for other in left} & {fault.path, *way}
                    assert not paths, f"{fault}\n  followed: {way}, refused: {paths}"
            finally:
                following.clear()
        return faults

    return checked
