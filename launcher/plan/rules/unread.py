"""Settings that nothing reads, by what the schema declares: they would silently do nothing.

What becomes of one depends on who set it, and on who took its effect away:

    given by              made moot by                               becomes
    a group's file        anything                                   nothing: a default is for every recipe
    recipe or override    a default, itself, what it extends         a fault
    recipe                a recipe that extends it, or an override   a note
    word of a sweep       an axis of the sweep                       a note
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from launcher.base.errors import Fault, PluginError, offer
from launcher.config.load import plugin_options
from launcher.config.paths import value_at
from launcher.contract.config import LaunchConfig
from launcher.contract.optim.plugin import optimizer_of
from launcher.contract.shape import JobShape, RankCost
from launcher.contract.strategy import RoleGroup
from launcher.typed.read import (
    Condition,
    Reading,
    Source,
    condition_value,
    conditions_of,
    field_types,
    join,
    plain,
    read,
    read_unless,
)

_NOWHERE = Source(where="")
_NODES = ("cluster.nodes", "cluster.devices_per_node")


Unread = Iterable[tuple[str, Condition]]
"""Settings, each with the condition under which it is read."""


def unread_faults(
    config: LaunchConfig,
    sources: Mapping[str, Source],
    roles: Iterable[RoleGroup] | None = None,
    links: Unread = (),
) -> list[Fault]:
    """Faults of settings without an effect, of those who set them knowing what takes the effect away.
    ``roles``: of the job; None while they are not known. ``links``: of `unread_links`, likewise."""
    return [fault for fault, is_note in _unread(config, sources, roles, links) if not is_note]


def unread_notes(
    config: LaunchConfig, sources: Mapping[str, Source], roles: Iterable[RoleGroup], links: Unread
) -> list[str]:
    """Notes on settings of a recipe that have no effect under what a later recipe or an override sets."""
    found = _unread(config, sources, roles, links)
    return [str(dataclasses.replace(fault, fix="")) for fault, is_note in found if is_note]


def unread_links(
    job: JobShape, costs: Iterable[Iterable[RankCost]], sources: Mapping[str, Source]
) -> Iterator[tuple[str, Condition]]:
    """The link inside a node, where every message of a job goes between nodes. Those of other roles than that
    of the ranks that train are not known: such a role counts as one that takes it."""
    messages = [message for rank in costs for cost in rank for message in cost.collectives]
    across = {axis: job.cluster.crosses_nodes(job.mesh, axis) for axis in ("dp", "tp", "pp")}
    is_taken = any(message.link == "intra_node" or not across[message.axis] for message in messages)
    # Of tensor-parallel groups across nodes it is told what they would take inside a node.
    if not (is_taken or across["tp"] or any(not role.trains for role in job.roles)):
        causes = tuple(path for path in sources if path.startswith(("parallel.", "architecture.")))
        yield "cluster.intra_node", _never((*causes, *_NODES), "where all ranks of a message share a node")


def conditions(cls: type, path: str = "") -> Iterator[tuple[str, Condition]]:
    """The settings of a class, and of those below it, that are not always read."""
    for item in dataclasses.fields(cls):
        inner, kind = join(path, item.name), field_types(cls)[item.name]
        yield from ((inner, condition) for condition in conditions_of(item))
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from conditions(kind, inner)


def _unread(
    config: LaunchConfig, sources: Mapping[str, Source], roles: Iterable[RoleGroup] | None, links: Unread
) -> Iterator[tuple[Fault, bool]]:
    """A fault for every given setting that is not read, and whether it is a note only."""
    given = {path: source for path, source in sources.items() if source.is_given}
    if not given:
        return
    declared = [*conditions(LaunchConfig), *links, *_peaks(config, given)]
    values: dict[str, Any] = {}
    for path, cls, options in plugin_options(plain(config)):
        declared += conditions(cls, path)
        made = read(cls, options, Reading())
        values |= {join(path, name): value for name, value in vars(made).items()} if made else {}
    if roles is not None and all(role.trains for role in roles):
        (absent,) = read_unless("architecture.name", config.architecture.name, neutral={})["read"]
        declared.append(("site.roles", absent))
    with suppress(PluginError):  # an unknown one is told as such
        if len(optimizer_of(config).kernels) == 1:
            (alone,) = read_unless("optim.name", config.optim.name)["read"]
            declared.append(("fusion.optimizer", alone))
    told: set[str] = set()
    for path, condition in declared:
        others = {other: values.get(other, value_at(config, other)) for other in condition.paths}
        if condition.is_read(*others.values()):
            continue
        cause = max(sources.get(other, _NOWHERE).layer for other in others)
        for leaf in _leaves(path, given):
            own = values.get(leaf, value_at(config, leaf))
            if own is not None and own != condition.neutral and leaf not in told:
                told.add(leaf)
                yield _fault(leaf, own, given[leaf], condition, others), given[leaf].layer < cause


def _peaks(config: LaunchConfig, given: Mapping[str, Source]) -> Iterator[tuple[str, Condition]]:
    """Peaks of number formats that nothing runs in, but for those that are given together with one that is
    read, as all of a datasheet."""
    peaks = {name: given.get(f"device.peak_flops.{name}", _NOWHERE) for name in config.device.peak_flops}
    read = {config.precision.products, config.precision.compute}
    layers = {source.layer for name, source in peaks.items() if name in read}
    for name, source in peaks.items():
        if name not in read and source.layer not in layers:
            formats = ("precision.compute", "precision.tf32")
            yield f"device.peak_flops.{name}", _never(formats, f"where products of matrices run in {name}")


def _never(causes: tuple[str, ...], text: str) -> Condition:
    """A condition that does not hold by what else is known."""
    return Condition(paths=causes, is_read=lambda *values: False, text=text)


def _fault(leaf: str, own: Any, source: Source, condition: Condition, others: Mapping[str, Any]) -> Fault:
    rule, fix = f"has no effect here: it is read {condition.text}", "Leave it out."
    ways = tuple({path: value} for path in others for value in condition.offered)
    if len(others) == 1:
        ((path, value),) = others.items()
        rule = f"has no effect while {path} is {condition_value(value)}"
        fix = f"Leave it out, or s{offer(ways)[1:]}" if ways else f"Leave it out, or set another {path}."
    shown = own if source.text is None else source.text
    return Fault(leaf, shown, rule, fix, source.where, ways=ways)


def _leaves(path: str, given: Mapping[str, Any]) -> Iterator[str]:
    """Those of some settings that are a setting, or below it if that is a group."""
    below = [known for known in given if known == path or known.startswith(f"{path}.")]
    return (known for known in below if not any(other.startswith(f"{known}.") for other in below))
