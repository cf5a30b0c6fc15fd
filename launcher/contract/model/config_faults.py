"""Whether a ``config.json`` describes the model of a recipe, entry by entry."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.base.errors import Fault
from launcher.base.redaction import shortened
from launcher.contract.config import ModelConfig
from launcher.contract.model.config_json import (
    CONFIG,
    DEFAULTS,
    FIXED,
    FREE,
    LENGTH,
    MODEL_TYPES,
    ROPE_GROUPS,
    SETTINGS,
    effective,
)
from launcher.contract.model.rope import RopeScaling
from launcher.contract.model.sizes import Sizes
from launcher.typed.read import Reading, plain, read

SETTING = "train.init_from"
"""Where a recipe names the folder."""
_KINDS = {bool: "true or false", int: "a whole number", float: "a number"}
_ANOTHER = "Give another folder, or build the model with model.target."
_DEFAULT_BASE = 10_000.0
"""Of rotary positions, where a file has none."""


def config_faults(found: Mapping[str, Any], folder: str, model: ModelConfig, seq_length: int) -> list[Fault]:
    """Where a folder's ``config.json`` describes another model than the recipe, or one that is not built
    here. ``model``: of the family gpt or llama."""
    kind = found.get("model_type")
    family = next((name for name, known in MODEL_TYPES.items() if known == kind), None)
    if family is None:
        rule = f"holds a model of type {_shown(kind)}; {' and '.join(MODEL_TYPES.values())} can be read"
        return [Fault(SETTING, folder, rule, _ANOTHER)]
    if family != model.family:
        rule = f"{SETTING} holds a model of type {kind}"
        return [Fault("model.family", model.family, rule, ways=({"model.family": family},))]
    compared = _Compared(found=found, folder=folder, model=model, sizes=Sizes.of(model, seq_length))
    return [*compared.settings(), *compared.length(), *compared.rope(), *compared.others()]


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """A file and a recipe of one family."""

    found: Mapping[str, Any]
    folder: str
    model: ModelConfig
    sizes: Sizes

    def settings(self) -> Iterator[Fault]:
        """Sizes and the like: each one that differs."""
        family, ours = self.model.family, effective(self.model, self.sizes)
        values, theirs = {**DEFAULTS[family], **self.found}, dict[str, Any]()
        for entry, name in SETTINGS[family].items():
            value, kind = values.get(entry), type(ours[name])
            if not (_is(kind, value) or (value is None and DEFAULTS[family].get(entry, "") is None)):
                yield self._refused(_wrong(entry, value, _KINDS[kind], is_there=entry in values))
                return  # others may follow from it
            theirs[name] = value
        entries = {name: f" ({entry} in its {CONFIG})" for entry, name in SETTINGS[family].items()}
        theirs, ours = _without_defaults(theirs), _without_defaults(ours)
        for name, value in ours.items():
            if value != theirs[name]:
                yield _other(f"model.{name}", value, theirs[name], entries.get(name, ""))

    def length(self) -> Iterator[Fault]:
        """The longest context."""
        family, sizes = self.model.family, self.sizes
        entry, given = LENGTH[family], self.model.max_position_embeddings
        value = self.found.get(entry, DEFAULTS[family][entry])
        where = f" ({entry} in its {CONFIG})"
        if not _is(int, value):
            yield self._refused(_wrong(entry, value, _KINDS[int]))
        elif value < sizes.seq_length:
            yield _other("batch.seq_length", sizes.seq_length, value, where)
        elif family == "gpt" and value != sizes.positions:
            yield _other("model.max_position_embeddings", given, value, where)

    def rope(self) -> Iterator[Fault]:
        """Base and scaling of the rotary positions."""
        if self.model.family != "llama":
            return
        groups = {name: self.found[name] for name in ROPE_GROUPS if self.found.get(name)}
        for name, group in groups.items():
            if not isinstance(group, dict):
                yield self._refused(_wrong(name, group, "a group of settings"))
                return
        bases = {name: group["rope_theta"] for name, group in groups.items() if "rope_theta" in group}
        bases |= {"beside it": self.found["rope_theta"]} if "rope_theta" in self.found else {}
        scalings = {name: self._scaling(group) for name, group in groups.items()}
        for what, values in (("rope_theta", bases), ("the scaling", scalings)):
            if any(value != other for value in values.values() for other in values.values()):
                rule = f"{what} in its {CONFIG} is not the same in {' and '.join(values)}"
                yield self._refused(rule, "Keep the one that the model was trained with.")
                return
        base = next(iter(bases.values()), _DEFAULT_BASE)
        if not _is(float, base):
            yield self._refused(_wrong("rope_theta", base, _KINDS[float]))
        elif base != self.model.rope_theta:
            yield _other("model.rope_theta", self.model.rope_theta, base, f" (rope_theta in its {CONFIG})")
        for name, values in [*scalings.items()][:1] or [("rope_scaling", {})]:
            yield from self._scaling_faults(name, values)

    def _scaling(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group's entries beside the base, as they are written now; none for positions without scaling."""
        values = {name: value for name, value in group.items() if name not in ("rope_theta", "type")}
        values = {"rope_type": group.get("type", "default"), **values}
        if values.get("partial_rotary_factor") == 1:
            del values["partial_rotary_factor"]
        if values["rope_type"] == "llama3":
            entry = LENGTH["llama"]
            values.setdefault(f"original_{entry}", self.found.get(entry, DEFAULTS["llama"][entry]))
        elif values["rope_type"] == "default":
            del values["rope_type"]
        return {name: value for name, value in values.items() if value is not None}

    def _scaling_faults(self, entry: str, values: Mapping[str, Any]) -> Iterator[Fault]:
        """``values``: the scaling of the group ``entry``."""
        kind, reading = values.get("rope_type"), Reading()
        theirs = read(RopeScaling, values, reading) if kind == "llama3" else None
        if values and kind != "llama3":
            found = f"is of type {_shown(kind)}" if kind else f"has {' and '.join(values)} and no rope_type"
            yield self._refused(f"{entry} in its {CONFIG} {found}; built are llama3's scaling, and none")
        for fault in reading.faults:
            found = f"{entry}.{fault.path} in its {CONFIG} is {_shown(fault.given)}"
            yield self._refused(f"{found}: {fault.allowed}")
        if (not values or theirs) and theirs != self.model.rope_scaling:
            rule = f"{SETTING} holds a model with {'another' if theirs else 'none'} ({entry} in its {CONFIG})"
            way = {"model.rope_scaling": plain(theirs)}
            yield Fault("model.rope_scaling", plain(self.model.rope_scaling), rule, ways=(way,))

    def others(self) -> Iterator[Fault]:
        """Entries that are no settings of a recipe."""
        family = self.model.family
        known = {"model_type", *SETTINGS[family], LENGTH[family], *FREE}
        known |= {"rope_theta", *ROPE_GROUPS} if family == "llama" else set()
        for entry, value in self.found.items():
            if (allowed := FIXED[family].get(entry)) is not None:
                if not any(_is(type(item), value) and item == value for item in allowed):
                    yield self._refused(_wrong(entry, value, _shown(allowed[0])))
            elif entry not in known and value is not None:
                rule = f"nothing here takes {entry} = {_shown(value)} of its {CONFIG} into account"
                yield self._refused(rule, f"Remove it from {CONFIG} if no logit depends on it.")

    def _refused(self, rule: str, fix: str = _ANOTHER) -> Fault:
        return Fault(SETTING, self.folder, rule, fix)


def _other(path: str, given: Any, value: Any, where: str) -> Fault:
    """A setting that is not that of the file's model."""
    rule = f"{SETTING} holds a model with {_shown(value)}{where}"
    return Fault(path, given, rule, ways=({path: value},))


def _wrong(entry: str, value: Any, wanted: str, *, is_there: bool = True) -> str:
    found = f"{entry} in its {CONFIG} is {_shown(value)}" if is_there else f"its {CONFIG} has no {entry}"
    return f"{found}; it must be {wanted}"


def _is(kind: type, value: Any) -> bool:
    """Whether a value of JSON is of a type; a whole number is a number, too."""
    return type(value) is kind or (kind is float and type(value) is int)


def _without_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the model, those that follow from others as null."""
    hidden, heads = values["hidden_size"], values["num_heads"]
    defaults = {"ffn_size": 4 * hidden, "num_kv_heads": heads, "head_dim": hidden // heads if heads else 0}
    usual = {name: None for name, default in defaults.items() if values.get(name) == default}
    return {**dict.fromkeys(defaults), **values, **usual}


def _shown(value: Any) -> str:
    """A value of JSON; of a group or a list only that it is one, however deep."""
    if isinstance(value, dict | list):
        return "{...}" if isinstance(value, dict) else "[...]"
    return shortened(json.dumps(value))
