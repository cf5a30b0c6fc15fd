"""What a run began with, and that with: written down by its first start, so that it is known when the
checkpoints, or the runs, are gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.base.files import read_json
from launcher.contract.config import TrainConfig
from launcher.contract.model.checkpoint import MARKER, source_checkpoint
from launcher.typed.read import Reading, read

LINEAGE = "lineage"
"""The entry of job.json."""


@dataclass(frozen=True, kw_only=True)
class Ancestor:
    """A checkpoint that a run began with."""

    run: str
    """Directory of its run."""
    step: int
    """Steps that were done."""
    takes_optimizer: bool
    """Whether the optimizer's state was taken over, too."""
    checkpoint_sha256: str
    """Of its marker, which holds the digests of all its indices; empty where it was not to be seen."""
    fingerprint: str
    """Of its run (`launcher.runs.fingerprint`); empty where it was not to be seen."""


def lineage_of(train: TrainConfig) -> tuple[Ancestor, ...]:
    """The checkpoint that a training begins with, then that which its run began with, and so on."""
    source = source_checkpoint(train)
    if source is None:
        return ()
    nearest = Ancestor(
        run=str(source.run_dir),
        step=source.step,
        takes_optimizer=train.init_optimizer,
        checkpoint_sha256=str(read_json(source.folder / MARKER).get("sha256", "")),
        fingerprint=str(read_json(source.run_dir / "job.json").get("fingerprint", "")),
    )
    return (nearest, *stored_lineage(source.run_dir))


def stored_lineage(run_dir: Path) -> tuple[Ancestor, ...]:
    """What a run wrote down."""
    found = read_json(run_dir / "job.json").get(LINEAGE)
    entries = found if isinstance(found, list) else []
    return tuple(ancestor for each in entries if (ancestor := read(Ancestor, each, Reading())))


def lineage_text(lineage: Sequence[Ancestor]) -> str:
    """As one sentence without its subject; empty for a run that began with no other.

    >>> old = Ancestor(run="a", step=40, takes_optimizer=True, checkpoint_sha256="", fingerprint="")
    >>> print(lineage_text([old]))
    began with the weights and the optimizer of a after step 40
    """
    parts = []
    for each in lineage:
        what = "the weights and the optimizer" if each.takes_optimizer else "the weights"
        parts.append(f"began with {what} of {each.run} after step {each.step}")
    return ", which ".join(parts)
