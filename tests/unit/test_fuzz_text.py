"""Any text of an override or a recipe is read or refused within seconds, in words that a terminal shows."""

from __future__ import annotations

import contextlib
import io
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from launcher.app.planning import make_plan
from launcher.base.errors import LauncherError
from launcher.cli.main import main
from launcher.config.compose import compose
from launcher.config.load import load

MOST_S = 10.0
"""Of the processor's time."""
quick = settings(
    derandomize=True, database=None, max_examples=40, suppress_health_check=list(HealthCheck), deadline=None
)
PATHS = st.sampled_from(
    [
        *(
            "model.num_layers",
            "parallel.pp",
            "batch.micro_size",
            "optim.lr",
            "optim.betas",
            "name",
            "run.dir",
        ),
        *("data.source", "data.options", "data", "model", "train", "seed", "parallel", "site.env", "device"),
        *("report.baseline", "executor.max_restarts", "cluster.nodes", "+x"),
    ]
)
LETTERS = st.text(
    st.characters(codec="utf-8", exclude_characters="\0")
    | st.sampled_from("${}[]:,='\"\\ \t.~*&!|>-#\x1b\x7f\x85\u2028"),
    max_size=12,
)
NUMBERS = st.one_of(
    st.integers(-(10**25), 10**25).map(str),
    st.floats().map(str),
    st.sampled_from(
        ["1e400", "-0", "0x10", "1_000", ".5", "5.", "1e", "٣", "nan", "inf", "9" * 5000, "null", "???"]
    ),
)
REFERENCES = st.sampled_from(
    ["${name}", "${seed}", "${.x}", "${oc.env:HOME}", "${", "${a.${seed}}", "${model}"]
)
TEXTS = st.one_of(LETTERS, NUMBERS, REFERENCES, st.tuples(REFERENCES, LETTERS).map("".join))
OVERRIDES = st.one_of(
    st.tuples(st.sampled_from(["", "", "+", "++", "~"]), PATHS, st.sampled_from(["=", "=", "="]), TEXTS).map(
        "".join
    ),
    LETTERS.filter(lambda text: not text.startswith("-")),
)
YAML = st.one_of(
    st.lists(st.tuples(PATHS, TEXTS), max_size=3).map(
        lambda pairs: "".join(
            f"{path.replace('.', ': {')}: {text}{'}' * path.count('.')}\n" for path, text in pairs
        )
    ),
    st.text(st.characters(codec="utf-8"), max_size=60),
)


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """Ends an example that takes longer; each begins it anew."""

    def end(number: int, frame: object) -> None:
        raise AssertionError(f"takes more than {MOST_S:g} s")

    before = signal.signal(signal.SIGPROF, end)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


def ends_well(recipe: str, words: list[str]) -> None:
    """Whether it loads or is refused, and the refusal is one that a terminal shows as it is."""
    signal.setitimer(signal.ITIMER_PROF, MOST_S)
    try:
        composed = compose(recipe, words)
        load(composed.values, composed.sources, composed.faults)
    except LauncherError as error:
        shown = str(error)
        assert all(letter.isprintable() or letter in "\n\t" for letter in shown), ascii(shown)
        assert len(shown) < 20_000


@given(st.lists(OVERRIDES, min_size=1, max_size=2))
@example(["seed=" + "1" * 5000])
@quick
def test_any_overrides_are_read_or_refused(words: list[str]) -> None:
    ends_well("quickstart", words)


@given(YAML)
@quick
def test_any_recipe_is_read_or_refused(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mine.yaml")
        path.write_bytes(f"defaults: [/quickstart, _self_]\n{text}".encode(errors="surrogatepass"))
        ends_well(str(path), [])


@given(st.binary(max_size=40))
@quick
def test_any_bytes_are_no_recipe_or_one_that_is_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mine.yaml")
        path.write_bytes(content)
        ends_well(str(path), [])


@given(st.lists(OVERRIDES, min_size=1, max_size=2))
@settings(quick, max_examples=15)
def test_what_plan_prints_is_shown_as_it_is(words: list[str]) -> None:
    out, make = io.StringIO(), getattr(make_plan, "__wrapped__", make_plan)  # its advice is not followed here
    with (
        mock.patch("launcher.app.planning.make_plan", make),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
    ):
        signal.setitimer(signal.ITIMER_PROF, MOST_S)
        assert main(["plan", "quickstart", *words]) in (0, 2)
    shown = re.sub(r"\n|\t", "", out.getvalue())
    assert shown.isprintable(), ascii(shown)
