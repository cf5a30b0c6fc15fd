import io
import os
import pty
import subprocess
import sys
from contextlib import suppress
from importlib import metadata

import pytest

from launcher.base.errors import LauncherError
from launcher.cli import main as command
from launcher.cli import terminal
from launcher.cli.main import main
from launcher.cli.verbs import VERBS
from tests.helpers.objects import there

NO_HOME = """
import os, pwd, sys

def unknown(uid):
    raise KeyError(uid)

pwd.getpwuid = unknown
for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
    os.environ.pop(name, None)
from launcher.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_verb(words, capsys):
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert all(f"  {verb} " in printed for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb, capsys):
    assert main([verb, "--help"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"trireme {verb}")
    assert f"\n  trireme {verb}" in printed
    assert all(f"--{flag.name}" in printed and flag.help[:40] in printed for flag in VERBS[verb].flags)


def test_unknown_verb_names_the_nearest_without_a_traceback(capsys):
    assert main(["rnu", "quickstart"]) == 2
    assert capsys.readouterr().err == "unknown verb 'rnu'. Did you mean run?\n"


def test_the_version_is_that_of_the_distribution(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"trireme {metadata.version('trireme-launcher')}\n"


@pytest.mark.parametrize(
    ("word", "command"),
    [
        ("quickstart", "trireme run quickstart"),
        ("./mine.yaml", "trireme run ./mine.yaml"),
        ("my own.yml", "trireme run 'my own.yml'"),
    ],
)
def test_a_recipe_where_a_verb_should_stand_is_answered_with_the_command(word, command, capsys):
    assert main([word, "parallel.tp=2"]) == 2
    assert capsys.readouterr().err == f"unknown verb {word!r}. Did you mean: {command} parallel.tp=2?\n"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--config-name", "A recipe is a word of its own, without the flag: quickstart."),
        ("--verison", "Did you mean --version?"),
        ("-x", "Known: --version, --help."),
    ],
)
def test_a_flag_where_a_verb_should_stand_is_answered_as_a_flag(word, hint, capsys):
    assert main([word, "quickstart"]) == 2
    assert capsys.readouterr().err == f"unknown flag {word}. {hint}\n"


def test_a_launcher_error_is_printed_as_its_text_alone(capsys, monkeypatch):
    def fail(words):
        raise LauncherError("pp=3: no. Set pp=4.")

    monkeypatch.setattr(command, "_dispatch", fail)
    assert main(["plan"]) == 2
    assert capsys.readouterr() == ("", "pp=3: no. Set pp=4.\n")


def test_ctrl_c_before_any_rank_runs_is_one_line(capsys, monkeypatch):
    def interrupt(words):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_dispatch", interrupt)
    assert main(["plan"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_a_reader_that_goes_away_gets_no_traceback():
    script = "import sys\nfrom launcher.cli.main import main\nsys.exit(main(['--help']))"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        there(process.stdout).close()
        assert there(process.stderr).read() == b""
    assert process.returncode == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "launcher", "--help"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (2, "No space left on device\n")


def test_a_folder_that_may_not_be_read_is_one_line(capsys, monkeypatch):
    def fail(words):
        raise PermissionError(13, "Permission denied", "/root/x\x1b")

    monkeypatch.setattr(command, "_dispatch", fail)
    monkeypatch.setattr(command, "_drop_output", lambda: None)
    assert main(["plan"]) == 2
    assert capsys.readouterr() == ("", "/root/x\\x1b: Permission denied\n")


def test_an_error_shows_no_secret_and_no_control_character_and_its_notes_first(capsys, monkeypatch):
    def fail(words):
        error = LauncherError("unknown flag --env.HF_TOKEN=abc123.\nab\x1b[31m")
        error.add_note("a.yaml is used and hides b.yaml")
        raise error

    monkeypatch.setattr(command, "_dispatch", fail)
    assert main(["plan"]) == 2
    assert capsys.readouterr().err == (
        "note: a.yaml is used and hides b.yaml\nunknown flag --env.HF_TOKEN=***.\nab\\x1b[31m\n"
    )


def test_output_in_an_encoding_without_the_characters_is_ascii(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1", write_through=True))
    terminal.protect_output()
    print("│ 2 → 4 │ é \udcff")
    assert raw.getvalue() == "| 2 -> 4 | é \\xff\n".encode("latin-1")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_a_closed_output_or_input_is_no_traceback(closed, tmp_path):
    command = f"{sys.executable} -m launcher plan quickstart {closed}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "words", [["plan", "quickstart"], ["status"], ["status", "~nosuch/run"], ["site", "check", "alps"]]
)
def test_a_user_without_a_home_folder_is_no_traceback(words, tmp_path):
    """As in a container that runs under a number that its system does not know."""
    command = [sys.executable, "-c", NO_HOME, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


def on_a_terminal(words, cwd, **variables):
    """What the command prints on a terminal."""
    main_end, other_end = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "TERM")}
    command = [sys.executable, "-m", "launcher", *words]
    with subprocess.Popen(
        command, cwd=cwd, stdin=other_end, stdout=other_end, stderr=other_end, env=environment | variables
    ):
        os.close(other_end)
        printed = b""
        with suppress(OSError):  # the other end is closed
            while new := os.read(main_end, 65536):
                printed += new
    os.close(main_end)
    return printed.decode()


@pytest.mark.parametrize(
    ("variables", "is_colored"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"NO_COLOR": ""}, True)],
)
def test_a_plan_is_colored_on_a_terminal_that_takes_it(variables, is_colored, tmp_path):
    assert ("\x1b[" in on_a_terminal(["plan", "quickstart"], tmp_path, **variables)) is is_colored


def test_what_a_rank_has_printed_cannot_steer_the_terminal(tmp_path):
    run = tmp_path / "runs" / "x"
    (run / "logs").mkdir(parents=True)
    (run / "job.json").write_text("{}")
    (run / "logs" / "rank-0.log").write_text("10%\r20%\r\n\x1b[2J\x1b]0;title\x07\ttab\n")
    assert on_a_terminal(["logs", "x"], tmp_path).splitlines() == [
        "rank 0: 10%",
        "rank 0: 20%",
        "rank 0: \\x1b[2J\\x1b]0;title\\x07\ttab",
    ]
