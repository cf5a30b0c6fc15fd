"""Searches for ways out of a strategy that cannot run: changes that every rule accepts. Holds no rule itself.

A rule knows what would satisfy itself (`Fault.ways`) and no other rule: a pp that divides the layers
may not fill the devices. So every proposal is tried on the whole configuration, and one that another
rule refuses is joined with what that rule proposes:

    parallel.pp=4 -> the world has 32 ranks, the cluster 8 devices -> cluster.nodes=4
    offered: parallel.pp=4 cluster.nodes=4
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

from launcher.base.errors import Fault, LauncherError
from launcher.config.paths import changed, value_at
from launcher.contract.config import LaunchConfig

Way = Mapping[str, Any]
"""Values by config path, set together."""
Validate = Callable[[LaunchConfig], Sequence[Fault]]
"""Every rule at once: the faults of a configuration, each with its ways. A `LauncherError` says that it
cannot tell, and the way is not offered."""

MAX_OFFERS = 4
"""Ways that one fault shows."""
MAX_SETTINGS = 3
"""Settings that one way changes."""
_ENOUGH = 2
"""Ways that change one setting; where there are as many, no joins are looked for."""
_MAX_ALIKE = 2
"""Ways that one fault shows which change the same settings."""
_MAX_TRIALS = 200
"""Configurations that are judged for one refusal; more would keep its reader waiting."""


def with_fixes(
    config: LaunchConfig, faults: Iterable[Fault], validate: Validate, last_validate: Validate
) -> tuple[Fault, ...]:
    """The faults, each with those of its ways and their joins that make it disappear and bring no other.

    ``validate`` is asked about everything that is tried; ``last_validate``, which may take its time, about
    what ``validate`` finds nothing wrong with.
    """
    search = _Search(config=config, before=tuple(faults), validate=validate, last_validate=last_validate)
    return tuple(search.resolved(fault) if fault.ways and not fault.fix else fault for fault in search.before)


def together(
    config: LaunchConfig, faults: Sequence[Fault], validate: Validate, last_validate: Validate
) -> Way:
    """One way out of several faults: the first of them is mended, then what is left of the others.

    Empty where there is none, or only one fault.
    """
    way: dict[str, Any] = {}
    for _ in faults if len(faults) > 1 else ():
        fault = faults[0]
        if not fault.fix:
            search = _Search(
                config=config, before=tuple(faults), validate=validate, last_validate=last_validate
            )
            fault = search.resolved(fault)
        # Another file of a group is read before there is a configuration to change.
        if not fault.ways or any(is_dataclass(value_at(config, path)) for path in fault.ways[0]):
            return {}
        way |= fault.ways[0]
        config = changed(config, fault.ways[0])
        try:
            faults = validate(config) or last_validate(config)
        except LauncherError:
            return {}
        if not faults:
            return way
    return {}


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """A way, and what is still wrong after it."""

    way: Way
    faults: tuple[Fault, ...]


@dataclass(frozen=True, kw_only=True)
class _Search:
    """Looks for ways out of the faults of one configuration, and remembers what it tried."""

    config: LaunchConfig
    before: tuple[Fault, ...]
    """The faults that are there."""
    validate: Validate
    last_validate: Validate
    trials: dict[frozenset[tuple[str, str]], _Trial | None] = field(default_factory=dict)
    last_trials: dict[frozenset[tuple[str, str]], _Trial | None] = field(default_factory=dict)

    def resolved(self, fault: Fault) -> Fault:
        """The fault with the best ways out of it, or with the words that none was found."""
        beside = (way for other in self.before if _are_related(other, fault) for way in other.ways)
        frontier = _distinct(filter(None, map(self._needed, (*fault.ways, *beside))))
        found: list[_Trial] = []
        ways: tuple[Way, ...] = ()
        for num_settings in range(1, MAX_SETTINGS + 1):
            trials = [trial for way in frontier if (trial := self._trial(way)) is not None]
            found += [trial for trial in trials if self._resolves(trial, fault)]
            ways = self._best(found, fault)
            if len(ways) >= (_ENOUGH if num_settings == 1 else 1):
                break
            frontier = _distinct(way for trial in trials for way in self._joins(trial, fault))
        if ways:
            return replace(fault, ways=ways)
        none = f"No change of up to {MAX_SETTINGS} settings was found that every rule accepts."
        return replace(fault, ways=(), fix=none)

    def _needed(self, way: Way) -> Way:
        """A way without the values that are set anyhow; empty when it sets what does not exist."""
        try:
            return {path: value for path, value in way.items() if value_at(self.config, path) != value}
        except KeyError:
            return {}

    def _trial(self, way: Way) -> _Trial | None:
        """What a way leads to; None where that cannot be told."""
        key = _key(way)
        if key not in self.trials and len(self.trials) < _MAX_TRIALS:
            self.trials[key] = self._tried(way, self.validate)
        return self.trials.get(key)

    def _tried(self, way: Way, validate: Validate) -> _Trial | None:
        try:
            return _Trial(way=way, faults=tuple(validate(changed(self.config, way))))
        except LauncherError:
            return None

    def _resolves(self, trial: _Trial, fault: Fault) -> bool:
        left, before = {left.path for left in trial.faults}, {fault.path for fault in self.before}
        return fault.path not in left and left <= before

    def _joins(self, trial: _Trial, fault: Fault) -> Iterator[Way]:
        """The way together with what the rules propose that it leaves broken."""
        before = {fault.path for fault in self.before}
        for left in (self.last_trials.get(_key(trial.way)) or trial).faults:
            if left.path in before and not _are_related(left, fault):
                continue
            for way in left.ways:
                joined = {**trial.way, **self._needed(way)}
                if len(trial.way) < len(joined) <= MAX_SETTINGS and joined.items() >= trial.way.items():
                    yield joined

    def _best(self, found: Sequence[_Trial], fault: Fault) -> tuple[Way, ...]:
        """The ways that leave the fewest related faults; of these those that change least, of many kinds."""
        num_alike: Counter[frozenset[str]] = Counter()
        ranked = []
        for trial in found:
            settings, num_left = frozenset(trial.way), sum(_are_related(left, fault) for left in trial.faults)
            ranked.append((num_left, len(trial.way), num_alike[settings], trial))
            num_alike[settings] += 1
        best: list[Way] = []
        limit = (0, 0)
        for left, size, _, trial in sorted(ranked, key=lambda rank: rank[:3]):
            if best and (len(best) == MAX_OFFERS or left > limit[0] or size > limit[1]):
                break
            if _adds(trial.way, best) and self._still_resolves(trial, fault):
                limit = limit if best else (left, size + 1)
                best.append(dict(sorted(trial.way.items(), key=lambda item: item[0] != fault.path)))
        return tuple(best)

    def _still_resolves(self, trial: _Trial, fault: Fault) -> bool:
        """Whether the last validation, as far as it is asked, finds the fault resolved, too."""
        key = _key(trial.way)
        if not trial.faults and key not in self.last_trials:
            self.last_trials[key] = self._tried(trial.way, self.last_validate)
        last = self.last_trials.get(key, trial)
        return last is not None and self._resolves(last, fault)


def _adds(way: Way, others: Sequence[Way]) -> bool:
    """Whether a way is worth showing beside others: no other is a part of it, and few are like it."""
    is_more = any(way.items() >= other.items() for other in others)
    return not is_more and sum(way.keys() == other.keys() for other in others) < _MAX_ALIKE


def _are_related(one: Fault, other: Fault) -> bool:
    """Whether some setting is at fault in both or could resolve either."""
    settings = [{fault.path, *(path for way in fault.ways for path in way)} for fault in (one, other)]
    return not settings[0].isdisjoint(settings[1])


def _distinct(ways: Iterable[Way]) -> list[Way]:
    return list({_key(way): way for way in ways}.values())


def _key(way: Way) -> frozenset[tuple[str, str]]:
    return frozenset((path, str(value)) for path, value in way.items())
