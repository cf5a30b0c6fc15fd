"""Action lists for tests of schedules."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.contract.actions import Action, PipelineShape
from launcher.schedule.dependencies import DependencyGraph
from launcher.schedule.passes import deadlines, with_messages


def add_communication(
    compute: Sequence[Sequence[Action]], shape: PipelineShape, depth: int
) -> tuple[tuple[Action, ...], ...]:
    """A send after every producer, and every receive ``depth`` compute actions ahead."""
    graph = DependencyGraph.of(compute, shape)
    return with_messages(compute, graph, deadlines(graph), depth)
