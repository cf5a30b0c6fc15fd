"""One rank from its plan to its last step: device, groups, context, training, shutdown."""

from __future__ import annotations

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
from launcher.runtime.model.deferred_weight_gradients import SplitBackward
from launcher.runtime.model.layers import Layers
from launcher.runtime.process.environment import ProcessRank, prepare_compiler
from launcher.runtime.process.groups import backend, make_groups, single_rank_groups
from launcher.runtime.process.heartbeat import HeartbeatWriter, message_timeout_s
from launcher.runtime.process.module_path import add_source_roots
from launcher.runtime.process.rendezvous import init_process_group
from launcher.runtime.train.loop import train


def run(plan: Plan, process: ProcessRank, run_dir: Path, heartbeat: HeartbeatWriter, *, resume: bool) -> None:
    """Does the work of this rank of the plan: trains, or serves the ranks that do."""
    add_source_roots(plan.source_roots)
    role = plan.rank(process.rank).role
    if plan.config.fusion.compile != "none":
        prepare_compiler(plan.config.device.kind)
    device = choose_device(plan, process)
    timeout = timedelta(seconds=message_timeout_s(plan.config.run))
    # Without device_id: NCCL would then run all messages of a group on one stream, in one order for all pairs
    # of ranks, and pipelines of four and more ranks would deadlock.
    heartbeat.beat(PEERS)
    init_process_group(backend(plan), process, timeout)
    heartbeat.beat(OTHER)
    ctx = make_context(plan.rank(process.rank), device, heartbeat)
    (resolve(role.serve) if role.serve else train)(ctx, run_dir, resume=resume)
    if all(role.trains for role in plan.roles):
        with ctx.clock.doing(PEERS):
            dist.barrier()  # a rank that exits early would look failed to one that is still working
    heartbeat.close()
    dist.destroy_process_group()


def choose_device(plan: Plan, process: ProcessRank) -> torch.device:
    """The device of this rank; also sets how many threads it may use.

    On CPU each rank has one thread: several ranks share a machine, and more threads than cores would be
    slower. In a run on GPUs a rank that does not train works on the CPU.
    """
    if plan.config.device.kind == "cuda" and not plan.rank(process.rank).role.trains:
        return torch.device("cpu")
    if plan.config.device.kind == "cuda":
        set_tf32(is_allowed=plan.config.precision.tf32)
        device = torch.device("cuda", process.local_rank)
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(1)
    return torch.device("cpu")


def set_tf32(*, is_allowed: bool) -> None:
    """Whether matrix products and convolutions in fp32 may round their inputs to TF32. Set in both cases:
    torch allows it for convolutions by default."""
    torch.backends.cuda.matmul.allow_tf32 = is_allowed
    torch.backends.cudnn.allow_tf32 = is_allowed


def make_context(
    plan: RankPlan, device: torch.device, heartbeat: HeartbeatWriter | None = None
) -> RankContext:
    """The rank's context; where it trains, with what the plan's parallel plugins add. Collective over all
    ranks."""
    deferral = SplitBackward(is_enabled=plan.plan.schedule.splits_backward)
    timeout_s = message_timeout_s(plan.plan.config.run)
    ctx = RankContext(
        plan=plan,
        device=device,
        groups=make_groups(plan, timeout_s) if plan.coordinates else single_rank_groups(plan.rank),
        clock=Clock(device, heartbeat),
        split_backward=deferral,
        layers=Layers(device, DTYPES[plan.plan.config.precision.compute], deferral),
    )
    for apply in plan.plan.parallels if plan.coordinates else ():
        resolve(apply)(ctx)
    return ctx
