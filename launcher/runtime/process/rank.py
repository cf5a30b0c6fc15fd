"""One rank from its plan to its last step: device, groups, context, training, orderly end."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from launcher.base.registry import resolve
from launcher.contract.heartbeat import PEERS
from launcher.contract.plan import Plan, RankPlan
from launcher.contract.records import OTHER
from launcher.runtime.api import DTYPES, RankContext
from launcher.runtime.measure.clock import Clock
from launcher.runtime.model.layers import WholeLayers
from launcher.runtime.model.split_backward import SplitBackward
from launcher.runtime.process.groups import alone, backend, make_groups
from launcher.runtime.process.heartbeat import Heart, message_timeout_s
from launcher.runtime.process.process_rank import Place, prepare_compiler
from launcher.runtime.train.loop import train


def run(plan: Plan, place: Place, run_dir: Path, heart: Heart, *, resume: bool) -> None:
    """Does the work of this rank of the plan: trains, or serves those that do."""
    sys.path[:0] = list(plan.source_roots)
    role = plan.rank(place.rank).role
    if plan.config.fusion.compile != "none":
        prepare_compiler(plan.config.device.kind)
    device = choose_device(plan, place)
    timeout = timedelta(seconds=message_timeout_s(plan.config.run))
    # Not bound to the device: NCCL would then run all messages of a group on one stream, in one order
    # for all pairs of ranks, and pipelines of four and more ranks would wait in a circle.
    heart.beat(PEERS)
    dist.init_process_group(backend(plan), timeout=timeout)
    heart.beat(OTHER)
    ctx = make_context(plan.rank(place.rank), device, heart)
    (resolve(role.serve) if role.serve else train)(ctx, run_dir, resume=resume)
    if all(role.trains for role in plan.roles):
        with ctx.clock.doing(PEERS):
            dist.barrier()  # a rank that left early would look dead to one that is still at work
    heart.close()
    dist.destroy_process_group()


def choose_device(plan: Plan, place: Place) -> torch.device:
    """The device of this rank; also sets how many threads it may use.

    On CPU each rank has one thread: several ranks share a machine, and threads that fight for
    its cores would be slower. Beside GPUs a rank that does not train works on the CPU.
    """
    if plan.config.device.kind == "cuda" and not plan.rank(place.rank).role.trains:
        return torch.device("cpu")
    if plan.config.device.kind == "cuda":
        set_tf32(is_allowed=plan.config.precision.tf32)
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(1)
    return torch.device("cpu")


def set_tf32(*, is_allowed: bool) -> None:
    """Whether products and convolutions of fp32 numbers may round their inputs to TF32. Said in both cases:
    torch allows it to convolutions unasked."""
    torch.backends.cuda.matmul.allow_tf32 = is_allowed
    torch.backends.cudnn.allow_tf32 = is_allowed


def make_context(plan: RankPlan, device: torch.device, heart: Heart | None = None) -> RankContext:
    """The rank's context, where it trains equipped by the plan's parallel plugins. Collective over all
    ranks."""
    split = SplitBackward(is_enabled=plan.plan.schedule.splits_backward)
    timeout_s = message_timeout_s(plan.plan.config.run)
    ctx = RankContext(
        plan=plan,
        device=device,
        groups=make_groups(plan, timeout_s) if plan.coordinates else alone(plan.rank),
        clock=Clock(device, heart),
        split_backward=split,
        layers=WholeLayers(device, DTYPES[plan.plan.config.precision.compute], split),
    )
    for apply in plan.plan.parallels if plan.coordinates else ():
        resolve(apply)(ctx)
    return ctx
