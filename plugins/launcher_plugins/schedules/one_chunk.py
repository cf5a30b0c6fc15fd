"""The rule of every schedule that does not interleave."""

from __future__ import annotations

from collections.abc import Iterable

from launcher.interfaces import Fault, PipelineShape


def one_chunk_faults(schedule: str, shape: PipelineShape) -> Iterable[Fault]:
    """The fault of more than one model chunk per rank; ``schedule`` is the name that was chosen."""
    if shape.num_chunks > 1:
        yield Fault(
            "parallel.num_chunks",
            shape.num_chunks,
            f"{schedule} runs one model chunk per pipeline rank",
            ways=({"parallel.num_chunks": 1}, {"parallel.schedule": "interleaved_1f1b"}),
        )
