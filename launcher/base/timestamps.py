"""The wall clock, to find what is written beside what others log; and one that no setting of the clock moves.

Wall time is only written. What is decided by time is decided by `time.monotonic`, or where processes compare
their times by `steady_time`.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime

_BEGIN_S = time.time() - time.monotonic()


def steady_time() -> float:
    """Seconds since 1970, by the wall clock as it was when this process began, and from then on by the
    monotonic one: it never goes back."""
    return _BEGIN_S + time.monotonic()


def utc_stamp() -> str:
    """Now, by ISO 8601 in UTC with milliseconds, such as ``2025-01-02T03:04:05.678Z``."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def stamped(line: str) -> str:
    """A line of a log, with the time in front."""
    return f"{utc_stamp()} {line}"
