"""Writes a timeline as a table for spreadsheets and data frames."""

from __future__ import annotations

from launcher.schedule.simulate import Timeline

COLUMNS = ("stage", "kind", "microbatch", "pp_rank", "start_s", "end_s")


def csv_text(timeline: Timeline) -> str:
    """A header and a line for each action, rank after rank, in the order of time.

    >>> from launcher.schedule.actions import PipelineShape, from_text
    >>> from launcher.schedule.simulate import simulate, textbook_costs
    >>> shape = PipelineShape(num_pp_ranks=1)
    >>> costs = textbook_costs(shape, splits_backward=False)
    >>> print(csv_text(simulate([from_text("0F0 0B0")], shape, costs)), end="")
    stage,kind,microbatch,pp_rank,start_s,end_s
    0,F,0,0,0.0,1.0
    0,B,0,0,1.0,3.0
    """
    lines = [",".join(COLUMNS)]
    for rank, spans in enumerate(timeline.spans):
        lines += [
            f"{stage},{kind},{microbatch},{rank},{start!r},{end!r}"
            for (stage, kind, microbatch), start, end in spans
        ]
    return "\n".join(lines) + "\n"
