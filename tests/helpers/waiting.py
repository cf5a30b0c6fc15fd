"""Waiting for what is meant, however long a busy machine takes for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object], what: str = "what it waits for", timeout_s: float = 300
) -> None:
    """Returns when the condition holds. The timeout is that of a fault: nothing here is so slow."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {timeout_s:g} s"
        time.sleep(0.02)


def at_this_load(idle_s: float) -> float:
    """How long what takes at most ``idle_s`` on an idle machine may take now that others compute, too."""
    return idle_s * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
