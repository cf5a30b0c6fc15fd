"""A plan ends within seconds, whatever the text says: each kind of too much has a refusal of its own."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.app.planning import make_plan
from launcher.base.errors import LauncherError
from launcher.cli.main import main

MOST_S = 10.0
"""Of the processor's time: a busy machine takes longer by the clock."""
EXTENDS = "defaults: [/quickstart, _self_]\n"
OPTIONS = f"{EXTENDS}data:\n  options:\n"
HUGE = 10**15


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """Ends a test that takes longer."""

    def end(number: int, frame: object) -> None:
        raise TimeoutError(f"takes more than {MOST_S:g} s")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, MOST_S)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "model.num_layers=10000 parallel.pp=10000",
            r"^parallel\.pp=10000: world = .* = 10000 ranks .*, the cluster has ",
        ),
        (
            f"model.num_layers={HUGE}",
            rf"^model\.num_layers={HUGE}: must be a whole number from 1 to 10000 or",
        ),
        (f"model.hidden_size={HUGE}", r"from 1 to 10000000 or null\. Write 10000000\."),
        (f"model.vocab_size={HUGE}", r"from 1 to 10000000 or null\. Write 10000000\."),
        (f"batch.seq_length={HUGE}", r"^device\.memory_bytes=4000000000: a rank of pp_rank 0 needs "),
        (
            f"batch.global_size={HUGE} batch.micro_size=1",
            r"forwards are more than the 250000 that can be planned",
        ),
        (f"batch.num_microbatches={HUGE} batch.global_size=null", r"forwards are more than the 250000"),
        ("cluster.devices_per_node=1000000 parallel.dp=1000000", r"from 1 to 10000\. Write 10000\."),
        (f"cluster.nodes={HUGE} parallel.dp=auto", r"from 1 to 10000000\. Write 10000000\."),
        ("parallel.tp=10000 cluster.nodes=1250", r"parallel\.tp=10000: "),
        (f"parallel.num_chunks={HUGE}", rf"parallel\.num_chunks={HUGE}: "),
        (
            f"data.prefetch_batches={HUGE}",
            rf"^data\.prefetch_batches={HUGE}: must be .* 0 to 1000\. Write 1000\.",
        ),
        (f"seed=1{'0' * 5000}", r"^seed=10+\.\.\.0+: is a number with thousands of digits\. Give fewer\.$"),
        (f"seed=range(0,{HUGE})", r"^seed=range\(0,1000000000000000\): these are several values"),
        (
            f"+model.options.a={'[' * 5000}{']' * 5000}",
            r"is nested more than 20 deep\. Give a flatter value\.",
        ),
        (f"name={'x' * 100_000}", r"^name=x+\.\.\.x+: names files and jobs, so it holds only"),
    ],
)
def test_a_size_beyond_reason_is_refused(words, message):
    with pytest.raises(LauncherError, match=message):
        make_plan("quickstart", words.split())


def test_thousands_of_overrides_are_refused():
    with pytest.raises(
        LauncherError, match=r"^1001 overrides: at most 1000 can be given\. Write the settings into"
    ):
        make_plan("quickstart", [f"+model.options.k{number}=1" for number in range(1001)])


def test_the_largest_plan_of_many_stages_is_made():
    words = "model.num_layers=2000 parallel.pp=2000 cluster.nodes=250 batch.global_size=16 batch.micro_size=1"
    assert len(make_plan("quickstart", words.split()).plan.stages) == 2000


def chain(first: str, following: str, count: int) -> str:
    """A file in which each option refers to the one before."""
    return f"{OPTIONS}    a0: {first}\n" + "".join(
        f"    a{number}: {following.replace('BEFORE', f'${{data.options.a{number - 1}}}')}\n"
        for number in range(1, count)
    )


FILES = {
    "a text that doubles": (
        chain("xxxxxxxx", "BEFOREBEFORE", 64),
        r"^data\.options\.a10=\$\{data\.options\.a9\}\$\{data\.options\.a9\}: leads to more than 2,000 "
        r"references\. Write the value itself\. \[.*mine\.yaml:14\]$",
    ),
    "a group that doubles": (
        chain("{x: 1, y: 2}", "{x: 'BEFORE', y: 'BEFORE'}", 64),
        r"^data\.options\.a10=.*: leads to more than 2,000 references",
    ),
    "a text that grows": (
        chain("x" * 1000, "BEFORE" * 100, 4),
        r"^data\.options\.a2=.*: leads to more than (2,000 references|1,000,000 characters)",
    ),
    "a long text many times": (
        f"{EXTENDS}data: {{options: {{a: {'x' * 10_000}, b: '{'${data.options.a}' * 101}'}}}}\n",
        r"^data\.options\.b=.*: leads to more than 1,000,000 characters",
    ),
    "a long chain": (chain("1", "BEFORE", 3000), r"leads to more than 2,000 references"),
    "a long chain from its end": (
        f"{OPTIONS}" + "".join(f"    a{n}: '${{data.options.a{n + 1}}}'\n" for n in range(3000)),
        r"^data\.options\.a\d+=.*: leads from setting to setting, more than 100 times\.",
    ),
    "a reference put together": (
        f"{OPTIONS}    k: b\n    a: '${{data.options.${{data.options.k}}}}'\n    b: 1\n",
        r"^data\.options\.a=.*: may lead to itself, by a reference in a reference\. Write the value itself\.",
    ),
    "deep references": (
        f"{EXTENDS}name: {'${' * 2000}x{'}' * 2000}\n",
        r"^name=\(too much\): is nested more than 20",
    ),
    "aliases of aliases": (
        f"{EXTENDS}model:\n  options:\n    a0: &a0 [1,1,1,1,1,1,1,1,1]\n"
        + "".join(f"    a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)),
        r"\(too much\): the file holds more than 10,000 values, those of its aliases counted\. Use fewer\.",
    ),
    "deep lists": (
        f"{EXTENDS}name: {'[' * 9000}{']' * 9000}\n",
        r"mine\.yaml:2: not YAML: exceeded maximum nesting",
    ),
    "deep groups": (
        f"{EXTENDS}" + "".join(f"{' ' * n}a:\n" for n in range(200)),
        r"\(too much\): is nested more than 20 deep",
    ),
    "a long text": (
        f"{EXTENDS}name: {'x' * 1_000_000}\n",
        r"mine\.yaml: holds more than 1,000,000 bytes, which no recipe does\. Shorten it\.$",
    ),
    "a long key": (f"{EXTENDS}{'x' * 100_000}: 1\n", r"mine\.yaml:2: not YAML: "),
}


@pytest.mark.parametrize(("text", "message"), FILES.values(), ids=FILES)
def test_a_file_that_expands_beyond_reason_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(LauncherError, match=message):
        make_plan(str(tmp_path / "mine.yaml"), ())


def test_defaults_that_double_are_refused(tmp_path):
    for number in range(30):
        (tmp_path / f"d{number}.yaml").write_text(f"defaults: [d{number + 1}@a, d{number + 1}@b, _self_]\n")
    (tmp_path / "d30.yaml").write_text("q: 1\n")
    (tmp_path / "mine.yaml").write_text("defaults: [/base, d0, _self_]\n")
    message = (
        r"mine\.yaml: its defaults lists name more than 1000 files, each counted as often .*\. Name fewer\.$"
    )
    with pytest.raises(LauncherError, match=message):
        make_plan(str(tmp_path / "mine.yaml"), ())


def test_references_of_the_usual_kinds_are_followed(tmp_path):
    train = "train: {num_steps: '${.eval_interval}', eval_interval: 20}"
    text = f"{EXTENDS}name: 'run-${{seed}}-${{.seed}}'\nseed: 3\n{train}\n"
    (tmp_path / "mine.yaml").write_text(text)
    config = make_plan(str(tmp_path / "mine.yaml"), ["optim.warmup_steps=${train.num_steps}"]).plan.config
    assert (config.name, config.train.num_steps, config.optim.warmup_steps) == ("run-3-3", 20, 20)


@pytest.mark.parametrize(
    "grid",
    [
        f"seed=range(0,{HUGE})",
        f"seed=range(0,{HUGE},0.0001)",
        "seed=range(0,999) train.num_steps=range(1,999)",
    ],
)
def test_a_sweep_of_too_many_points_is_refused(grid, capsys):
    assert main(["sweep", "plan", "quickstart", *grid.split()]) == 2
    assert "a sweep has at most 1000 points. Give fewer values." in capsys.readouterr().err
