"""The timeline that a plan predicts: its actions with its times."""

from __future__ import annotations

from launcher.plan.model import Plan
from launcher.schedule.actions import from_text
from launcher.schedule.simulate import Costs, Timeline, simulate


def planned_timeline(plan: Plan) -> Timeline:
    """When every action of a plan begins and ends, in seconds of its predicted costs."""
    schedule = plan.schedule
    costs = Costs(
        forward_s=schedule.forward_s,
        backward_s=schedule.backward_s,
        weight_s=schedule.weight_s,
        transfer_s=schedule.transfer_s,
    )
    return simulate([from_text(actions) for actions in schedule.actions], plan.pipeline, costs)
