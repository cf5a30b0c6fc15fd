"""Reads the records of one rank, strictly: a record that contradicts itself is refused."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.base.errors import ConfigError, LauncherError
from launcher.base.files import json_object, read_regular
from launcher.contract.job import records_name, sums_name, whole_name
from launcher.contract.records import (
    VERSION,
    EvalRecord,
    Header,
    MemoryRecord,
    RoleRecord,
    Start,
    StepRecord,
    WindowRecord,
    newest_and_lost,
)
from launcher.metrics.problems import Later, problem_of
from launcher.typed.read import read_or_raise

_KINDS: Mapping[Any, type[StepRecord | EvalRecord | MemoryRecord | WindowRecord]] = {
    "step": StepRecord,
    "eval": EvalRecord,
    "memory": MemoryRecord,
    "window": WindowRecord,
}
"""What follows the header of a rank that trains, by ``type``."""
TRAINER = "trainer"
"""Role of the ranks that hold the model and make steps."""


@dataclass(kw_only=True)
class RankStart:
    """What a rank recorded in one start."""

    header: Header
    steps: dict[int, StepRecord] = field(default_factory=dict)
    """Not in the sums, as far as this rank knows."""
    windows: dict[int, WindowRecord] = field(default_factory=dict)
    """By their last step, ascending."""
    summed_to: int = -1
    """The step before those of its file: up to there windows must reach."""
    memory: MemoryRecord | None = None
    of_role: list[RoleRecord] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether no work was recorded."""
        return not (self.steps or self.windows or self.of_role)

    @property
    def first_step(self) -> int | None:
        """The first step that is known of it."""
        firsts = (min(self.steps, default=None), *(window.first_step for window in self.windows.values()))
        return min((first for first in firsts if first is not None), default=None)

    @property
    def last_step(self) -> int:
        """The last step that it has made; -1: none."""
        return max((*self.windows, *self.steps), default=-1)

    @property
    def num_steps(self) -> int:
        """Steps that it has made: they follow each other."""
        first = self.first_step
        return 0 if first is None else self.last_step + 1 - first


@dataclass(kw_only=True)
class RankFiles:
    """The records of one rank."""

    run_dir: Path
    path: Path
    """The file that is told in messages."""
    starts: dict[int, RankStart] = field(default_factory=dict)
    """By number."""
    evals: dict[int, EvalRecord] = field(default_factory=dict)
    num_torn_lines: int = 0
    chosen: int = 0
    """The number of the start that is reported: the newest."""

    @property
    def start(self) -> RankStart:
        """The start that is reported."""
        return self.starts[self.chosen]

    @property
    def header(self) -> Header:
        """Of that start."""
        return self.start.header

    @property
    def num_lost_steps(self) -> int:
        """Steps that were made, lost with the start that made them, and made again or still to be."""
        starts = (
            Start(
                newest_before=start.header.newest_step,
                lost_before=start.header.num_lost_steps,
                first_step=start.first_step,
                last_step=start.last_step,
            )
            for _, start in sorted(self.starts.items())
        )
        return newest_and_lost(starts)[1]

    def leave_out_empty_start(self) -> None:
        """Goes back to the start before the newest, where that recorded no work and an earlier one did."""
        if self.start.is_empty:
            earlier = [number for number, start in self.starts.items() if not start.is_empty]
            self.chosen = max(earlier, default=self.chosen)

    def whole_steps(self, window: WindowRecord) -> dict[int, StepRecord]:
        """The steps of a window, where they are kept."""
        wanted = self.run_dir / whole_name(self.header.rank, self.chosen, window.step)
        kept = sorted(wanted.parent.glob(f"{wanted.name.rpartition('-')[0]}-*"))
        path = next((path for path in kept if path.name >= wanted.name), None)
        text = None if path is None else _text_of(path)
        if path is None or text is None:
            return {}
        start = RankStart(header=self.header)
        _read_text(RankFiles(run_dir=self.run_dir, path=path, starts={self.chosen: start}), path, text, set())
        return {step: row for step, row in start.steps.items() if window.first_step <= step <= window.step}


def rank_files(run_dir: Path) -> list[RankFiles]:
    """The records of every rank, ascending.

    Raises:
        LauncherError: a broken line (with file and line), another version, a rank that wrote no header.
    """
    paths = [run_dir / name(0) for name in (records_name, sums_name)]
    names = sorted({path.name for first in paths for path in first.parent.glob("rank-*.jsonl")})
    found = [_read_rank(run_dir, *(path.with_name(name) for path in paths)) for name in names]
    return sorted(found, key=lambda files: files.header.rank)


def _read_rank(run_dir: Path, path: Path, sums: Path) -> RankFiles:
    files = RankFiles(run_dir=run_dir, path=path)
    known: set[bytes] = set()
    # The sums last: a run that goes on may just end a window, and then has the steps in both.
    texts = {each: text for each in (path, sums) if (text := _text_of(each)) is not None}
    for each in (sums, path):
        if each in texts:
            _read_text(files, each, texts.pop(each), known)
    if not files.starts:
        raise broken(path, 1, "no header: the rank ended before it had written one")
    for start in files.starts.values():
        if start.header.role == TRAINER and start.summed_to > max(start.windows, default=-1):
            raise LauncherError(
                f"{sums}: no window ends with step {start.summed_to}, but {path} begins after it"
            )
    files.chosen = max(files.starts)
    return files


def _text_of(path: Path) -> bytes | None:
    """What is in a file; None: there is none.

    Raises:
        LauncherError: when it cannot be read.
    """
    try:
        return read_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LauncherError(f"{path} cannot be read: {error}") from error


def _read_text(files: RankFiles, path: Path, text: bytes, known: set[bytes]) -> None:
    """Adds the records of a file. ``known``: the lines of an earlier one, and then also of this one."""
    start: RankStart | None = None
    number_of_start, lines = 0, set()
    for number, line, values in _lines(files, path, text):
        lines.add(line)
        if values.get("type") == "header":
            header = _header(path, number, values)
            number_of_start = header.start or number_of_start + 1
            start = files.starts.setdefault(number_of_start, RankStart(header=header))
        elif values.get("type") == "segment":
            start = next((files.starts[n] for n in files.starts if n == values.get("start")), None)
            if start is not None and type(newest := values.get("newest_step")) is int:
                start.summed_to = newest
        elif start is None:
            raise broken(path, number, "the first record must be the header")
        elif line not in known:
            _add(files, start, path, number, values)
    known |= lines


def _lines(files: RankFiles, path: Path, text: bytes) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """The records with their line numbers and lines; lines that were left half written are counted.

    A killed rank leaves half a line at the end of its file; when the rank is started again, a
    header follows it. A broken line anywhere else is damage.
    """
    lines = text.split(b"\n")
    for number, line in enumerate(lines, 1):
        if (values := json_object(line)) is not None:
            yield number, line, values
        elif number == len(lines):
            files.num_torn_lines += line != b""
        elif (json_object(lines[number]) or {}).get("type") == "header":
            files.num_torn_lines += 1
        else:
            raise broken(path, number, "not a JSON object")


def broken(path: Path, number: int, problem: str) -> LauncherError:
    """The error of a line."""
    return LauncherError(f"{path}:{number}: {problem}")


def _header(path: Path, number: int, values: dict[str, Any]) -> Header:
    if values.get("version") != VERSION:
        raise broken(
            path, number, f"records of version {values.get('version')}, this launcher reads {VERSION}"
        )
    try:
        return read_or_raise(Header, values)
    except ConfigError as error:
        raise broken(path, number, str(error)) from error


def _add(files: RankFiles, start: RankStart, path: Path, number: int, values: dict[str, Any]) -> None:
    """Adds a later record. Checked by hand: there are too many for the typed reader."""
    kind = _KINDS.get(values.get("type"))
    record: Later
    if kind is None and start.header.role != TRAINER:
        values.pop("time", None)
        record = RoleRecord(type=str(values.pop("type", None)), values=values)
    elif kind is None:
        known = ", ".join(("header", *_KINDS))
        raise broken(path, number, f"type {values.get('type')!r} is none of {known}")
    else:
        try:
            record = kind(**values)
        except TypeError as error:
            raise broken(path, number, str(error)) from error
    if problem := problem_of(record):
        raise broken(path, number, problem)
    if isinstance(record, StepRecord | WindowRecord):
        try:
            record = replace(record, **_packed(values))
        except OverflowError:
            raise broken(path, number, "a time is longer than 292 years") from None
    if isinstance(record, EvalRecord):
        files.evals[record.step] = record
    elif isinstance(record, MemoryRecord):
        start.memory = record
    elif isinstance(record, RoleRecord):
        start.of_role.append(record)
    elif isinstance(record, WindowRecord):
        if start.windows and record.first_step != (last := max(start.windows)) + 1:
            raise broken(
                path, number, f"the window from step {record.first_step} does not follow step {last}"
            )
        start.windows[record.step] = record
    elif record.step in start.steps:
        raise broken(path, number, f"step {record.step} is recorded twice in one start")
    else:
        start.steps[record.step] = record


def _packed(values: dict[str, Any]) -> dict[str, Any]:
    """Times in less memory: of long runs there are hundreds of thousands."""
    packed: dict[str, Any] = {"compute_ns": array("q", values["compute_ns"]), "time": ""}
    for name in {"kinds_ns", "shortest_ns"} & values.keys():
        packed[name] = {sys.intern(kind): time for kind, time in values[name].items()}
    if calls := values.get("collectives_ns"):
        packed["collectives_ns"] = {sys.intern(kind): array("q", times) for kind, times in calls.items()}
    return packed
