"""Trains a few steps with parameter servers, and gives back what they hold in the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launcher.base.registry import resolve
from launcher.contract.model.shape import ParameterShape
from launcher.contract.optim.plugin import optimizer_of
from launcher.contract.plan import Plan
from launcher.runtime.api import slice_of
from launcher.runtime.checkpoint.fragments import state_name
from launcher.runtime.checkpoint.saving import restore
from launcher.runtime.checkpoint.store import Checkpoint, folder_of
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.process.rank import make_context
from launcher.runtime.train.loop import Trainer
from tests.helpers.equality import CPU, NUM_STEPS, Trained, job
from tests.helpers.ranks import run_ranks
from tests.helpers.run_folders import make_folders

Work = Callable[[Trainer, Loader, int], Any]
"""What a worker does before a step; gets the step."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """What a run left behind."""

    trained: Trained
    updates: tuple[list[dict[str, Any]], ...]
    """The update records of each server."""


def servers_job(*, workers: int = 2, options: dict[str, Any] | None = None, **sections: Any) -> Plan:
    """A plan of `equality.job` with parameter servers."""
    return job(
        parallel={"dp": workers} | sections.pop("parallel", {}),
        architecture={"name": "parameter_server", "options": options or {}},
        train={"checkpoint_interval": 1000} | sections.pop("train", {}),
        **sections,
    )


def serve_and_train(
    plan: Plan,
    run_dir: Path,
    before_step: Work | None = None,
    *,
    num_steps: int = NUM_STEPS,
    resume: bool = False,
) -> Served:
    """Runs the plan on forked ranks until ``num_steps`` are done."""
    make_folders(run_dir)
    results = run_ranks(plan.world_size, rank_of_servers, plan, run_dir, before_step, num_steps, resume)
    workers = [result for result in results if result is not None]
    losses = torch.tensor([[step.loss for step in done] for done, *_ in workers]).mean(0)
    saved = Checkpoint(folder_of(run_dir / "checkpoints", num_steps))
    shapes = {name: tuple(weight.shape) for name, weight in workers[0][1].items()}

    def whole(kind: str, name: str) -> Tensor:
        return saved.read(state_name(kind, name), (0,) * len(shapes[name]), shapes[name])

    for name in shapes:  # what the workers have in the end is what the servers hold
        for _, weights, _ in workers:
            torch.testing.assert_close(weights[name], whole("weight", name).to(weights[name].dtype))
    kinds = optimizer_of(plan.config).states(ParameterShape(name="", shape=(1,)), plan.config)
    trained = Trained(
        losses=losses.tolist(),
        norms=[step.outcome.grad_norm for step in workers[0][0]],
        weights={name: whole("weight", name) for name in shapes},
        moments={state_name(kind, name): whole(kind, name) for kind in kinds for name in workers[0][2]},
    )
    servers = range(plan.mesh.num_ranks, plan.world_size)
    return Served(trained=trained, updates=tuple(records(run_dir, rank, "update") for rank in servers))


def records(run_dir: Path, rank: int, kind: str) -> list[dict[str, Any]]:
    """A rank's records of one type, without their times."""
    lines = (run_dir / "metrics" / f"rank-{rank:05d}.jsonl").read_text().splitlines()
    found = [record for record in map(json.loads, lines) if record["type"] == kind]
    return [{name: value for name, value in record.items() if name != "time"} for record in found]


def rank_of_servers(
    rank: int, plan: Plan, run_dir: Path, before_step: Work | None, num_steps: int, resume: bool
) -> Any:
    ctx = make_context(plan.rank(rank), CPU)
    if ctx.plan.role.serve:
        resolve(ctx.plan.role.serve)(ctx, run_dir, resume=resume)
        return None
    trainer, loader = Trainer(ctx), Loader(ctx)
    first = restore(trainer.ctx, trainer.update, run_dir / "checkpoints") if resume else 0
    steps, done = loader.steps(first), []
    for step in range(first, num_steps):
        if before_step is not None:
            before_step(trainer, loader, step)
        done.append(trainer.step(step, next(steps)))
    assert ctx.replicas is not None, "workers are replicas"
    ctx.replicas.synchronize()
    ctx.replicas.leave(num_steps)
    params = [param for module in trainer.part.modules.values() for param in module.parameters()]
    trained = [slice_of(param).name for param in params if param.requires_grad]
    return done, {slice_of(param).name: param.detach().clone() for param in params}, trained


def assert_same(served: Served, weights: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    """Every element is the same, within ``tolerance`` of the largest of its tensor."""
    for name, expected in weights.items():
        if not name.endswith(".k.bias"):  # its gradient is rounding noise alone
            torch.testing.assert_close(
                served.trained.weights[name],
                expected,
                rtol=0,
                atol=tolerance * float(expected.abs().max()),
                msg=f"{name}: {{}}".format,
            )


def assert_nearly_same(served: Served, weights: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """As `assert_same`, but for all elements together: single ones may be off, as a gradient between two
    bf16 numbers may be rounded either way."""
    names = [name for name in weights if not name.endswith(".k.bias")]
    found, expected = (torch.cat([w[n].flatten() for n in names]) for w in (served.trained.weights, weights))
    assert float((found - expected).norm()) <= tolerance * float(expected.norm())
