"""A rank's records, on a disk that they do not fill: steps become sums, window by window.

    write     sums/rank-N.jsonl   + header, evaluation, ...          rank-N.jsonl   + all of it, and steps
    window    sums/rank-N.jsonl   + window, brought to the disk
              rank-N.jsonl        renamed to whole/rank-N-..., the oldest there is removed; a new one begins

A rank may be killed between any two of these. A step is in the sums before the file that has it is renamed,
and a reader that finds it in both takes the sums.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from launcher.base.files import json_object, naming, write_whole
from launcher.base.timestamps import utc_stamp
from launcher.contract.job import records_name, sums_name, whole_name
from launcher.contract.records import KEPT_WINDOWS, Header, SegmentRecord, Start, newest_and_lost
from launcher.typed.read import plain


class RecordWriter:
    """Appends records to this rank's files, one whole line at a time."""

    def __init__(self, run_dir: Path, header: Header) -> None:
        self._run_dir, self._rank = run_dir, header.rank
        self._path, sums = run_dir / records_name(header.rank), run_dir / sums_name(header.rank)
        sums.parent.mkdir(exist_ok=True)
        if self._path.exists() and not sums.exists():
            write_whole(sums, _without_steps(self._path), is_durable=True)  # of a version without sums
        starts = _starts(sums, self._path)
        newest, lost = newest_and_lost(starts.values())
        self._start = max(starts, default=0) + 1
        self._sums, self._file = _opened(sums), _opened(self._path)
        self.write(replace(header, start=self._start, newest_step=newest, num_lost_steps=lost))

    def write(self, record: object, *, until_window: bool = False) -> None:
        """Appends a record of `launcher.contract.records`, or a role's own: a dataclass or a mapping with a
        ``type``.

        ``until_window``: a later window has the sums of it.
        """
        line = _line(record)
        with naming(self._path):
            if not until_window:
                self._sums.write(line)
            self._file.write(line)

    def end_window(self, windows: Sequence[object], newest_step: int) -> None:
        """Appends the sums of all that was written for a window since the last one. ``newest_step``: the last
        step of them; of another role than that of the trainers any number that ascends."""
        with naming(self._path):
            for window in windows:
                self._sums.write(_line(window))
            os.fsync(self._sums.fileno())
        self._file.close()
        whole = self._run_dir / whole_name(self._rank, self._start, newest_step)
        whole.parent.mkdir(exist_ok=True)
        self._path.rename(whole)
        self._file = _opened(self._path)
        self._file.write(_line(SegmentRecord(start=self._start, newest_step=newest_step)))
        for old in sorted(whole.parent.glob(f"rank-{self._rank:05d}-*"))[:-KEPT_WINDOWS]:
            old.unlink()

    def close(self) -> None:
        """Closes the files."""
        self._sums.close()
        self._file.close()


def _line(record: object) -> str:
    values: Any = record if isinstance(record, Mapping) else plain(record)
    return json.dumps({**values, "time": utc_stamp()}, separators=(",", ":")) + "\n"


def _opened(path: Path) -> TextIO:
    """A file to append to. A killed rank may have left half a line: it is kept apart from what follows."""
    was_cut = path.exists() and path.stat().st_size > 0 and _last_byte(path) != b"\n"
    file = path.open("a", encoding="utf-8", buffering=1)
    if was_cut:
        file.write("\n")
    return file


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read()


def _without_steps(path: Path) -> str:
    """The records of a file but for its steps and for half-written lines."""
    with path.open("rb") as file:
        kept = [line for line in file if (json_object(line) or {}).get("type") not in (None, "step")]
    return b"".join(kept).decode(errors="replace")


def _starts(*paths: Path) -> dict[int, Start]:
    """The starts that the rank has recorded, ascending by their number; the files are in the order in which
    they were written."""
    starts: dict[int, Start] = {}
    for path in filter(os.path.exists, paths):
        number = 0
        with path.open("rb") as file:
            for record in filter(None, map(json_object, file)):
                match record:
                    case {"type": "header"}:
                        number = record.get("start") or number + 1
                        newest, lost = record.get("newest_step"), record.get("num_lost_steps")
                        starts.setdefault(number, Start(newest_before=newest, lost_before=lost))
                    case {"type": "segment", "start": int(number)}:
                        pass
                    case {"type": "step", "step": int(step)}:
                        starts[number] = _with_steps(starts[number], step, step)
                    case {"type": "window", "first_step": int(first), "num_steps": int(num_steps)}:
                        starts[number] = _with_steps(starts[number], first, first + num_steps - 1)
    return dict(sorted(starts.items()))


def _with_steps(start: Start, first: int, last: int) -> Start:
    known = start.first_step
    return replace(start, first_step=first if known is None else min(first, known), last_step=last)
