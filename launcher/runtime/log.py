"""Lines of a rank's own log."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Writes a line at once, and in one piece: two threads may write."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
