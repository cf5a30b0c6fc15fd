"""Writes a timeline as CSV, or as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Of a trace: a thread per pp_rank, a slice per action, an arrow per message between ranks;
times in microseconds.

Source: Trace Event Format (the Chromium project): metadata, complete and flow events.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from launcher.contract.actions import B, F, PipelineShape, W
from launcher.schedule.simulate import Timeline

_JUST_BEFORE_S = 1e-9
"""An arrow begins this long before its slice ends, or it would be attached to the next slice."""
_CATEGORIES = {F: "forward", B: "backward", W: "weight gradients"}
_MESSAGES = {F: "activation", B: "gradient"}

Event = dict[str, Any]
COLUMNS = ("stage", "kind", "microbatch", "pp_rank", "start_s", "end_s")


def trace_text(timeline: Timeline, shape: PipelineShape, *, title: str) -> str:
    """The trace as JSON, one event a line.

    >>> from launcher.contract.actions import from_text
    >>> from launcher.schedule.simulate import Costs, simulate
    >>> shape = PipelineShape(num_pp_ranks=1)
    >>> timeline = simulate([from_text("0F0 0B0")], shape, Costs(forward_s=(1e-3,), backward_s=(2e-3,)))
    >>> event = json.loads(trace_text(timeline, shape, title="one"))["traceEvents"][-1]
    >>> event["name"], event["ph"], event["tid"], event["ts"], event["dur"]
    ('0B0', 'X', 0, 1000.0, 2000.0)
    """
    events = [*_names(title, shape.num_pp_ranks), *_slices(timeline, shape), *_arrows(timeline, shape)]
    lines = ",\n".join(json.dumps(event) for event in events)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


def _names(title: str, num_ranks: int) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": title}}
    for rank in range(num_ranks):
        thread = {"ph": "M", "pid": 0, "tid": rank}
        yield {**thread, "name": "thread_name", "args": {"name": f"pp_rank {rank}"}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": rank}}


def _slices(timeline: Timeline, shape: PipelineShape) -> Iterator[Event]:
    for rank, spans in enumerate(timeline.spans):
        for action, start, end in spans:
            chunk = shape.chunk(action.stage)
            yield {
                "ph": "X",
                "name": str(action),
                "cat": _CATEGORIES[action.kind],
                "pid": 0,
                "tid": rank,
                "ts": _microseconds(start),
                "dur": _microseconds(end - start),
                "args": {"stage": action.stage, "chunk": chunk, "microbatch": action.microbatch},
            }


def _arrows(timeline: Timeline, shape: PipelineShape) -> Iterator[Event]:
    """From each forward and backward whose result another rank needs, to the action that needs it."""
    starts = {action: start for spans in timeline.spans for action, start, _ in spans}
    number = 0
    for rank, spans in enumerate(timeline.spans):
        for action, start, end in spans:
            needed_by = action._replace(stage=action.stage + {F: 1, B: -1, W: 0}[action.kind])
            if needed_by not in starts or shape.pp_rank(needed_by.stage) == rank:
                continue
            arrow = {"name": _MESSAGES[action.kind], "cat": "message", "id": number, "pid": 0}
            leaves, arrives = max(start, end - _JUST_BEFORE_S), starts[needed_by]
            receiver = shape.pp_rank(needed_by.stage)
            yield {**arrow, "ph": "s", "tid": rank, "ts": _microseconds(leaves)}
            yield {**arrow, "ph": "f", "bp": "e", "tid": receiver, "ts": _microseconds(arrives)}
            number += 1


def _microseconds(seconds: float) -> float:
    """Rounded to the resolution of the format."""
    return round(seconds * 1e6, 3)


def csv_text(timeline: Timeline) -> str:
    """A header and a line for each action, rank after rank, in the order of time.

    >>> from launcher.contract.actions import PipelineShape, from_text
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
