"""Whether the ranks fit into the memory of their devices, and what would make them fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.base.errors import Fault
from launcher.base.units import format_bytes
from launcher.contract.config import DEFAULT_SCHEDULE
from launcher.contract.plan import MemoryPlan
from launcher.contract.strategy import JobShape, RankCost
from launcher.plan.cost.memory import plan_memory
from launcher.plan.cost.traffic import rank_costs
from launcher.plan.plugins import Chosen
from launcher.schedule.dependencies import ActionLists
from launcher.schedule.passes import lower

_MOST_FACTOR = 8
"""How many times larger a proposed tp or pp may be."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The actions of a job, and what they are predicted to take."""

    lists: ActionLists
    """The actions of every pp_rank, messages included."""
    costs: Sequence[Sequence[RankCost]]
    """For every pp_rank, what each parallel plugin adds."""
    memory: tuple[MemoryPlan, ...]


def predict(job: JobShape, chosen: Chosen) -> Prediction:
    """The actions, the costs and the memory of a job."""
    lists, costs = lower(chosen.schedule, job.pipeline), rank_costs(job, chosen.parallels)
    return Prediction(lists=lists, costs=costs, memory=plan_memory(job, lists, costs))


def memory_faults(memory: Sequence[MemoryPlan], job: JobShape, chosen: Chosen) -> list[Fault]:
    """A fault when the fullest rank does not fit its device; names its largest part and ways out."""
    fullest = max(memory, key=lambda ranks: ranks.total_bytes)
    limit = job.config.device.memory_bytes
    if fullest.total_bytes <= limit:
        return []
    parts = parts_bytes(fullest)
    largest = max(parts, key=lambda name: parts[name])
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    rule = (
        f"a rank of pp_rank {fullest.pp_rank} needs {format_bytes(fullest.total_bytes)} "
        f"({held}) and its device has {format_bytes(limit)}; the largest part is {largest}"
    )
    states, activations = list(_state_ways(job, chosen)), list(_activation_ways(job))
    is_state = largest in fullest.states_bytes
    ways = states + activations if is_state else activations + states
    rule += f" ({'a smaller model' if is_state else 'a shorter batch.seq_length'} needs less)"
    return [Fault("device.memory_bytes", limit, rule, ways=tuple(ways))]


def state_faults(job: JobShape, chosen: Chosen) -> list[Fault]:
    """A fault when weights, gradients and optimizer alone, whole on every replica, do not fit.

    Needs no schedule, so that many layouts can be judged in passing.
    """
    if chosen.owner:  # it may split them
        return []
    needed = max(job.unsharded_states(pp_rank).total_bytes for pp_rank in range(job.mesh.pp))
    limit = job.config.device.memory_bytes
    rule = f"the states of the model need {format_bytes(needed)} and the device has {format_bytes(limit)}"
    return [Fault("device.memory_bytes", limit, rule)] if needed > limit else []


def parts_bytes(memory: MemoryPlan) -> dict[str, int]:
    """The parts of a rank's memory by name, in the order they are shown."""
    held = memory.states_bytes | {"activations": memory.activations_bytes}
    return {**held, **memory.other_bytes, **memory.persistent_bytes}


def _state_ways(job: JobShape, chosen: Chosen) -> Iterator[Mapping[str, Any]]:
    """More ranks for one model, then less of it on every replica."""
    sizes = {"parallel.tp": job.mesh.tp, "parallel.pp": job.mesh.pp}
    if job.config.model.family == "custom":
        del sizes["parallel.tp"]
    for factor in range(2, _MOST_FACTOR + 1):
        yield from ({path: factor * size} for path, size in sizes.items())
    for parallel in chosen.candidates:
        yield from parallel.memory_ways(job)


def _activation_ways(job: JobShape) -> Iterator[Mapping[str, Any]]:
    parallel, micro = job.config.parallel, job.micro_size
    while micro > 1:
        micro //= 2
        yield {"batch.micro_size": micro}
    if parallel.recompute == "none" and all(layer.selective for layer in job.model.layers):
        yield {"parallel.recompute": "selective"}
    if parallel.recompute != "full":
        yield {"parallel.recompute": "full"}
    if job.mesh.tp > 1 and not parallel.sequence_parallel:
        yield {"parallel.sequence_parallel": True}
    if job.pipeline.num_microbatches > job.mesh.pp > 1:
        yield {"parallel.schedule": DEFAULT_SCHEDULE}
