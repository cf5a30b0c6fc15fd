"""Secrets of any name and value are in no file of a run; counts and ids of tokens are no secrets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.base.errors import Fault, JobError
from launcher.base.redaction import hide_secrets, holds_login, is_secret_variable, without_secrets
from launcher.base.secrets import check_text, secret_values
from launcher.cli.main import main
from launcher.runs import freeze as freezing
from launcher.runs.freeze import freeze

quick = settings(
    derandomize=True, database=None, max_examples=100, suppress_health_check=list(HealthCheck), deadline=None
)
CASES = st.sampled_from([str.upper, str.lower, str.title])
SECRET_ENDS = st.sampled_from(
    ["api_key", "api-key", "token", "hf_token", "password", "secret", "secret_key", "pwd"]
)
HARMLESS = st.sampled_from(
    [
        "max_tokens",
        "num_tokens",
        "eos_token",
        "pad-token",
        "vocab_size",
        "sort_key",
        "primary_key",
        "tokens_per_step",
    ]
)
PREFIXES = st.sampled_from(["", "my_", "lab-", "run2_", "x_y_"])
VALUES = st.text("abcdefgABCDEFG0123456789+/_", min_size=8, max_size=20).map(lambda text: f"S3{text}")
"""What no other text holds."""


@st.composite
def names(draw: st.DrawFn, ends: st.SearchStrategy[str] = SECRET_ENDS) -> str:
    return draw(PREFIXES) + draw(CASES)(draw(ends))


@given(names(), VALUES, st.sampled_from(["{}={}", "{}: {}", "'{}': '{}'", '"{}" = "{}"', "a.{}={} b=1"]))
@quick
def test_the_value_of_a_secret_is_in_no_message(name: str, value: str, form: str) -> None:
    assert value not in hide_secrets(form.format(name, value))
    assert value not in str(Fault(f"model.options.{name}", value, "is wrong"))
    assert value not in str(Fault("model.options", {"a": [{name: value}]}, "is wrong"))
    assert value not in json.dumps(without_secrets({"a": [{name: [value]}]}))


def test_a_name_that_is_not_known_would_be_found() -> None:
    body: Any = vars(test_the_value_of_a_secret_is_in_no_message)["hypothesis"].inner_test
    body("my_token", "S3abcdefgh", "{}={}")
    with (
        mock.patch("launcher.base.redaction.names_secret", return_value=False),
        pytest.raises(AssertionError),
    ):
        body("my_token", "S3abcdefgh", "{}={}")


@given(VALUES, VALUES, st.sampled_from(["http", "https", "s3", "redis", "postgresql"]))
@quick
def test_the_password_of_a_url_is_in_no_message(user: str, password: str, scheme: str) -> None:
    url = f"{scheme}://{user}:{password.replace('/', '')}@host:80/x"
    if "/" in user:
        return
    assert holds_login(url)
    assert password.replace("/", "") not in hide_secrets(f"see {url}, and {url}") or password in user


@given(names(HARMLESS), st.integers(0, 10**9))
@quick
def test_counts_and_ids_of_tokens_are_shown(name: str, number: int) -> None:
    assert not is_secret_variable(name.upper().replace("-", "_"))
    assert str(number) in hide_secrets(f"{name}={number}")
    assert without_secrets({name: number}) == {name: number}


@given(names(), VALUES, st.text(max_size=10), st.text(max_size=10))
@quick
def test_a_text_with_the_value_of_a_secret_variable_is_refused(
    name: str, value: str, before: str, after: str
) -> None:
    variable = name.replace("-", "_").upper()
    found = secret_values({variable: value, "LANG": "C.UTF-8"}, ())
    if variable == "PWD":
        assert not found
        return
    with pytest.raises(JobError, match=rf"^job\.sh would hold the value of {variable}\.") as refused:
        check_text(before + value + after, "job.sh", found)
    assert value not in str(refused.value)


TREES = st.dictionaries(
    st.lists(st.sampled_from(["a", "b.py", "c d", ".git", "é"]), min_size=1, max_size=3).map("/".join),
    st.sampled_from(
        ["text", "link outside", "link inside", "link to nothing", "link to itself", "pipe", "secret"]
    ),
    max_size=6,
)


@given(TREES)
@settings(quick, max_examples=40)
def test_of_any_tree_only_its_own_files_are_frozen(tree: dict[str, str]) -> None:
    """Nothing is read through a link, nothing waits for a pipe, and no secret is copied."""
    with tempfile.TemporaryDirectory() as folder:
        root, run, outside = Path(folder, "root"), Path(folder, "run"), Path(folder, "outside")
        for each in (root, run):
            each.mkdir()
        outside.write_text("not of this tree")
        for name, kind in tree.items():
            plant(root, root / f"{name}.py", kind, outside)
        own = mock.patch.object(freezing, "own_packages", return_value=[])
        with own, suppress(JobError):  # of a file with the secret
            freeze([str(root)], run, (), {"HF_TOKEN": b"canary-0123456789"})
        copied = [path for path in (run / "source").rglob("*") if path.is_file() and not path.is_symlink()]
        texts = [path.read_text() for path in copied if "roots" in path.parts]
        assert {"not of this tree", "canary-0123456789"}.isdisjoint(texts)


def plant(root: Path, path: Path, kind: str, outside: Path) -> None:
    if any(parent.is_symlink() or parent.is_file() for parent in path.parents) or os.path.lexists(path):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind in ("text", "secret"):
        path.write_text("canary-0123456789" if kind == "secret" else "x = 1\n")
    else:
        target = {"link outside": outside, "link inside": root, "link to itself": path}.get(
            kind, root / "none"
        )
        path.symlink_to(target)


STATUS = st.dictionaries(
    st.sampled_from(["phase", "pid", "birth", "hostname", "started", "changed", "exit_code", "rank"]),
    st.one_of(
        st.sampled_from(["running", "pending", socket.gethostname(), "", None, True, [], {}]),
        st.sampled_from([-1, 0, 1, 10**30, 1.5, "1"]),
        st.just("the other process"),
    ),
)


@given(STATUS)
@settings(quick, max_examples=60)
def test_cancel_signals_no_process_that_is_not_the_runs(status: dict[str, Any]) -> None:
    with subprocess.Popen(["sleep", "60"]) as other, tempfile.TemporaryDirectory() as folder:
        values = {key: other.pid if value == "the other process" else value for key, value in status.items()}
        values = {"phase": "running", "pid": other.pid, "hostname": socket.gethostname()} | values
        Path(folder, "job.json").write_text("{}")
        Path(folder, "status.json").write_text(json.dumps(values))
        try:
            signals = AssertionError("signals a process")
            with (
                mock.patch.object(os, "kill", side_effect=signals),
                mock.patch.object(os, "killpg", side_effect=signals),
            ):
                main(["cancel", folder])
                main(["status", folder])
            assert other.poll() is None
        finally:
            other.kill()
