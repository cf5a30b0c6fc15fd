"""From plain composed values to the typed configuration, with every fault at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from launcher.config.recipes import safe_name
from launcher.config.schema import LaunchConfig
from launcher.config.site import Broken, secret_rules, secret_variable_rules, site_rules
from launcher.errors import ConfigError, Fault, did_you_mean
from launcher.typed import Reading, Source, plain, read

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_NUMBER_FORMATS = ("fp32", "tf32", "bf16", "fp16")


def load(values: Mapping[str, Any], sources: Mapping[str, Source]) -> LaunchConfig:
    """The typed configuration: types, ranges, unknown keys, and the rules inside one group.

    Raises:
        ConfigError: with every fault found, each with the file and line or the override it is from.
    """
    reading = Reading(sources)
    config = read(LaunchConfig, values, reading)
    if config is None:
        raise ConfigError(reading.faults)
    if secrets := [*secret_rules(plain(config)), *secret_variable_rules(config.site)]:
        # Alone: another fault of the same value would show it.
        raise ConfigError(_hidden(broken, sources) for broken in secrets)
    for path, given, rule, fix in _broken_rules(config):
        reading.fault(path, given, rule, fix)
    if reading.faults:
        raise ConfigError(reading.faults)
    return config


def _hidden(broken: Broken, sources: Mapping[str, Source]) -> Fault:
    """The fault of a value that is not shown; of the override that set it only the key is."""
    path, given, rule, fix = broken
    source = sources.get(path)
    return Fault(path, given, rule, fix, source.where.partition("=")[0] if source else "")


def _broken_rules(config: LaunchConfig) -> Iterator[Broken]:
    yield from _control_characters(plain(config), "")
    yield from site_rules(config.site)
    if not _NAME.fullmatch(config.name):
        rule = "names files and jobs, so it holds only letters, digits, . _ - (at most 100)"
        yield "name", config.name, rule, f"Set name={safe_name(config.name)[:100]}."
    for path, owner in (("model", config.model), ("data", config.data)):
        yield from _target_rules(path, owner.target, owner.options)
    for name in config.device.peak_flops:
        if name not in _NUMBER_FORMATS:
            given = config.device.peak_flops[name]
            yield f"device.peak_flops.{name}", given, "no number format", did_you_mean(name, _NUMBER_FORMATS)
    if config.train.eval_interval and not config.train.eval_batches:
        rule = "has no effect while train.eval_batches is 0"
        yield "train.eval_interval", config.train.eval_interval, rule, "Set train.eval_batches=4."


def _target_rules(group: str, target: str | None, options: Mapping[str, Any]) -> Iterator[Broken]:
    if target is None and options:
        yield f"{group}.options", options, f"has no effect without {group}.target", f"Remove {group}.options."
    if target is not None and not _TARGET.fullmatch(target):
        fix = f"Set {group}.target=my_package.my_module:my_function."
        yield f"{group}.target", target, "must be package.module:function", fix


def _control_characters(value: Any, path: str) -> Iterator[Broken]:
    """Line breaks and their like, which would tear a job script or a log apart."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _control_characters(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _control_characters(item, f"{path}[{place}]")
    elif isinstance(value, str) and not value.isprintable():
        printable = "".join(letter for letter in value if letter.isprintable())
        yield path, repr(value), "holds a control character", f"Write {printable!r}."
