"""The wall clock as text, to find what is written beside what others log. Nothing is decided by it."""

from __future__ import annotations

import re
from datetime import UTC, datetime

_STAMP = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ")


def utc_stamp() -> str:
    """Now, by ISO 8601 in UTC with milliseconds, such as ``2025-01-02T03:04:05.678Z``."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def stamped(line: str) -> str:
    """A line of a log, with the time in front."""
    return f"{utc_stamp()} {line}"


def without_stamp(line: str) -> str:
    """A line of a log as it was before `stamped`.

    >>> without_stamp("2025-01-02T03:04:05.678Z resumed after step 3"), without_stamp("resumed")
    ('resumed after step 3', 'resumed')
    """
    return _STAMP.sub("", line)
