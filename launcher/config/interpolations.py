"""References between settings (``${train.num_steps}``): to the value, and to the text that was typed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException

from launcher.base.errors import ConfigError, Fault
from launcher.config import overrides, paths
from launcher.typed.read import Source
from launcher.typed.scalars import scalar

_NOTHING = "\0"
"""Stands for null in a text that refers to it; no setting can hold it."""


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
