"""Neighbour averaging does what its algorithm says, step for step, and goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from launcher.contract.optim.rates import learning_rate
from launcher.contract.plan import Plan
from launcher.runtime.api import slice_of
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.model.build import build_chunks
from launcher.runtime.process.rank import make_context
from launcher.runtime.train.loop import Trainer
from launcher_plugins.optimizers.adamw import AdamWConfig
from tests.helpers.equality import Sabotage, _assemble, _weights, job
from tests.helpers.objects import inside, there
from tests.helpers.ranks import RankError, run_ranks

CPU = torch.device("cpu")
NUM_STEPS = 4
GPT = {"family": "gpt", "dropout": 0.1}
Weights = list[dict[str, Tensor]]
"""Of every replica, by global name."""


def gossip(parallel: dict[str, Any]) -> Plan:
    return job(model=GPT, parallel=parallel, architecture={"name": "gossip"})


def trained(rank: int, plan: Plan, num_steps: int, sabotage: Sabotage | None) -> Any:
    """(replica, its pieces, losses, the last disagreement) of one rank."""
    ctx = make_context(plan.rank(rank), CPU)
    trainer, loader = Trainer(ctx), Loader(ctx)
    if sabotage is not None:
        sabotage(trainer, loader)
    steps = loader.steps(0)
    done = [trainer.step(step, next(steps)) for step in range(num_steps)]
    losses = [step.loss for step in done]
    return ctx.groups.dp.rank, list(_weights(trainer)), losses, done[-1].outcome.disagreement


def replicas(results: Sequence[Any], num_replicas: int) -> Weights:
    """Whole weights of every replica; equal copies inside one must be the same."""
    return [
        _assemble(piece for found, pieces, *_ in results if found == replica for piece in pieces)
        for replica in range(num_replicas)
    ]


def simulate(rank: int, plan: Plan, num_replicas: int) -> Weights:
    """The same algorithm in one process, written out: models side by side, no part of the update's code."""
    ctx, optim = make_context(plan.rank(rank), CPU), plan.config.optim
    models = [build_chunks(ctx)[0] for _ in range(num_replicas)]
    weights = [[p.detach().clone() for p in model.parameters()] for model in models]
    moments = [[(torch.zeros_like(w), torch.zeros_like(w)) for w in own] for own in weights]
    steps = Loader(ctx).steps(0)
    for step in range(NUM_STEPS):
        batches = next(steps)
        gradients = []
        for replica, model in enumerate(models):
            own = batches[replica::num_replicas]
            loss = sum(model(None, batch) for batch in own) / sum(batch.targets.numel() for batch in own)
            gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        near = [sorted({r, (r - 1) % num_replicas, (r + 1) % num_replicas}) for r in range(num_replicas)]
        weights = [
            [torch.stack([weights[r][place] for r in ring]).mean(0) for place in range(len(weights[0]))]
            for ring in near
        ]
        lr = learning_rate(optim, step, plan.config.train.num_steps)
        for replica, model in enumerate(models):
            norm = torch.cat([gradient.flatten() for gradient in gradients[replica]]).norm()
            clip = min(1.0, there(optim.clip_norm) / float(norm))
            for weight, gradient, (first, second) in zip(
                weights[replica], gradients[replica], moments[replica], strict=True
            ):
                adam = optim.settings(AdamWConfig)
                (beta1, beta2), eps = adam.betas, adam.eps
                first.mul_(beta1).add_(gradient * clip, alpha=1 - beta1)
                second.mul_(beta2).add_((gradient * clip) ** 2, alpha=1 - beta2)
                decay = optim.weight_decay if weight.dim() > 1 else 0.0
                root = (second / (1 - beta2 ** (step + 1))).sqrt() + eps
                weight.mul_(1 - lr * decay).sub_(lr * first / (1 - beta1 ** (step + 1)) / root)
            for param, weight in zip(model.parameters(), weights[replica], strict=True):
                param.data.copy_(weight)
    names = [slice_of(param).name for param in models[0].parameters()]
    return [dict(zip(names, own, strict=True)) for own in weights]


SIMULATED: dict[int, Weights] = {}


def expected(num_replicas: int) -> Weights:
    if num_replicas not in SIMULATED:
        (found,) = run_ranks(1, simulate, job(model=GPT), num_replicas)
        SIMULATED[num_replicas] = found
    return SIMULATED[num_replicas]


def assert_same(found: Weights, theirs: Weights, tolerance: float = 2e-5) -> None:
    """``tolerance`` is relative to the largest element of each tensor."""
    for replica, (ours, reference) in enumerate(zip(found, theirs, strict=True)):
        assert ours.keys() == reference.keys()
        for name, tensor in reference.items():
            if not name.endswith(".k.bias"):  # no gradient but rounding noise
                scale = tensor.abs().max().item()
                torch.testing.assert_close(
                    ours[name],
                    tensor,
                    rtol=0,
                    atol=tolerance * scale,
                    msg=f"{name} of replica {replica}: {{}}".format,
                )


@pytest.mark.parametrize(
    "parallel",
    [{"dp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "pp": 2}],
    ids=lambda parallel: " ".join(f"{axis}{size}" for axis, size in parallel.items()),
)
def test_every_replica_is_what_a_simulation_in_one_process_makes_of_it(parallel: dict[str, Any]) -> None:
    plan = gossip(parallel)
    results = run_ranks(plan.world_size, trained, plan, NUM_STEPS, None)
    assert_same(replicas(results, parallel["dp"]), expected(parallel["dp"]))


def skip_one_exchange(trainer: Trainer, loader: Loader) -> None:
    """Every replica keeps its own weights once, in place of the average."""
    exchange, calls = inside(trainer.update)._exchange, iter(range(NUM_STEPS))
    average = exchange.average
    exchange.average = lambda: 0.0 if next(calls) == 2 else average()


def forget_one_neighbour(trainer: Trainer, loader: Loader) -> None:
    """Replica 1 takes its own weights for those of the replica after it."""
    if trainer.ctx.groups.dp.rank == 1:
        exchange = inside(trainer.update)._exchange
        wait = exchange.wait

        def waiting() -> None:
            wait()
            for own, received in exchange._buckets:
                received[-1].copy_(own)

        exchange.wait = waiting


@pytest.mark.parametrize("sabotage", [skip_one_exchange, forget_one_neighbour])
def test_the_comparison_sees_an_average_that_is_not_the_algorithms(sabotage: Sabotage) -> None:
    plan = gossip({"dp": 4})
    with pytest.raises(AssertionError, match="of replica") as caught:
        assert_same(replicas(run_ranks(4, trained, plan, NUM_STEPS, sabotage), 4), expected(4))
    assert not isinstance(caught.value, RankError)


def test_replicas_learn_together_and_stay_near_each_other() -> None:
    plan = gossip({"dp": 4})
    results = run_ranks(4, trained, plan, 40, None)
    losses, found = results[0][2], replicas(results, 4)
    assert losses[0] > 5.5
    assert losses[-1] < 3.5  # 3.32 here, where one device has 3.20
    flat = torch.stack([torch.cat([w.flatten() for _, w in sorted(own.items())]) for own in found])
    mean = flat.mean(0)
    distance = float((flat - mean).norm(dim=1).square().mean().sqrt() / mean.norm())
    assert 0 < distance < 5e-3
    # What each rank records is measured before its last step, over its neighbours alone.
    assert 0 < max(result[3] for result in results) < 5e-3


# Checkpoints


def interrupted(rank: int, plan: Plan, resumed: Plan) -> Any:
    """Two steps under one plan, then two more by another trainer that has loaded what the first saved."""
    first = Trainer(make_context(plan.rank(rank), CPU))
    steps = Loader(first.ctx).steps(0)
    for step in range(2):
        first.step(step, next(steps))
    saved: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(saved, [(f.slice, f.tensor) for f in first.update.state()])
    if rank >= resumed.world_size:
        return None
    store = {(w.name, w.offset, tuple(t.shape)): t for part in saved for w, t in part}
    ctx = make_context(resumed.rank(rank), CPU)
    trainer = Trainer(ctx)
    trainer.update.load(lambda name, offset, shape: store[name, tuple(offset), tuple(shape)])
    loaded = list(_weights(trainer))
    steps = Loader(ctx).steps(2)
    for step in range(2, NUM_STEPS):
        trainer.step(step, next(steps))
    return ctx.groups.dp.rank, list(_weights(trainer)), loaded


def test_as_many_replicas_go_on_exactly_where_they_were_saved() -> None:
    plan = gossip({"dp": 2})
    found = replicas(run_ranks(2, interrupted, plan, plan), 2)
    assert_same(found, expected(2))


def test_fewer_replicas_begin_from_the_average() -> None:
    results = run_ranks(4, interrupted, gossip({"dp": 4}), gossip({"dp": 2}))[:2]
    begun = [_assemble(loaded) for _, _, loaded in results]
    assert_same(begun[:1], begun[1:], tolerance=0.0)
    four = replicas(run_ranks(4, trained, gossip({"dp": 4}), 2, None), 4)
    mean = {name: torch.stack([own[name] for own in four]).mean(0) for name in four[0]}
    assert_same(begun[:1], [mean])
    with pytest.raises(AssertionError):
        assert_same(begun[:1], four[:1])
