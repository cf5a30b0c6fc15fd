"""Writes a configuration as YAML that YAML 1.1 and 1.2 readers read alike."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.contract.config import LaunchConfig
from launcher.typed.read import plain

_PLAIN_TEXT = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_OTHER_MEANINGS = frozenset(("null", "true", "false", "yes", "no", "on", "off", "y", "n", "nan", "inf"))

_REFERENCE = re.compile(r"(\\*)\$\{")


def dump(config: LaunchConfig) -> str:
    """The whole configuration as a recipe: composed again it gives the same configuration.

    Floats stay floats for PyYAML too, which takes ``1e-05`` for text and ``1.0e-05`` for a number.
    """
    return "\n".join(_lines(plain(config), 0)) + "\n"


def scalar_text(value: Any) -> str:
    """One value (a scalar, a list or an inline group) as YAML.

    >>> [scalar_text(value) for value in (1e-05, 3.0, None, True, "no", "1f1b", "bf16", [1, 2])]
    ['1.0e-05', '3.0', 'null', 'true', '"no"', '"1f1b"', 'bf16', '[1, 2]']
    """
    if isinstance(value, Mapping):
        items = (f"{scalar_text(str(key))}: {scalar_text(item)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(scalar_text, value)) + "]"
    if isinstance(value, float):
        digits, exponent, power = repr(value).partition("e")
        return repr(value) if not exponent or "." in digits else f"{digits}.0e{power}"
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN_TEXT.fullmatch(value) and value.lower() not in _OTHER_MEANINGS and value != "None":
        return value
    return json.dumps(_REFERENCE.sub(r"\1\1\\${", value), ensure_ascii=False)  # it refers to nothing


def _lines(values: Mapping[str, Any], depth: int) -> Iterator[str]:
    indent = "  " * depth
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{scalar_text(key)}:"
            yield from _lines(value, depth + 1)
        else:
            yield f"{indent}{scalar_text(key)}: {scalar_text(value)}"
