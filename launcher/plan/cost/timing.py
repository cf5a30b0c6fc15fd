"""Predicted times: of one microbatch on one stage, and of the whole step.

    forward of a stage   = its layers (`compute`) + the collectives inside it
    backward             = its layers, with what they compute again + its collectives;
                           where it is split, W takes the weight gradients out of it
    step                 = the schedule, simulated with these, or what is exchanged beside it where that
                           takes longer + what the last backward does not hide of the gradient
                           exchange + the other collectives of a step + the update

The peak is the datasheet's and the attainable share an assumption, so a predicted time is for
comparing strategies with each other, not for promising a date.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.contract.actions import Action, to_text
from launcher.contract.plan import MemoryPlan, SchedulePlan
from launcher.contract.strategy import Collective, JobShape, RankCost, Schedule
from launcher.plan.cost.compute import part_times
from launcher.plan.cost.traffic import collective_time_s, message_time_s
from launcher.schedule.simulate import Costs, simulate

_UPDATE_PASSES = 2
"""Times that an update moves weights, gradients and optimizer state: one read, one write."""
_FASTEST_S = 1e-12
"""A user's layers may count nothing at all; going through them still takes some time."""


def plan_schedule(
    job: JobShape,
    schedule: Schedule,
    lists: Sequence[Sequence[Action]],
    costs: Sequence[Sequence[RankCost]],
    memory: Sequence[MemoryPlan],
) -> SchedulePlan:
    """The schedule with its predicted times."""
    is_split = schedule.splits_backward
    stage_costs = predict_costs(job, costs, is_split=is_split)
    simulation = simulate(lists, job.pipeline, stage_costs)
    tail_s = max(
        after_schedule_s(job, cost, ranks, stage_costs.weight_s or stage_costs.backward_s)
        for cost, ranks in zip(costs, memory, strict=True)
    )
    begun_s = max(_messages_s(job, cost, "begin", overlappable=True) for cost in costs)
    tail_s += max(_exposed_s(cost, stage_costs, simulation.makespan_s) for cost in costs)
    return SchedulePlan(
        name=job.config.parallel.schedule,
        actions=tuple(to_text(actions) for actions in lists),
        bubble_formula=schedule.bubble_fraction(job.pipeline),
        bubble_simulated=simulation.bubble_fraction,
        forward_s=stage_costs.forward_s,
        backward_s=stage_costs.backward_s,
        transfer_s=stage_costs.transfer_s,
        step_s=max(simulation.makespan_s, begun_s) + tail_s,
        splits_backward=is_split,
        weight_s=stage_costs.weight_s,
    )


def predict_costs(job: JobShape, costs: Sequence[Sequence[RankCost]], *, is_split: bool = False) -> Costs:
    """Seconds of a microbatch's compute on every stage, and of a message between two.

    ``is_split``: whether the weight gradients are computed apart from the backward.
    """
    share = 1 / (job.pipeline.num_chunks * job.pipeline.num_microbatches)
    forward_s, backward_s, weight_s = [], [], []
    for stage in job.stages:
        rank = costs[stage.pp_rank]
        parts = [part_times(job, *part) for part in job.parts(stage)]
        own_s = max(sum(part.forward_s for part in parts), _FASTEST_S)
        whole_s = max(sum(part.backward_s for part in parts), _FASTEST_S)
        weight_s.append(sum(part.weight_s for part in parts) if is_split else 0.0)
        forward_s.append(own_s + share * _messages_s(job, rank, "forward"))
        backward_s.append(whole_s + share * _messages_s(job, rank, "backward") - weight_s[-1])
    return Costs(
        forward_s=tuple(forward_s),
        backward_s=tuple(backward_s),
        weight_s=tuple(weight_s) if is_split else (),
        transfer_s=transfer_s(job, costs),
    )


def transfer_s(job: JobShape, costs: Sequence[Sequence[RankCost]]) -> float:
    """Seconds of the longest message between two stages."""
    link = job.cluster.link(job.mesh, "pp")
    messages = [c for rank in costs for c in _collectives(rank) if c.operation == "send_recv"]
    messages = [message for message in messages if message.axis == "pp"]
    return max((message_time_s(job, message, link) for message in messages), default=0.0)


def after_schedule_s(
    job: JobShape, costs: Sequence[RankCost], memory: MemoryPlan, gradients_s: Sequence[float]
) -> float:
    """Seconds of a rank's step after its schedule.

    ``gradients_s``: per stage, the seconds of the action that computes weight gradients, B or W. A
    gradient exchange starts bucket by bucket during the last of these on each of the rank's stages;
    the last bucket of all can start only when it is over.
    """
    costs = [cost for cost in costs if cost.overlap is None]
    window_s = sum(gradients_s[stage.stage] for stage in job.stages_of(memory.pp_rank))
    hidden = [c for c in _collectives(costs) if c.phase == "step" and c.overlappable]
    exchange_s = sum(collective_time_s(job, c) for c in hidden)
    last_bucket_s = sum(collective_time_s(job, c) / c.count for c in hidden)
    states_s = sum(memory.states_bytes.values()) / job.config.device.memory_bandwidth_bytes_per_s
    update_s = _UPDATE_PASSES * states_s
    return max(exchange_s - window_s, last_bucket_s) + _messages_s(job, costs, "step") + update_s


def _exposed_s(costs: Sequence[RankCost], stages: Costs, makespan_s: float) -> float:
    """Seconds of exchanges that count themselves."""
    forward_s, backward_s = max(stages.forward_s), max(stages.weight_s or stages.backward_s)
    overlaps = (cost.overlap for cost in costs if cost.overlap is not None)
    return sum(overlap.exposed_s(forward_s, backward_s, makespan_s) for overlap in overlaps)


def _messages_s(job: JobShape, costs: Sequence[RankCost], phase: str, *, overlappable: bool = False) -> float:
    """Seconds per step of a phase's messages that nothing hides, or of those that work can hide."""
    messages = (c for c in _collectives(costs) if c.phase == phase and c.overlappable == overlappable)
    return sum(collective_time_s(job, message) for message in messages)


def _collectives(costs: Sequence[RankCost]) -> list[Collective]:
    return [collective for cost in costs for collective in cost.collectives]
