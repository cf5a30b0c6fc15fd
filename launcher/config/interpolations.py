"""References between settings (``${train.num_steps}``): to the value, and to the text that was typed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException

from launcher.base.errors import ConfigError, Fault
from launcher.config import overrides, paths
from launcher.typed.read import Source
from launcher.typed.scalars import scalar

_REFERENCE = re.compile(r"\$\{([^${}]*)(\$\{)?")
_MAX_CHAIN, _MOST = 100, ((2000, "references"), (1_000_000, "characters"))
_Path = tuple[str, ...]
_NOTHING = "\0"
"""Stands for null in a text that refers to it; no setting can hold it."""


class _Costs:
    """What it takes to resolve each value, before any is: a text with two references to a text with two
    references doubles with each, and OmegaConf resolves every one anew."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._known: dict[_Path, tuple[int, int]] = {}
        self._open: list[_Path] = []
        self.refused: dict[str, str] = {}
        """By path, why a value is not resolved."""

    def of(self, path: _Path) -> tuple[int, int]:
        """References and characters of the value at a path. None of one that leads back to itself, which is
        told when it is resolved."""
        if path in self._open:
            return 0, 0
        if len(self._open) > _MAX_CHAIN:
            self.refused.setdefault(
                ".".join(path), f"leads from setting to setting, more than {_MAX_CHAIN} times"
            )
        elif path not in self._known:
            self._open.append(path)
            cost = self._known[path] = self._of(path, _at(self._values, path))
            self._open.pop()
            for number, (most, what) in zip(cost, _MOST, strict=True):
                if number > most:
                    self.refused.setdefault(".".join(path), f"leads to more than {most:,} {what}")
        return self._known.get(path, (0, 0))

    def _of(self, path: _Path, value: Any) -> tuple[int, int]:
        if isinstance(value, Mapping | list):
            keys = value if isinstance(value, Mapping) else range(len(value))
            parts = [self.of((*path, str(key))) for key in keys]
            return sum(part[0] for part in parts), sum(part[1] for part in parts)
        references, characters = 0, len(str(value))
        for text, inner in _REFERENCE.findall(value) if isinstance(value, str) else ():
            target = _target(path, text)
            if inner:  # to any setting of its group: which, is not known before
                target = target[:-1]
                if target == path[: len(target)] and not _calls(value):
                    self.refused.setdefault(
                        ".".join(path), "may lead to itself, by a reference in a reference"
                    )
            there = self.of(target)
            references, characters = references + 1 + there[0], characters + there[1]
        return references, characters


def _calls(value: str) -> bool:
    """Whether a reference in a text is a call, ``${name:...}``, which is refused when it is resolved."""
    depth = 0
    for part in re.findall(r"\$\{|[}:]", value):
        depth += {"${": 1, "}": -1, ":": 0}[part]
        if part == ":" and depth > 0:
            return True
    return False


def _at(values: Any, path: Sequence[str]) -> Any:
    for part in path:
        if isinstance(values, Mapping):
            values = values.get(part)
        elif isinstance(values, list) and part.isdecimal() and int(part) < len(values):
            values = values[int(part)]
        else:
            return None
    return values


def _target(path: _Path, reference: str) -> _Path:
    """The path that a reference leads to; one that begins with a dot begins in its own group."""
    inner = reference.lstrip(".")
    num_dots = len(reference) - len(inner)
    parts = tuple(re.split(r"[.\[\]]+", inner.strip("] ")))
    return (*path[: len(path) - num_dots], *parts) if num_dots else parts


@contextmanager
def only_settings() -> Iterator[None]:
    """Leaves OmegaConf none of its functions (``oc.env`` and others), whatever text their names come from."""
    functions = dict(BaseContainer._resolvers)
    BaseContainer._resolvers.clear()
    try:
        yield
    finally:
        BaseContainer._resolvers.update(functions)


def resolve(
    config: DictConfig, sources: Mapping[str, Source], faults: list[Fault]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Plain values with every ``${...}`` resolved, and the texts of those that are referred to; one that
    cannot be resolved becomes null and adds a fault."""
    while True:
        if refused := _too_much(config, sources):
            raise ConfigError([*faults, refused])
        try:
            values = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
        except (OmegaConfBaseException, RecursionError) as error:
            path = str(getattr(error, "full_key", None) or "")
            given = dict(paths.walk(OmegaConf.to_container(config))).get(path)
            where = sources[path].where if path in sources else ""
            rule = overrides.reference_rule(str(error))
            fix = overrides.reference_fix(path, str(given), "Refer to a setting that has a value.")
            fault = Fault(path, given or "", rule, fix, where)
            faults.append(fault)
            if not isinstance(given, str):
                raise ConfigError(faults) from error
            OmegaConf.update(config, path, None)
        else:
            assert isinstance(values, dict), "a composed configuration is a group"
            return _with_texts({str(key): value for key, value in values.items()}, config, sources, faults)


def _too_much(config: DictConfig, sources: Mapping[str, Source]) -> Fault | None:
    """The fault of a setting whose references are not to be resolved."""
    values: Any = OmegaConf.to_container(config)
    costs = _Costs(values)
    costs.of(())
    for inner, rule in costs.refused.items():
        path = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", inner) or "defaults"
        where = sources[path].where if path in sources else ""
        return Fault(path, dict(paths.walk(values)).get(path, "..."), rule, "Write the value itself.", where)
    return None


def _with_texts(
    values: dict[str, Any], config: DictConfig, sources: Mapping[str, Source], faults: list[Fault]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The resolved values, with the text of a scalar where others refer to it, and the texts by path: a
    ``7e10`` in a name stays ``7e10``, where the number would be written as another text."""
    written = dict(paths.walk(OmegaConf.to_container(config)))
    if not any(isinstance(value, str) and "${" in value for value in written.values()):
        return values, {}

    def text(path: str, value: Any) -> Any:
        found = sources[path].text if path in sources else None
        is_current = found is not None and scalar(found) == value
        return _NOTHING if value is None else found if is_current else value

    plain = OmegaConf.create(paths.mapped(OmegaConf.to_container(config), text))
    texts = {
        path: value
        for path, value in paths.walk(OmegaConf.to_container(plain, resolve=True))
        if isinstance(value, str)
    }
    unset = [path for path, value in texts.items() if _NOTHING in value and value != _NOTHING]
    for path in unset:
        rule, fix = "refers to a setting that is null", "Refer to one that has a value."
        where = sources[path].where if path in sources else ""
        faults.append(Fault(path, written.get(path, ""), rule, fix, where))

    def with_text(path: str, value: Any) -> Any:
        return None if path in unset else texts[path] if isinstance(value, str) else value

    return paths.mapped(values, with_text), texts
