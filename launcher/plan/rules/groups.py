"""Groups of parameters: names that match none, or one in two groups, and groups that change nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from launcher.base.errors import LEFT_OUT, Fault, nearest
from launcher.contract.model.shape import ModelShape
from launcher.contract.optim.config import OptimConfig


def group_faults(optim: OptimConfig, model: ModelShape) -> Iterator[Fault]:
    """Faults of ``optim.groups``, of a whole model."""
    if not optim.groups:
        return
    known = [each.name for each in model.parameters if each.is_trained or optim.is_frozen(each.name)]
    for label, group in optim.groups.items():
        path = f"optim.groups.{label}"
        if group.frozen and (group.lr_factor != 1 or group.weight_decay is not None):
            name = "weight_decay" if group.lr_factor == 1 else "lr_factor"
            rule = f"has no effect on parameters that are frozen ({path}.frozen)"
            one, other = f"{path}.{name}", "Leave one of the two out."
            yield Fault(one, getattr(group, name), rule, other, ways=({one: LEFT_OUT},))
        if group.lr_factor == 1 and group.weight_decay is None and not group.frozen:
            rule = "changes nothing of these parameters"
            fix = f"Give lr_factor, weight_decay or frozen beside its names, or remove {path}."
            yield Fault(path, list(group.names), rule, fix, ways=({path: LEFT_OUT},))
        if not group.names:
            fix = f"Give names, or remove {path}."
            yield Fault(f"{path}.names", "[]", "holds no parameter", fix, ways=({path: LEFT_OUT},))
        for pattern in group.names:
            if not any(fnmatchcase(name, pattern) for name in known):
                near = nearest(pattern, known)
                fix = f"Did you mean {near}?" if near else f"A name is such as {known[-1]}."
                others = [near if other == pattern else other for other in group.names]
                ways: tuple[Mapping[str, Any], ...] = ({f"{path}.names": others},) if near else ()
                rule = "matches the name of no parameter that is trained"
                yield Fault(f"{path}.names", pattern, rule, fix, ways=ways)
    several = {tuple(found): name for name in known if len(found := optim.groups_of(name)) > 1}
    for labels, name in several.items():
        path = f"optim.groups.{labels[-1]}.names"
        rule = f"{name} is in {' and '.join(labels)}, and a parameter is updated in one way"
        yield Fault(path, list(optim.groups[labels[-1]].names), rule, "Let each name match in one group.")
