"""A text that looks like a number, a time or a yes stays the text that was typed, wherever it goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
import yaml

from launcher.app.request import Request
from launcher.app.sweep.planning import plan_sweep
from launcher.base import registry
from launcher.base.errors import ConfigError
from launcher.cli.recipes.recipe import lines
from launcher.config.compose import Composed, compose
from launcher.config.load import as_read, load
from launcher.config.save import dump
from launcher.contract.config import LaunchConfig
from launcher.contract.executor import Executor
from launcher.typed.read import Reading, field_types, plain, read_fields
from launcher.typed.scalars import Ending
from tests.helpers.configs import compose_sound

TEXTS = (
    "1e5",
    "007",
    "1_000",
    "0x10",
    "yes",
    "on",
    "12:30:00",
    "2026-01-01",
    ".5",
    "+1",
    "inf",
    "7e10",
    "10",
)


def text_settings(cls: Any, path: str = "") -> Iterator[tuple[str, str, bool]]:
    """Every setting of a class that holds text: its path, how it is written, and whether it may be null."""
    for item in dataclasses.fields(cls):
        kind, inner = field_types(cls)[item.name], f"{path}.{item.name}".lstrip(".")
        kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        for part in kinds:
            origin, arguments = get_origin(part), get_args(part)
            if dataclasses.is_dataclass(part):
                yield from text_settings(part, inner)
            elif any(isinstance(bound, Ending) for bound in arguments):
                continue  # no text of any kind
            elif part is str or (origin is Annotated and arguments[0] is str):
                yield inner, "{}", type(None) in kinds
            elif origin is tuple and arguments[0] is str:
                yield inner, "[{}]", False
            elif origin is Mapping and dataclasses.is_dataclass(arguments[1]):
                yield from text_settings(arguments[1], f"{inner}.some")
            elif origin is Mapping and (arguments[1] is str or arguments[1] == bool | str):
                yield f"{inner}.some", "{}", False


SETTINGS = tuple(text_settings(LaunchConfig))


def at(values: Any, path: str) -> Any:
    """The value of a setting, or the only one that it lists."""
    found = reduce(getitem, path.split("."), values)
    return found[0] if isinstance(found, list) else found


def write_recipe(file: Path, written: Mapping[str, str]) -> str:
    """A recipe that sets these, by path, each as it is written; returns its name."""
    tree: dict[str, Any] = {}
    for path in written:
        *outer, name = path.split(".")
        reduce(lambda group, key: group.setdefault(key, {}), outer, tree)[name] = f"<{path}>"
    text = yaml.safe_dump(tree)
    for path, value in written.items():
        text = text.replace(f"<{path}>", value)
    file.write_text(f"defaults: [/quickstart, _self_]\n{text}")
    return str(file)


def config_of(composed: Composed) -> LaunchConfig:
    """The configuration as it is read, whatever the rules say of hostile names."""
    reading = Reading(composed.sources)
    parts = read_fields(LaunchConfig, composed.values, reading)
    assert not reading.faults
    return LaunchConfig(**parts)


def test_the_settings_that_hold_text_are_found() -> None:
    paths = {path for path, *_ in SETTINGS}
    assert {"name", "run.root", "data.cache_dir", "site.account", "site.env.some", "site.setup"} <= paths
    assert {"site.options.some", "site.roles.some.partition", "executor.name"} <= paths
    assert len(paths) > 35


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_typed_is_what_the_run_sees_is_shown_and_is_read_back(own_folder: Path, text: str) -> None:
    written = {path: how.format(text) for path, how, _ in SETTINGS}
    words = [f"{'+' * path.count('.some')}{path}={value}" for path, value in written.items()]
    given = compose_sound("quickstart", [word.replace("++", "+") for word in words])
    assert given.sources.keys() >= written.keys()
    config = config_of(given)
    assert config_of(compose_sound(write_recipe(own_folder / "ours.yaml", written))) == config
    shown = yaml.safe_load("\n".join(lines(as_read(given.values, given.sources), given.sources)))
    (own_folder / "saved.yaml").write_text(dump(config), encoding="utf-8")
    again = config_of(compose_sound(str(own_folder / "saved.yaml")))
    assert again == config
    for path, *_ in SETTINGS:
        seen = [at(plain(config), path), at(shown, path), at(yaml.safe_load(dump(config)), path)]
        assert seen == [text] * 3, path


@pytest.mark.parametrize("text", ["null", "~", ""])
def test_null_is_no_value_where_there_may_be_none_and_no_text_elsewhere(own_folder: Path, text: str) -> None:
    settings = {path: optional for path, how, optional in SETTINGS if how == "{}" and path != "name"}
    composed = compose_sound(write_recipe(own_folder / "ours.yaml", dict.fromkeys(settings, text)))
    reading = Reading(composed.sources)
    read_fields(LaunchConfig, composed.values, reading)
    assert {fault.path for fault in reading.faults} == {path for path in settings if not settings[path]}
    assert all(at(composed.values, path) is None for path in settings)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("wrap", "how"), [("{}", "${{site.account}}"), ("run_{}", "run_${{site.account}}")])
def test_a_reference_to_a_text_gives_the_text(text: str, wrap: str, how: str) -> None:
    composed = compose_sound("quickstart", [f"site.account={text}", f"data.name={how.format()}"])
    assert config_of(composed).data.name == wrap.format(text)
    assert as_read(composed.values, composed.sources)["data"]["name"] == wrap.format(text)


def test_a_reference_to_a_number_gives_the_number() -> None:
    composed = compose_sound("quickstart", ["seed=${train.num_steps}", "data.name=s_${optim.lr}"])
    config = config_of(composed)
    assert (config.seed, config.data.name) == (150, "s_2e-3")


def test_a_group_that_is_referred_to_keeps_its_texts() -> None:
    words = [
        "+site.env={A: 1e5}",
        "site.node_env=${site.env}",
        "fusion.compile=none",
        "data.name=${fusion.compile}",
    ]
    config = config_of(compose_sound("quickstart", words))
    assert config.site.node_env == {"A": "1e5"}
    assert config.data.name == "none"


def test_axes_of_words_and_of_a_recipe_are_the_texts_that_were_typed(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text(
        "defaults: [/quickstart, _self_]\nsweep:\n  - {data: {name: 1e5}}\n  - data: {name: '007,1_000'}\n"
    )
    planned = plan_sweep(Request(recipe=str(tmp_path / "ours.yaml")))
    assert [point.plan.config.data.name for point in planned.points] == ["1e5", "007", "1_000"]
    assert [point.label for point in planned.points] == ["name=1e5", "name=007", "name=1_000"]
    planned = plan_sweep(Request(recipe="quickstart", overrides=("data.name=7e10,010,0x10,on",)))
    assert [point.plan.config.data.name for point in planned.points] == ["7e10", "010", "0x10", "on"]
    assert planned.points[0].label == "name=7e10"


@dataclass(frozen=True, kw_only=True)
class Queue:
    queue: str = "all"
    max_restarts: int = 0
    save_wait_s: float = 600


def test_an_option_of_a_plugin_is_the_text_that_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(registry.load(Executor, "torchrun")), "Config", Queue)
    composed = compose_sound("quickstart", ["+executor.queue=1e5"])
    config = load(composed.values, composed.sources)
    assert config.executor.settings(Queue).queue == "1e5"
    assert '  queue: "1e5"' in "\n".join(lines(as_read(composed.values, composed.sources), composed.sources))


@pytest.mark.parametrize("line", ["export A=${B:-c}", "a\\${B}", "echo '$HOME' ${A} \\\\${B}"])
def test_braces_that_a_shell_reads_are_saved_and_read_back(own_folder: Path, line: str) -> None:
    composed = compose_sound("quickstart")
    config = config_of(composed)
    config = dataclasses.replace(config, site=dataclasses.replace(config.site, setup=(line,)))
    (own_folder / "saved.yaml").write_text(dump(config), encoding="utf-8")
    assert config_of(compose_sound(str(own_folder / "saved.yaml"))).site.setup == (line,)


def test_braces_of_a_shell_line_are_escaped_and_elsewhere_refused(own_folder: Path) -> None:
    (own_folder / "ours.yaml").write_text(
        "defaults: [/quickstart, _self_]\nsite:\n  setup: ['export A=\\${B}']\nrun: {dir: '\\${HOME}/x'}\n"
    )
    composed = compose_sound(str(own_folder / "ours.yaml"))
    assert config_of(composed).site.setup == ("export A=${B}",)
    with pytest.raises(
        ConfigError, match=r"^run\.dir=\$\{HOME\}/x: is taken as it is written here, and nothing"
    ):
        load(composed.values, composed.sources)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("run.dir=${HOME}/x", "Variables of the environment are not read: write the value of HOME itself."),
        ("run.dir=${env:SCRATCH}", "write the value of SCRATCH itself."),
        ("site.scratch=${SCRATCH}/x", "For a variable of the node write $NAME without braces, or \\${NAME}."),
        ("data.name=run_${site.account}", "refers to a setting that is null. Refer to one that has a value."),
        ("run.dir=${train.nope}", "there is no setting train.nope. Refer to a setting that has a value."),
        ("run.dir=${oc.env:HOME}", "Give the name of the variable; the ranks read it. What is no secret is"),
    ],
)
def test_a_variable_in_braces_is_refused_with_what_to_write(word: str, message: str) -> None:
    (fault,) = compose("quickstart", [word]).faults
    assert message in str(fault)
