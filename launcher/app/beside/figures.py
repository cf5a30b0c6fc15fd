"""The figures of a run in Prometheus' text format, as node_exporter's textfile collector reads it.

Source: https://prometheus.io/docs/instrumenting/exposition_formats, version 0.0.4.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from launcher.app.life import lost_s, starts_of
from launcher.app.progress import RunTail, StepView, reporting_records
from launcher.base.files import read_json
from launcher.contract.alarms.events import ALARMS, count_alarms, read_events
from launcher.contract.job import JobState, Phase
from launcher.contract.model.checkpoint import first_step
from launcher.contract.plan import Plan
from launcher.runs.store import RunDirectory, saved_steps


@dataclass(frozen=True, kw_only=True)
class Family:
    """A metric with its samples."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    samples: Sequence[tuple[Mapping[str, str], float]] = field(default_factory=tuple)
    """Labels and value."""


def text_of(families: Sequence[Family]) -> str:
    r"""The families as text; one without samples is left out.

    >>> print(text_of([Family(name="a", kind="gauge", help="A.", samples=[({"run": 'x"\n'}, 2)])]), end="")
    # HELP a A.
    # TYPE a gauge
    a{run="x\"\n"} 2
    """
    lines = []
    for each in families:
        if each.samples:
            lines += [f"# HELP {each.name} {each.help}", f"# TYPE {each.name} {each.kind}"]
            lines += [f"{each.name}{{{_labels(labels)}}} {_value(value)}" for labels, value in each.samples]
    return "".join(f"{line}\n" for line in lines)


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _value(value: float) -> str:
    if math.isfinite(value):
        return str(value)
    return "NaN" if math.isnan(value) else f"{value:+}".replace("inf", "Inf")


class Figures:
    """The figures of one run, which follows what its ranks record."""

    def __init__(self, directory: RunDirectory, plan: Plan) -> None:
        self._directory, self._plan = directory, plan
        self._tail = RunTail(reporting_records(directory, plan))
        self._view = StepView(num_steps=plan.config.train.num_steps, unit=plan.batch.unit)
        self._run = {"run": str(directory.path)}

    def text(self, phase: Phase) -> str:
        """All of them now."""
        for record in self._tail.read():
            self._view.take(record)
        return text_of([*self._of_run(phase), *self._of_steps(), *self._of_starts(phase)])

    def _one(self, name: str, help_text: str, value: float | None) -> Family:
        """A gauge of the run; without a value where that is not known."""
        samples = [] if value is None else [(self._run, value)]
        return Family(name=f"trireme_run_{name}", kind="gauge", help=help_text, samples=samples)

    def _of_run(self, phase: Phase) -> Iterator[Family]:
        job = read_json(self._directory.job)
        commits = [tree.get("commit") for tree in job.get("checkouts") or () if isinstance(tree, dict)]
        about = {"recipe": str(job.get("recipe", "")), "commit": str(next(filter(None, commits), ""))}
        yield Family(
            name="trireme_run_info",
            kind="gauge",
            help="What the run is, as labels; 1.",
            samples=[(self._run | about, 1)],
        )
        yield Family(
            name="trireme_run_state",
            kind="gauge",
            help="1 for the state that the run is in, 0 for the others.",
            samples=[(self._run | {"state": each}, int(each == phase)) for each in get_args(Phase)],
        )
        written = round(time.time(), 3)
        yield self._one("written_timestamp_seconds", "When this was written, since 1970.", written)

    def _of_steps(self) -> Iterator[Family]:
        view, plan = self._view, self._plan
        saved = max(saved_steps(self._directory.path), default=None)
        done = view.num_done or saved or first_step(plan.config.train)
        yield self._one("step", "Steps that are done.", done)
        yield self._one("planned_steps", "Steps of the whole training.", plan.config.train.num_steps)
        yield self._one("last_checkpoint_step", "Steps that are done in the newest checkpoint.", saved)
        if view.recent:
            loss = math.nan if view.loss is None else view.loss
            yield self._one("loss", "Training loss of the newest step; NaN: it was not finite.", loss)
            yield self._one("step_seconds", "Mean time of the newest steps.", view.step_s)
            what = f"{view.unit.capitalize()} that are trained in a second, by the newest steps."
            yield self._one(f"{view.unit}_per_second", what, view.per_second)
        yield self._one("eval_loss", "Loss of the newest evaluation.", view.eval_loss)

    def _of_starts(self, phase: Phase) -> Iterator[Family]:
        starts = starts_of(self._directory, JobState(phase=phase))
        yield Family(
            name="trireme_run_starts_total",
            kind="counter",
            help="Starts of the ranks.",
            samples=[(self._run, len(starts))],
        )
        help_text = "Time of steps that a later start made again."
        yield self._one("lost_seconds", help_text, round(lost_s(starts), 3))
        alarms = count_alarms(read_events(self._directory.path))
        yield Family(
            name="trireme_run_alarms_total",
            kind="counter",
            help="Alarms that were raised, by kind.",
            samples=[(self._run | {"kind": kind}, alarms.get(kind, 0)) for kind in ALARMS],
        )
