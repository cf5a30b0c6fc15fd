"""``trireme help``: pages in the terminal."""

from __future__ import annotations

import pytest

from launcher.cli.help import as_text
from launcher.cli.main import main
from launcher.cli.verbs import TOPICS, VERBS


def test_help_lists_the_verbs_and_the_topics(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    printed = capsys.readouterr().out
    assert [name for name in (*VERBS, *TOPICS) if f"\n  {name} " not in printed] == []


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_is_shown_as_plain_text(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", topic]) == 0
    printed = capsys.readouterr().out
    title, underline, *rest = printed.splitlines()
    assert underline == "=" * len(title)
    assert "\x1b" not in printed
    prose = [line for line in rest if not line.startswith("    ")]
    assert [line for line in prose if "`" in line or "](" in line or line.startswith("#")] == []


def test_a_code_block_stays_as_it_is() -> None:
    assert as_text("    # a `b` [c](d)\n") == "    # a `b` [c](d)\n"


def test_a_section_of_a_page_is_shown_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "conf", "parallel"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("parallel\n--------\n")
    assert "parallel.zero_stage=0" in printed
    assert "optim.lr" not in printed


def test_help_of_a_verb_is_that_of_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "plan"]) == 0
    of_topic = capsys.readouterr().out
    assert main(["plan", "--help"]) == 0
    assert of_topic == capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slrum"], "no topic is called 'slrum'. Did you mean slurm?\n"),
        (["plna"], "no topic is called 'plna'. Did you mean plan?\n"),
        (["slurm", "contaners"], "no section is called 'contaners'. Did you mean Containers?\n"),
    ],
)
def test_an_unknown_topic_or_section_names_the_nearest(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["help", *words]) == 2
    assert capsys.readouterr() == ("", message)
