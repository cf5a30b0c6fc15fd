"""Plain values from the nodes of a YAML file, with the text and the line of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from launcher.config import origins, overrides
from launcher.errors import Fault
from launcher.scalars import scalar
from launcher.typed import Source

_PLAIN_STYLES = (None, "")
_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))


@dataclass
class NodeReader:
    """Reads the node tree of one file, as a YAML parser without implicit types gives it."""

    label: str
    """The file's name in messages."""
    marks: dict[str, Source] = field(default_factory=dict)
    """The source of each value by its path inside the file."""
    faults: list[Fault] = field(default_factory=list)

    def read(self, node: Any, path: str = "") -> Any:
        """The plain value of a node: keys stay as written, plain scalars mean what `scalar` says."""
        where = self._where(node)
        is_plain = node.id == "scalar" and node.style in _PLAIN_STYLES and "${" not in node.value
        self.marks[path] = Source(where=where, text=node.value if is_plain else None)
        if node.tag not in _TAGS:
            self.faults.append(Fault(path, node.tag, "YAML tags are not used", "Remove the tag.", where))
        if node.id == "mapping":
            return dict(self._items(node, path))
        if node.id == "sequence":
            return [self.read(item, f"{path}[{place}]") for place, item in enumerate(node.value)]
        if "oc.env" in node.value:
            self.faults.append(overrides.secret_fault(path, node.value, where))
        return scalar(node.value) if is_plain else node.value

    def _items(self, node: Any, path: str) -> Iterator[tuple[str, Any]]:
        first_lines: dict[str, int] = {}
        for key, value in node.value:
            if key.id != "scalar":
                fault = Fault(
                    origins.join(path, "?"), key.id, "a key is a word", "Write one.", self._where(key)
                )
                self.faults.append(fault)
                continue
            inner = origins.join(path, key.value)
            if key.value in first_lines:
                rule = f"is set twice in one group, first on line {first_lines[key.value]}"
                self.faults.append(Fault(inner, "(twice)", rule, "Remove one.", self._where(key)))
                continue
            first_lines[key.value] = key.start_mark.line + 1
            yield key.value, self.read(value, inner)
            if value.id != "scalar":
                self.marks[inner] = Source(where=self._where(key))

    def _where(self, node: Any) -> str:
        return f"{self.label}:{node.start_mark.line + 1}"
