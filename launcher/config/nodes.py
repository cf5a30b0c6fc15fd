"""Plain values from the nodes of a YAML file, with the text and the line of each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from launcher.base.errors import Fault
from launcher.config import overrides
from launcher.typed.read import Source, join
from launcher.typed.scalars import scalar

_PLAIN_STYLES = (None, "")
_MAX_NODES = 10_000
"""More values than any recipe has: nested aliases grow exponentially."""
_MAX_SHOWN = 40
_IN_BRACES = re.compile(r"[,{}\[\]]|: ")
"""What a text in ``{ }`` cannot hold without quotes."""
_BRACES = re.compile(r"\$\{|\}")
_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))


@dataclass
class NodeReader:
    """Reads the node tree of one file, as a YAML parser without implicit types returns it."""

    label: str
    """The file's name in messages."""
    marks: dict[str, Source] = field(default_factory=dict)
    """The source of each value by its path inside the file."""
    faults: list[Fault] = field(default_factory=list)
    num_nodes: int = 0
    """Values read so far, those of an alias counted at each use."""

    def read(self, node: Any, path: str = "", depth: int = 0) -> Any:
        """The plain value of a node: keys stay as written, plain scalars mean what `scalar` says."""
        where = self._where(node)
        self.num_nodes += 1
        is_plain = node.id == "scalar" and node.style in _PLAIN_STYLES and "${" not in node.value
        self.marks[path] = Source(where=where, text=node.value if is_plain else None)
        depth_within = _reference_depth(node.value) if node.id == "scalar" else 0
        if self.num_nodes > _MAX_NODES or depth + depth_within > overrides.MAX_DEPTH:
            return self._too_much(path, where)
        if node.tag not in _TAGS:
            self.faults.append(Fault(path, node.tag, "YAML tags are not supported", "Remove the tag.", where))
        if node.id == "mapping":
            return dict(self._items(node, path, depth))
        if node.id == "sequence":
            items = enumerate(node.value)
            return [self.read(item, f"{path}[{index}]", depth + 1) for index, item in items]
        if "oc.env" in node.value:
            self.faults.append(overrides.secret_fault(path, node.value, where))
        return scalar(node.value) if is_plain else node.value

    def _items(self, node: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
        first_lines: dict[str, int] = {}
        for key, value in node.value:
            if fault := self._key_fault(key, value, path, first_lines):
                self.faults.append(fault)
                continue
            inner = join(path, key.value)
            first_lines[key.value] = key.start_mark.line + 1
            yield key.value, self.read(value, inner, depth + 1)
            if value.id != "scalar":
                self.marks[inner] = Source(where=self._where(key))

    def _key_fault(self, key: Any, value: Any, path: str, first_lines: Mapping[str, int]) -> Fault | None:
        where = self._where(key)
        if key.id != "scalar":
            return Fault(join(path, "?"), key.id, "a key must be a scalar", "Write a name.", where)
        inner = join(path, key.value)
        if key.value in first_lines:
            rule = f"is set twice in one group, first in line {first_lines[key.value]}"
            return Fault(inner, "(twice)", rule, "Remove one.", where)
        is_plain = key.style in _PLAIN_STYLES
        if is_plain and key.value == "<<":
            fix = "Write the keys out, or put them into a file of `defaults`."
            return Fault(inner, "(merge)", "merge keys are not supported", fix, where)
        if is_plain and "." in key.value and not path.startswith("defaults["):
            given = written = "..."
            if value.id == "scalar" and len(value.value) < _MAX_SHOWN:
                given = written = value.value
                if value.style not in _PLAIN_STYLES or _IN_BRACES.search(given):
                    written = json.dumps(given, ensure_ascii=False)
            rule = "in a file, keys are nested, not dotted"
            return Fault(inner, given, rule, f"Nest it: {_nested(key.value, written)}.", where)
        return None

    def _too_much(self, path: str, where: str) -> None:
        rule = f"the file holds more than {_MAX_NODES:,} values, those of its aliases counted"
        fix = "Use fewer."
        if self.num_nodes <= _MAX_NODES:
            rule = f"is nested more than {overrides.MAX_DEPTH} deep, as an alias inside of its own anchor is"
            fix = "Write it flatter."
        if not any(fault.allowed == rule for fault in self.faults):
            self.faults.append(Fault(path, "(too much)", rule, fix, where))

    def _where(self, node: Any) -> str:
        return f"{self.label}:{node.start_mark.line + 1}"


def _reference_depth(text: str) -> int:
    """How deep references are nested in references.

    >>> _reference_depth("${a.${b}} ${c}")
    2
    """
    steps = ({"${": 1, "}": -1}[brace] for brace in _BRACES.findall(text))
    return max(accumulate(steps), default=0)


def _nested(key: str, value: str) -> str:
    """A dotted key as nested groups.

    >>> _nested("cluster.intra_node.latency_s", "3")
    'cluster: {intra_node: {latency_s: 3}}'
    """
    return f"{key.replace('.', ': {')}: {value}{'}' * key.count('.')}"
