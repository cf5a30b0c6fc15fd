"""Completes real lines in real shells: what is typed, then TAB, then what the shell makes of the line."""

import fcntl
import os
import pty
import re
import select
import shlex
import shutil
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress

import pytest

PROMPT = "READY> "
TIMEOUT_S = 30
COMMANDS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
POSIX_TRIREME = """
trireme() {{
  if [ "$1" = __complete ]; then {python} -m launcher "$@"; else printf 'WORDS '; printf '<%s>' "$@"; echo; fi
}}
"""
START = {
    "bash": POSIX_TRIREME + "bind 'set enable-bracketed-paste off'\nsource {script}\nPS1='READY''> '\n",
    "zsh": POSIX_TRIREME
    + "autoload -U compinit; compinit -u -D; unsetopt prompt_sp\n"
    + "source {script}\nunset zle_bracketed_paste; PROMPT='READY''> '\n",
    "fish": """
set -g fish_autosuggestion_enabled 0
function fish_title; end
function trireme
  if test "$argv[1]" = __complete
    {python} -m launcher $argv
  else
    printf 'WORDS '; printf '<%s>' $argv; echo
  end
end
source {script}
function fish_prompt; printf 'READY''> '; end
""",
}
"""Makes ``trireme`` print its words, each in angle brackets, apart from its answers."""


class Shell:
    """An interactive shell behind a pseudo-terminal."""

    def __init__(self, name, folder):
        self.printed, self.folder, self.is_open = "", folder, False
        start = folder.parent / f"start.{name}"
        script = folder.parent / f"trireme.{name}"
        printed = subprocess.run(
            [sys.executable, "-m", "launcher", "completion", name], capture_output=True, text=True, check=True
        )
        script.write_text(printed.stdout)
        words = {"python": shlex.quote(sys.executable), "script": shlex.quote(str(script))}
        start.write_text(START[name].format(**words))
        pid, self.terminal = pty.fork()
        if not pid:
            environment = {**os.environ, "TERM": "dumb", "HOME": str(folder.parent)}
            os.chdir(folder)
            os.execvpe(COMMANDS[name][0], COMMANDS[name], environment)
        self.pid = pid
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("4H", 100, 400, 0, 0))
        self.type(f"source {shlex.quote(str(start))}\r")
        self.read_until(PROMPT)

    def type(self, text):
        os.write(self.terminal, text.encode())

    def read_until(self, pattern):
        """What matches in what is printed from here on; fails when it does not come."""
        deadline = time.monotonic() + TIMEOUT_S
        while (found := re.search(pattern, self.printed)) is None:
            ready, _, _ = select.select([self.terminal], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"{pattern!r} did not come; printed was {self.printed!r}"
            self.printed += os.read(self.terminal, 4096).decode(errors="replace")
        self.printed = self.printed[found.end() :]
        return found

    def completed(self, line):
        """The words that the line has after TAB, each in angle brackets."""
        assert not self.is_open, "an earlier line has not ended"
        self.is_open = True
        self.type(f"{line}\t\r")
        words = self.read_until(r"WORDS (.*)\r*\n")[1].rstrip("\r")
        self.read_until(PROMPT)
        self.is_open = False
        return words

    def close(self):
        os.close(self.terminal)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


@pytest.fixture(scope="module", params=list(COMMANDS))
def shell(request, tmp_path_factory):
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    folder = tmp_path_factory.mktemp(request.param) / "here"
    folder.mkdir()
    for name in (
        "my recipe.yaml",
        "$(touch hacked).yaml",
        "a;touch hacked.yaml",
        "k=v:w.yaml",
        "`x`'\"q.yaml",
        "new\nline.yaml",
        "bang!x.yaml",
    ):
        (folder / name).touch()
    for name in ("runs/quickstart-20250102-030405/job.json", "runs/of a sweep/sweep.json", "../office/x"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    opened = Shell(request.param, folder)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("trireme rec", "<recipe>"),
        ("trireme sweep ret", "<sweep><retry>"),
        ("trireme plan quick", "<plan><quickstart>"),
        ("trireme plan quickstart model=gpt2_", "<plan><quickstart><model=gpt2_124m>"),
        ("trireme plan parallel.sched", "<plan><parallel.schedule>"),
        ("trireme plan precision.compute=bf", "<plan><precision.compute=bf16>"),
        ("trireme plan --dr", "<plan><--draw>"),
        ("trireme sweep best --by=lo", "<sweep><best><--by=loss>"),
        ("trireme plan my", "<plan><my recipe.yaml>"),
        ('trireme plan data.source="my r', "<plan><data.source=my recipe.yaml>"),
        ("trireme plan ~/of", "<plan><{home}/office/>"),
        ("trireme report quick", "<report><quickstart-20250102-030405>"),
        ("trireme report runs/qu", "<report><runs/quickstart-20250102-030405>"),
        ("trireme sweep best of", "<sweep><best><of a sweep>"),
        ("trireme wait of\\ a\\ s", "<wait><of a sweep>"),
        ("trireme plan \\`", "<plan><`x`'\"q.yaml>"),
        ("trireme plan \\$", "<plan><$(touch hacked).yaml>"),
        ("trireme plan a\\;", "<plan><a;touch hacked.yaml>"),
        ("trireme plan ./k", "<plan><./k=v:w.yaml>"),
        ("trireme plan 'my ", "<plan><my recipe.yaml>"),
        ('trireme plan "bang', "<plan><bang!x.yaml>"),
        ("trireme plan bang\\!", "<plan><bang!x.yaml>"),
        ("trireme plan my\\ r", "<plan><my recipe.yaml>"),
    ],
)
def test_a_line_is_completed_and_nothing_in_a_name_is_run(shell, line, words):
    assert shell.completed(line) == words.format(home=shell.folder.parent)
    assert not (shell.folder / "hacked").exists()
