"""The points of a sweep: every combination of the values that words, or a recipe, give some settings.

A word ``key=a,b`` is an axis, in Hydra's grammar of choices and ranges. A recipe may hold axes of its own:

    sweep:                                              # one grid,
      parallel: {pp: "1,2,4", schedule: "gpipe,1f1b"}
      model: tiny,gpt2_124m

    sweep:                                              # or several, of which no point is run twice
      - parallel: {schedule: "gpipe,1f1b"}
      - parallel: {schedule: interleaved_1f1b, num_chunks: "2,4"}
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from launcher.app.sweep.point import Point
from launcher.base.errors import AsTyped, ConfigError, Fault
from launcher.config.override_grammar import alternatives
from launcher.config.overrides import split
from launcher.config.paths import walk

SECTION = "sweep"
"""The part of a recipe that holds its axes; a point is composed without it."""
MAX_POINTS = 1000
"""More runs than these are no sweep that anybody reads; the arrays of schedulers end here, too."""
_PLACES = ("run.dir", "run.root")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A setting and the values that it takes."""

    key: str
    """As it is written in front of the =, such as ``+site.env.A``."""
    values: tuple[str, ...]
    """As they are written behind it; none for ``~key``."""
    is_swept: bool = True
    """Whether it was written as several values, be they one."""

    @property
    def words(self) -> tuple[str, ...]:
        """One override for each value."""
        return tuple(f"{self.key}={value}" for value in self.values) or (self.key,)

    @property
    def path(self) -> str:
        """Config path of the setting."""
        return split(f"{self.key}=")[0]


def grid(
    words: Sequence[str], section: Any, files_of: Callable[[str], Sequence[str]], source: str = ""
) -> tuple[tuple[Point, ...], str]:
    """The points of the axes among the words and of those in a recipe's section (None: it has none); and
    their number, such as ``parallel.pp (3) x parallel.schedule (2)``.

    A word takes the place of the section's axis for the same setting. ``files_of`` a group are what a
    ``glob`` chooses from; ``source`` says where the section is.

    Raises:
        ConfigError: when there is no axis, an axis cannot be read, or there are too many points.
    """
    found, faults = _axes(words, files_of)
    axes = [axis for axis in found if axis.is_swept]
    fixed = tuple(axis.words[0] for axis in found if not axis.is_swept)
    given = {split(word)[0] for word in words}
    products: list[list[Axis]] = []
    for part in _parts(section, source, faults):
        found, wrong = _axes(_words(part, given), files_of)
        faults += wrong
        products.append([*found, *axes])
    products = products or [axes]
    faults += [*_axis_faults(products), *_fixed_faults(axes, fixed)]
    if not faults and section is None and not axes:
        rule = "gives no setting several values"
        example = "Write some as key=A,B, such as parallel.pp=1,2."
        ways = ({"parallel.pp": AsTyped("1,2")},)
        faults.append(Fault(SECTION, " ".join(words) or "(nothing)", rule, example, ways=ways))
    count = sum(math.prod(len(axis.values) for axis in axes) for axes in products)
    if not faults and count > MAX_POINTS:
        rule = f"a sweep has at most {MAX_POINTS} points"
        faults.append(Fault(SECTION, f"more than {MAX_POINTS} points", rule, "Give fewer values."))
    if faults:
        raise ConfigError(faults)
    head = ("~" + SECTION, *fixed) if section is not None else fixed
    return tuple(_points(products, head)), _dims(products)


def _axes(words: Sequence[str], files_of: Callable[[str], Sequence[str]]) -> tuple[list[Axis], list[Fault]]:
    """The words as axes, and the faults of those that cannot be read."""
    axes, faults = [], []
    for word in words:
        values = alternatives(word.rstrip("\r\n"), files_of, MAX_POINTS + 1)
        key, _, value = word.partition("=")
        if isinstance(values, Fault):
            faults.append(values)
        elif values is None:
            axes.append(Axis(key=key, values=(value,) if "=" in word else (), is_swept=False))
        else:
            axes.append(Axis(key=key, values=tuple(values)))
    return axes, faults


def _parts(section: Any, source: str, faults: list[Fault]) -> Iterator[Mapping[str, Any]]:
    """The grids that a recipe's section holds."""
    for part in section if section and isinstance(section, list) else [section]:
        axes = {path: value for path, value in walk(part) if not isinstance(value, Mapping) or not value}
        if axes and all(isinstance(value, str | int | float) for value in axes.values()):
            yield axes
        elif section is not None:
            rule = "must be a group of axes, or a list of such groups"
            faults.append(
                Fault(SECTION, part, rule, 'Write each as a setting with its values: "A,B".', source)
            )


def _words(axes: Mapping[str, Any], given: set[str]) -> list[str]:
    """The axes of a section as words, but for those that are given otherwise."""
    words = [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in axes.items()
    ]
    return [word for word in words if split(word)[0] not in given]


def _axis_faults(products: Sequence[Sequence[Axis]]) -> Iterator[Fault]:
    """Axes that would make two runs of one, or put two into one directory."""
    seen = set()
    for axes in products:
        paths = Counter(axis.path for axis in axes)
        for axis in axes:
            if axis in seen:
                continue
            seen.add(axis)
            text = ",".join(axis.values)
            if paths[axis.path] > 1:
                yield Fault(axis.path, text, "is swept twice", "Give all of its values in one word.")
            if twice := [value for value, count in Counter(axis.values).items() if count > 1]:
                yield Fault(axis.path, text, f"gives {twice[0]} twice", "Give every value once.")
            if axis.path in _PLACES and len(axis.values) > 1:
                rule = "every run has a directory of its own inside of the sweep's"
                yield Fault(axis.path, text, rule, f"Give one {axis.path}, or leave it out.")


def _fixed_faults(axes: Sequence[Axis], fixed: Sequence[str]) -> Iterator[Fault]:
    """Settings that have an axis among the words and one value, too."""
    single = {split(word)[0]: split(word)[1] for word in fixed}
    for axis in axes:
        if axis.path in single:
            rule = f"is given the one value {single[axis.path]}, too"
            yield Fault(axis.path, ",".join(axis.values), rule, "Give either.")


def _points(products: Sequence[Sequence[Axis]], head: Sequence[str]) -> Iterator[Point]:
    """Every combination once, the first axis changing slowest."""
    paths = dict.fromkeys(axis.path for axes in products for axis in axes)
    names = {path: _short(path, paths) for path in paths}
    seen = set()
    for axes in products:
        for values in product(*(axis.values for axis in axes)):
            words = tuple(f"{axis.key}={value}" for axis, value in zip(axes, values, strict=True))
            if frozenset(words) in seen:
                continue
            seen.add(frozenset(words))
            label = " ".join(
                f"{names[axis.path]}={_plain(value)}" for axis, value in zip(axes, values, strict=True)
            )
            yield Point(overrides=(*head, *words), label=label)


def _short(path: str, others: Mapping[str, None]) -> str:
    """The end of a path that tells it from the others."""
    parts = path.replace("/", ".").split(".")
    for length in range(1, len(parts)):
        end = ".".join(parts[-length:])
        if sum(f".{other.replace('/', '.')}".endswith(f".{end}") for other in others) == 1:
            return end
    return ".".join(parts)


def _plain(value: str) -> str:
    """A value without the quotes around it."""
    return value[1:-1] if value[:1] == value[-1:] and value[:1] in ("'", '"') and len(value) > 1 else value


def _dims(products: Sequence[Sequence[Axis]]) -> str:
    grids = [
        " x ".join(f"{axis.path} ({len(axis.values)})" for axis in axes if len(axis.values) > 1) or "1"
        for axes in products
    ]
    return " + ".join(grids)
