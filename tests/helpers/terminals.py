"""A command on a terminal, with somebody who answers its question."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

END_OF_INPUT = "\x04"
"""What Ctrl-D sends."""


def answered(words: Sequence[str], cwd: Path, answer: str, **variables: str) -> tuple[int, str]:
    """Exit code and all that is printed of ``trireme`` with these words; each question gets the answer."""
    main_end, other_end = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "launcher", *words],
        cwd=cwd,
        stdin=other_end,
        stdout=other_end,
        stderr=other_end,
        env=os.environ | {"TERM": "dumb"} | variables,
    ) as process:
        os.close(other_end)
        printed = b""
        with suppress(OSError):  # the other end is closed
            while new := os.read(main_end, 65536):
                printed += new
                if new.endswith(b"[y/N] "):
                    os.write(main_end, answer.encode())
    os.close(main_end)
    return process.returncode, printed.decode().replace("\r\n", "\n")
