"""Where the application says what it does: on two streams, which a program may replace."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from launcher.base.redaction import escaped
from launcher.base.timestamps import stamped
from launcher.runs.watch import surviving_lost_output

_MAX_WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class Output:
    """The streams for what happens and for what goes wrong.

    ``Output(out=io.StringIO(), err=io.StringIO())`` keeps what is said from the terminal.
    """

    out: TextIO | None = None
    """None: the standard output of this process."""
    err: TextIO | None = None
    """None: the standard error of this process."""
    goes_on: bool = False
    """Whether what is done goes on where the reader of these streams has gone, as a training does."""

    @property
    def stream(self) -> TextIO:
        """The stream for what happens; a line that is redrawn goes there, too."""
        return self.out or sys.stdout

    def say(self, text: str) -> None:
        """Prints what happens, at once."""
        with surviving_lost_output(reader=self.goes_on):
            print(text, file=self.stream, flush=True)

    def event(self, text: str) -> None:
        """Prints what happens now: with the time, where it goes to a file."""
        self.say(text if takes_control(self.stream) else stamped(text))

    def warn(self, text: str) -> None:
        """Prints what goes wrong, at once; it may quote what others have printed."""
        with surviving_lost_output(reader=self.goes_on):
            print(escaped(text), file=self.err or sys.stderr, flush=True)


TERMINAL = Output()
"""Says everything on the streams of this process."""


def takes_control(stream: TextIO) -> bool:
    """Whether a stream is a terminal on which a line can be redrawn."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def takes_color(stream: TextIO) -> bool:
    """Whether a stream is a terminal that shows colors (https://no-color.org)."""
    return takes_control(stream) and not os.environ.get("NO_COLOR")


def shown(path: Path) -> str:
    """A path as short as it can be read from the current folder."""
    here = os.path.relpath(path)
    return str(path) if here.startswith("..") else here


def text_width() -> int:
    """Columns for a table or a drawing."""
    return min(shutil.get_terminal_size((_MAX_WIDTH, 24)).columns, _MAX_WIDTH)
