"""Config paths, and the source of the value at each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.typed.read import Source
from launcher.typed.scalars import scalar


def join(path: str, inner: str) -> str:
    """A path inside another.

    >>> join("optim", "betas"), join("optim.betas", "[0]"), join("", "name")
    ('optim.betas', 'optim.betas[0]', 'name')
    """
    return f"{path}.{inner}" if path and inner and not inner.startswith("[") else path + inner


def above(path: str) -> list[str]:
    """The groups around a path, outer ones first.

    >>> above("cluster.intra_node.latency_s")
    ['cluster', 'cluster.intra_node']
    """
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every group, list and scalar below a value with its path, outer ones first.

    >>> [path for path, _ in walk({"optim": {"betas": [0.9]}})]
    ['optim', 'optim.betas', 'optim.betas[0]']
    """
    if path:
        yield path, value
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from walk(item, join(path, str(key)))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from walk(item, f"{path}[{place}]")


def replace(sources: dict[str, Source], path: str, marks: Mapping[str, Source], *, merges: bool) -> None:
    """Notes that the value at ``path`` is now another one, whose parts have the sources ``marks``.

    ``merges``: a group whose other keys keep their values.
    """
    if not merges:
        for stale in [known for known in sources if known.startswith((f"{path}.", f"{path}["))]:
            del sources[stale]
    for outer in above(path):
        # A group that was made for the value, perhaps in the place of a scalar.
        if outer not in sources or sources[outer].text is not None:
            sources[outer] = Source(where=marks[""].where)
    sources |= {join(path, inner): source for inner, source in marks.items()}


def settle(values: Mapping[str, Any], found: Mapping[str, Source]) -> dict[str, Source]:
    """The source of everything in ``values``, and of what was taken out of it.

    A text is kept only where it says what the value is, so that it can never stand for another
    one; what has no source of its own (the inside of an interpolated group) has its parent's.
    """
    settled = {path: Source(where=source.where) for path, source in found.items()}
    for path, value in walk(values):
        outer = path.rpartition("[" if path.endswith("]") else ".")[0]
        source = found.get(path) or settled.get(outer) or Source(where="")
        meaning = None if source.text is None else scalar(source.text)
        keeps_text = source.text is not None and type(meaning) is type(value) and meaning == value
        settled[path] = source if keeps_text else Source(where=source.where)
    return settled
