"""What a ``config.json`` in Hugging Face's format says of a model, as values of the model's settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.base.errors import Fault
from launcher.base.redaction import shortened
from launcher.contract.model.formats import CONFIG, FIXED, FORMATS, FREE, ROPE_GROUPS, Format
from launcher.contract.model.rope import RopeScaling
from launcher.typed.read import Reading, plain, read

_KINDS = {bool: "true or false", int: "a whole number", float: "a number"}
_OTHER_KINDS = {"tied_embeddings": bool, "norm_eps": float}
"""Of the settings that are no whole numbers."""
_SLIDING = "sliding_attention"
_LAYERS = (_SLIDING, "full_attention")
"""The ``layer_types`` that are built."""
_ANOTHER = "Give another folder, or build the model with model.target."
_DEFAULT_BASE = 10_000.0
"""Of rotary positions, where a file has none."""


@dataclass(kw_only=True)
class Described:
    """The model of a file, as far as it is told."""

    found: Mapping[str, Any]
    """The content of the file."""
    format: Format
    setting: str
    """The setting of a recipe that names the folder."""
    folder: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the model; one that follows from others is null."""
    length: int | None = None
    """The longest context."""
    faults: list[Fault] = field(default_factory=list)
    """What is wrong with its entries, or not built here."""

    def entry(self, name: str) -> str:
        """The entry that tells a setting, as messages name it."""
        entries = {told: entry for entry, told in self.format.settings.items()}
        entries["max_position_embeddings"] = self.format.length
        entry = entries.get(name, name if name in self.format.told else "")
        return f" ({entry} in its {CONFIG})" if entry else ""

    def refuse(self, rule: str, fix: str = _ANOTHER) -> None:
        """Notes what is wrong with the file."""
        self.faults.append(Fault(self.setting, self.folder, rule, fix))

    def checked(self, kind: type, entry: str, *others: Any) -> Any:
        """The value of an entry, or its default: of a type, or one of the ``others``. If it is neither, notes
        that; then None."""
        is_there = entry in self.found or entry in self.format.defaults or entry in self.format.windows
        value = {**self.format.defaults, **self.format.windows, **self.found}.get(entry)
        if is_of(kind, value) or (is_there and value in others):
            return value
        self.refuse(_wrong(entry, value, _KINDS[kind], is_there=is_there))
        return None


def described(found: Mapping[str, Any], setting: str, folder: str) -> Described | Fault:
    """What a file says; a fault where its type of model is not known here.

    ``setting``: of a recipe, which names the ``folder``.
    """
    kind = found.get("model_type")
    if not isinstance(kind, str) or kind not in FORMATS:
        *most, last = FORMATS
        rule = f"holds a model of type {_shown(kind)}; {', '.join(most)} and {last} can be read"
        return Fault(setting, folder, rule, _ANOTHER)
    model = Described(found=found, format=FORMATS[kind], setting=setting, folder=folder)
    _tell_sizes(model)
    model.length = model.checked(int, model.format.length)
    if model.format.has_rope:
        _tell_attention(model)
        _tell_rope(model)
    else:
        model.settings["max_position_embeddings"] = model.length
    _refuse_others(model)
    return model


def without_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the model, those that follow from others as null."""
    hidden, heads = values["hidden_size"], values["num_heads"]
    defaults = {"ffn_size": 4 * hidden, "num_kv_heads": heads, "head_dim": hidden // heads if heads else 0}
    usual = {name: None for name, default in defaults.items() if values.get(name) == default}
    return {**dict.fromkeys(defaults), **values, **usual}


def is_of(kind: type, value: Any) -> bool:
    """Whether a value of JSON is of a type; a whole number is a number, too."""
    return type(value) is kind or (kind is float and type(value) is int)


def _tell_sizes(model: Described) -> None:
    """Sizes and the like, all of them or none: some may follow from others."""
    values: dict[str, Any] = {}
    for entry, name in model.format.settings.items():
        may_be_null = name == "num_kv_heads" or model.format.defaults.get(entry, "") is None
        kind = _OTHER_KINDS.get(name, int)
        values[name] = model.checked(kind, entry, None) if may_be_null else model.checked(kind, entry)
        if model.faults:
            return
    model.settings |= without_defaults(values)


def _tell_attention(model: Described) -> None:
    """Biases, norms and the window."""
    bias = model.format.attention_bias
    if bias is None and (is_biased := model.checked(bool, "attention_bias")) is not None:
        bias = "all" if is_biased else "none"
    if bias is not None:
        model.settings |= {"attention_bias": bias, "qk_norm": model.format.qk_norm}
    if not model.format.windows:
        model.settings["sliding_window"] = None
        return
    num_faults = len(model.faults)
    window = model.checked(int, "sliding_window", None)
    if "use_sliding_window" in model.format.windows:
        window = _of_all_layers(model, window if model.checked(bool, "use_sliding_window") else None)
    if len(model.faults) == num_faults:
        model.settings["sliding_window"] = window


def _of_all_layers(model: Described, window: int | None) -> int | None:
    """The window of every layer, of a file that tells it for each."""
    num_layers, first = model.settings.get("num_layers"), model.checked(int, "max_window_layers")
    if num_layers is None or first is None:
        return None
    kinds, slides = model.found.get("layer_types"), set[bool]()
    if kinds is None:
        slides = {window is not None and layer >= first for layer in (0, num_layers - 1)}
    elif isinstance(kinds, list) and len(kinds) == num_layers and all(kind in _LAYERS for kind in kinds):
        slides = {kind == _SLIDING for kind in kinds}
    if len(slides) != 1 or (slides == {True} and window is None):
        rule = "its layers do not have one window all of them, or none"
        model.refuse(f"{rule} (layer_types, max_window_layers and sliding_window in its {CONFIG})")
    return window if slides == {True} else None


def _tell_rope(model: Described) -> None:
    """Base and scaling of the rotary positions."""
    found = model.found
    groups = {name: found[name] for name in ROPE_GROUPS if found.get(name)}
    for name, group in groups.items():
        if not isinstance(group, dict):
            model.refuse(_wrong(name, group, "a group of settings"))
            return
    bases = {name: group["rope_theta"] for name, group in groups.items() if "rope_theta" in group}
    bases |= {"beside it": found["rope_theta"]} if "rope_theta" in found else {}
    scalings = {name: _scaling(model, group) for name, group in groups.items()}
    for what, values in (("rope_theta", bases), ("the scaling", scalings)):
        if any(value != other for value in values.values() for other in values.values()):
            rule = f"{what} in its {CONFIG} is not the same in {' and '.join(values)}"
            model.refuse(rule, "Keep the one that the model was trained with.")
            return
    base = next(iter(bases.values()), _DEFAULT_BASE)
    if is_of(float, base):
        model.settings["rope_theta"] = base
    else:
        model.refuse(_wrong("rope_theta", base, _KINDS[float]))
    for name, values in [*scalings.items()][:1] or [("rope_scaling", {})]:
        _tell_scaling(model, name, values)


def _scaling(model: Described, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's entries beside the base, as they are written now; none for positions without scaling."""
    values = {name: value for name, value in group.items() if name not in ("rope_theta", "type")}
    values = {"rope_type": group.get("type", "default"), **values}
    if values.get("partial_rotary_factor") == 1:
        del values["partial_rotary_factor"]
    if values["rope_type"] == "llama3":
        entry = model.format.length
        values.setdefault(f"original_{entry}", model.found.get(entry, model.format.defaults[entry]))
    elif values["rope_type"] == "default":
        del values["rope_type"]
    return {name: value for name, value in values.items() if value is not None}


def _tell_scaling(model: Described, entry: str, values: Mapping[str, Any]) -> None:
    """``values``: the scaling of the group ``entry``."""
    kind, reading = values.get("rope_type"), Reading()
    scaling = read(RopeScaling, values, reading) if kind == "llama3" else None
    if values and kind != "llama3":
        found = f"is of type {_shown(kind)}" if kind else f"has {' and '.join(values)} and no rope_type"
        model.refuse(f"{entry} in its {CONFIG} {found}; built are llama3's scaling, and none")
    for fault in reading.faults:
        found = f"{entry}.{fault.path} in its {CONFIG} is {_shown(fault.given)}"
        model.refuse(f"{found}: {fault.allowed}")
    if not values or scaling:
        model.settings["rope_scaling"] = plain(scaling)


def _refuse_others(model: Described) -> None:
    """Entries that are no settings of a recipe."""
    for entry, value in model.found.items():
        if entry in model.format.told or entry in FREE:
            continue
        if (allowed := model.format.fixed.get(entry, FIXED.get(entry))) is not None:
            if not any(is_of(type(item), value) and item == value for item in allowed):
                model.refuse(_wrong(entry, value, _shown(allowed[0])))
        elif value is not None:
            rule = f"nothing here takes {entry} = {_shown(value)} of its {CONFIG} into account"
            model.refuse(rule, f"Remove it from {CONFIG} if no logit depends on it.")


def _wrong(entry: str, value: Any, wanted: str, *, is_there: bool = True) -> str:
    found = f"{entry} in its {CONFIG} is {_shown(value)}" if is_there else f"its {CONFIG} has no {entry}"
    return f"{found}; it must be {wanted}"


def _shown(value: Any) -> str:
    """A value of JSON; of a group or a list only that it is one, however deep."""
    if isinstance(value, dict | list):
        return "{...}" if isinstance(value, dict) else "[...]"
    return shortened(json.dumps(value))
