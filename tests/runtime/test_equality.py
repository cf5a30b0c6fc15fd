"""Every strategy computes what one device computes: losses, gradients, weights; and a strategy that
leaves one thing out does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.contract.optim.rates import learning_rate
from launcher.contract.plan import Plan
from launcher.runtime.api import Handle, slice_of
from launcher.runtime.data.microbatches import Loader, Microbatch
from launcher.runtime.model.build import build_chunks
from launcher.runtime.process.rank import make_context
from launcher.runtime.train.loop import Trainer
from launcher_plugins.optimizers.adamw import AdamWConfig
from launcher_plugins.parallel.tensor.runtime.collectives import TensorParallelGroup
from tests.helpers.equality import NUM_STEPS, Sabotage, assert_equal, job, reference, skip_sums_over, train
from tests.helpers.objects import inside, substitute, there
from tests.helpers.ranks import RankError, run_ranks

GPT = {"family": "gpt"}
LLAMA = {"family": "llama", "num_kv_heads": 2, "tied_embeddings": False}
QWEN2 = LLAMA | {"attention_bias": "qkv", "tied_embeddings": True}
QWEN3 = LLAMA | {"qk_norm": True, "head_dim": 6}
MISTRAL = LLAMA | {"sliding_window": 3}
ALL_THREE = LLAMA | {"attention_bias": "all", "qk_norm": True, "head_dim": 8, "sliding_window": 3}
UNTIED = {"tied_embeddings": False}
DROPOUT = {"dropout": 0.1}
INTERLEAVED = {"pp": 2, "num_chunks": 2, "schedule": "interleaved_1f1b"}

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp2": (GPT, {"dp": 2}),
    "dp4 llama": (LLAMA, {"dp": 4}),
    "dp2 dropout": (GPT | DROPOUT, {"dp": 2}),
    "tp2": (GPT, {"tp": 2}),
    "tp2 llama": (LLAMA, {"tp": 2}),
    "tp4 untied dropout": (GPT | UNTIED | DROPOUT, {"tp": 4}),
    "tp2 vocabulary padded": (GPT | {"vocab_size": 257}, {"tp": 2}),
    "tp2 biases": (QWEN2, {"tp": 2}),
    "tp2 norms of heads": (QWEN3, {"tp": 2}),
    "tp2 window": (MISTRAL, {"tp": 2}),
    "tp2 sequence parallel biases norms window": (ALL_THREE, {"tp": 2, "sequence_parallel": True}),
    "tp2 sequence parallel": (GPT, {"tp": 2, "sequence_parallel": True}),
    "tp2 sequence parallel llama dropout": (LLAMA | DROPOUT, {"tp": 2, "sequence_parallel": True}),
    "pp2 gpipe": (GPT, {"pp": 2, "schedule": "gpipe"}),
    "pp2 1f1b": (GPT, {"pp": 2}),
    "pp2 1f1b untied": (GPT | UNTIED, {"pp": 2}),
    "pp2 uneven": (LLAMA, {"pp": 2, "layers_per_stage": (1, 3)}),
    "pp3 tied uneven": (GPT, {"pp": 3, "layers_per_stage": (1, 1, 2)}),
    "pp4 1f1b tied": (GPT, {"pp": 4}),
    "pp4 gpipe llama dropout": (LLAMA | DROPOUT, {"pp": 4, "schedule": "gpipe"}),
    "pp2 interleaved tied": (GPT, INTERLEAVED),
    "pp2 interleaved llama dropout": (LLAMA | DROPOUT, INTERLEAVED),
    "pp3 interleaved in uneven groups": (
        GPT | {"num_layers": 6},
        INTERLEAVED | {"pp": 3, "schedule_options": {"uneven_groups": True}},
    ),
    "pp2 recompute dropout": (GPT | DROPOUT, {"pp": 2, "recompute": "full"}),
    "pp2 biases": (QWEN2, {"pp": 2}),
    "pp2 norms of heads": (QWEN3, {"pp": 2, "recompute": "full"}),
    "pp2 window": (MISTRAL, {"pp": 2, "schedule": "zb_h1"}),
    "dp2 tp2 pp2 biases norms window": (ALL_THREE, {"dp": 2, "tp": 2, "pp": 2, "recompute": "selective"}),
    "pp2 naive": (LLAMA, {"pp": 2, "schedule": "naive"}),
    "pp2 zero bubble tied": (GPT, {"pp": 2, "schedule": "zb_h1"}),
    "pp4 zero bubble llama dropout": (LLAMA | DROPOUT, {"pp": 4, "schedule": "zb_h1"}),
    "dp2 pp2 zero bubble": (GPT, {"dp": 2, "pp": 2, "schedule": "zb_h1"}),
    "tp2 pp2 zero bubble sequence parallel": (
        GPT | UNTIED,
        {"tp": 2, "pp": 2, "schedule": "zb_h1", "sequence_parallel": True},
    ),
    "pp2 selective": (GPT | DROPOUT, {"pp": 2, "recompute": "selective"}),
    "pp2 zero bubble selective": (LLAMA, {"pp": 2, "schedule": "zb_h1", "recompute": "selective"}),
    "dp2 tp2 sequence parallel selective": (
        LLAMA | DROPOUT,
        {"dp": 2, "tp": 2, "sequence_parallel": True, "recompute": "selective"},
    ),
    "pp2 interleaved every stage recomputes in its own way": (
        GPT,
        INTERLEAVED | {"recompute": ("full", "selective", "none", "selective")},
    ),
    "pp2 zero bubble recompute": (LLAMA, {"pp": 2, "schedule": "zb_h1", "recompute": "full"}),
    "dp2 tp2": (GPT, {"dp": 2, "tp": 2}),
    "dp2 pp2": (GPT | DROPOUT, {"dp": 2, "pp": 2}),
    "tp2 pp2": (GPT, {"tp": 2, "pp": 2}),
    "tp2 pp2 interleaved sequence parallel": (LLAMA, INTERLEAVED | {"tp": 2, "sequence_parallel": True}),
    "dp2 tp2 pp2": (GPT | DROPOUT, {"dp": 2, "tp": 2, "pp": 2}),
    "dp2 tp2 pp2 llama interleaved": (LLAMA, INTERLEAVED | {"dp": 2, "tp": 2}),
    "dp2 tp2 pp2 tp outermost": (LLAMA, {"dp": 2, "tp": 2, "pp": 2, "rank_order": "tp-dp-pp"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_computes_what_one_device_computes(layout: str) -> None:
    model, parallel = LAYOUTS[layout]
    batch = {}
    if "tp" in parallel and "pp" not in parallel:  # two microbatches: there are many messages in each
        batch = {"micro_size": 8 // parallel.get("dp", 1)}
    assert_equal(train(job(model=model, parallel=parallel, batch=batch)), reference(model))


@pytest.mark.parametrize("micro_size", [1, 4, 16])
def test_the_size_of_a_microbatch_does_not_matter(micro_size: int) -> None:
    assert_equal(train(job(model=DROPOUT, batch={"micro_size": micro_size})), reference(DROPOUT))


def test_the_update_is_that_of_a_plain_loop_over_the_global_batch() -> None:
    """One device and no part of the update's own code: gradients of the whole batch at once, clipping
    and AdamW written out."""
    plan = job(model=UNTIED, optim={"weight_decay": 0.3})
    (expected,) = run_ranks(1, plain_training, plan)
    found = train(plan)
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(expected["losses"]))
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=2e-5, msg=f"{name}: {{}}".format)


def plain_training(rank: int, plan: Plan) -> dict[str, Any]:
    ctx = make_context(plan.rank(rank), torch.device("cpu"))
    (model,), optim = build_chunks(ctx), plan.config.optim
    params = list(model.parameters())
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]
    losses, steps = [], Loader(ctx).steps(0)
    for step in range(NUM_STEPS):
        batches = next(steps)
        loss = sum(model(None, batch) for batch in batches) / sum(batch.targets.numel() for batch in batches)
        gradients = torch.autograd.grad(loss, params)
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        clip = min(1.0, there(optim.clip_norm) / float(norm))
        lr = learning_rate(optim, step, plan.config.train.num_steps)
        with torch.no_grad():
            for param, gradient, (first, second) in zip(params, gradients, moments, strict=True):
                adam = optim.settings(AdamWConfig)
                (beta1, beta2), eps = adam.betas, adam.eps
                first.mul_(beta1).add_(gradient * clip, alpha=1 - beta1)
                second.mul_(beta2).add_((gradient * clip) ** 2, alpha=1 - beta2)
                decay = optim.weight_decay if param.dim() > 1 else 0.0
                root = (second / (1 - beta2 ** (step + 1))).sqrt() + eps
                param.mul_(1 - lr * decay).sub_(lr * first / (1 - beta1 ** (step + 1)) / root)
        losses.append(float(loss))
    return {"losses": losses, "weights": {slice_of(param).name: param.detach() for param in params}}


def test_a_different_seed_is_told_apart() -> None:
    plan = job(model=GPT)
    other = train(replace(plan, config=replace(plan.config, seed=plan.config.seed + 1)))
    with pytest.raises(AssertionError):
        assert_equal(other, reference(GPT))


# What follows breaks one thing each; the comparison above must see it.


class _Nothing:
    def wait(self) -> None:
        pass


def skip_one_bucket(trainer: Trainer, loader: Loader) -> None:
    buckets, calls = inside(trainer.update)._buckets, count()
    exchange = buckets.exchange
    buckets.exchange = lambda bucket: _Nothing() if next(calls) == 1 else exchange(bucket)


def skip_one_tensor_all_reduce(trainer: Trainer, loader: Loader) -> None:
    calls, all_reduce = count(), TensorParallelGroup.all_reduce

    def skipping(wire: TensorParallelGroup, x: Tensor, *arguments: Any) -> Tensor:
        return x if next(calls) == 3 else all_reduce(wire, x, *arguments)

    substitute(TensorParallelGroup, "all_reduce", skipping)


def count_the_norm_of_this_rank_only(trainer: Trainer, loader: Loader) -> None:
    groups = trainer.ctx.groups
    trainer.ctx.groups = replace(groups, model=replace(groups.model, ranks=(trainer.ctx.plan.rank,)))


def send_one_stale_message(trainer: Trainer, loader: Loader) -> None:
    sent: list[Tensor] = []
    assert trainer.ctx.transport is not None, "it has a pipeline"
    send = trainer.ctx.transport.send

    def sending(tensor: Tensor, *place: int) -> Handle:
        sent.append(tensor.clone())
        return send(sent[1] if len(sent) == 3 else tensor, *place)

    substitute(trainer.ctx.transport, "send", sending)


def change_steps(change: Callable[[list[Microbatch]], list[Microbatch]], shift: int = 0) -> Sabotage:
    def sabotage(trainer: Trainer, loader: Loader) -> None:
        steps = loader.steps
        substitute(loader, "steps", lambda first_step: map(change, steps(first_step + shift)))

    return sabotage


def repeat_the_first(microbatches: list[Microbatch]) -> list[Microbatch]:
    return [microbatches[0], microbatches[0], *microbatches[2:]]


def renumber_samples(microbatches: list[Microbatch]) -> list[Microbatch]:
    return [replace(batch, samples=batch.samples * 0) for batch in microbatches]


def lose_one_weight_product(trainer: Trainer, loader: Loader) -> None:
    buckets, calls = inside(trainer.update)._buckets, count()
    finish = buckets.backward_weight
    buckets.backward_weight = lambda products, **where: finish(products[next(calls) == 2 :], **where)


SABOTAGES: dict[str, tuple[str, Sabotage]] = {
    "one bucket of gradients is not exchanged": ("dp2", skip_one_bucket),
    "one all-reduce of activations is skipped": ("tp2", skip_one_tensor_all_reduce),
    "tied gradients are not summed": ("pp3 tied uneven", skip_sums_over("tied")),
    "norm gradients of the sequence parts are not summed": ("tp2 sequence parallel", skip_sums_over("tp")),
    "gradients of the norms of heads are not summed": ("tp2 norms of heads", skip_sums_over("tp")),
    "each stage clips by its own norm": ("pp2 1f1b untied", count_the_norm_of_this_rank_only),
    "one message between stages is stale": ("pp2 gpipe", send_one_stale_message),
    "one product of a weight gradient is lost": ("pp2 zero bubble tied", lose_one_weight_product),
    "one microbatch is dropped": ("pp2 interleaved tied", change_steps(repeat_the_first)),
    "the loader is one step ahead": ("dp2 pp2", change_steps(list, shift=1)),
    "dropout forgets which sample it is": ("dp2 dropout", change_steps(renumber_samples)),
}


@pytest.mark.parametrize("fault", SABOTAGES)
def test_the_comparison_sees_that(fault: str) -> None:
    layout, sabotage = SABOTAGES[fault]
    model, parallel = LAYOUTS[layout]
    expected = reference(model)
    with pytest.raises(AssertionError) as caught:
        assert_equal(train(job(model=model, parallel=parallel), sabotage), expected)
    assert not isinstance(caught.value, RankError), "it crashed, which is not what the comparison is for"
