"""What a run was started with: the first start writes it down, and those that resume it compare."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.base.errors import Fault
from launcher.base.files import read_json, write_whole
from launcher.base.units import counted
from launcher.typed.read import Reading, read

INPUTS = "inputs.json"
"""In the run directory."""
UNKNOWN = (
    f"the run has no {INPUTS} with the data and the code that it was started with: changes before this start "
    "are not found, later ones are"
)
ACCEPT = "--accept-changed-inputs"
"""The flag to go on with other ones."""
_SHA256 = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")
_MAX_LISTED = 5


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Digests by name."""

    data: Mapping[str, str]
    """Of each text file, or of some items of a user's own dataset."""
    code: Mapping[str, str]
    """Of each file of the user's modules."""
    num_blocks: int
    """As `launcher.contract.inputs.text.file_digests` was given it."""

    def changes(self, new: Inputs) -> list[str]:
        """What differs, each with both digests.

        >>> old = Inputs(data={"a.txt": "1"}, code={"b.py": "2"}, num_blocks=1)
        >>> old.changes(Inputs(data={}, code={"b.py": "3"}, num_blocks=1))
        ['data a.txt (1 -> missing)', 'code b.py (2 -> 3)']
        """
        return [
            f"{kind} {name} ({_text(ours.get(name))} -> {_text(theirs.get(name))})"
            for kind, ours, theirs in (("data", self.data, new.data), ("code", self.code, new.code))
            for name in dict.fromkeys((*ours, *theirs))
            if ours.get(name) != theirs.get(name)
        ]


def _text(digest: str | None) -> str:
    return "missing" if digest is None else _SHA256.sub(r"\1", digest)


def read_inputs(run_dir: Path) -> Inputs | None:
    """What a run was started with; None where that is not there, or damaged."""
    return read(Inputs, read_json(run_dir / INPUTS), Reading())


def write_inputs(run_dir: Path, inputs: Inputs) -> None:
    """Writes down what a run is started with."""
    write_whole(run_dir / INPUTS, json.dumps(asdict(inputs), indent=1) + "\n")


def refusal(run_dir: str, changed: Sequence[str], command: str) -> Fault:
    """Why a run is not resumed, and the ``command`` that resumes it."""
    more = f", and {len(changed) - _MAX_LISTED} more" if len(changed) > _MAX_LISTED else ""
    listed = f"{', '.join(changed[:_MAX_LISTED])}{more}"
    rule = f"cannot resume: {counted(len(changed), 'input')} changed since it was started: {listed}"
    fix = f"Put back what it was started with, or go on all the same: {command}"
    return Fault("run.dir", run_dir, rule, fix)


def resume_command(run_dir: Path) -> str:
    """The command that resumes a recorded run although its inputs have changed."""
    if (run_dir.parent / "sweep.json").is_file():
        return shlex.join(("trireme", "sweep", "retry", str(run_dir.parent), ACCEPT))
    job = read_json(run_dir / "job.json")
    # A baseline is recorded with the overrides of its parent, and with that one's place.
    overrides = [word for word in job.get("overrides", []) if word.lstrip("+").partition("=")[0] != "run.dir"]
    verb = "submit" if (run_dir / "source").is_dir() else "run"
    return shlex.join(
        ("trireme", verb, job.get("recipe", ""), *overrides, f"run.dir={run_dir}", "--resume", ACCEPT)
    )
