"""Split layers compute what whole layers compute, and stop doing so when any one message is left out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch._dynamo  # recomputation imports it at its first use: here, once for all forked ranks
import torch.distributed as dist
from torch import Tensor

from launcher.contract.actions import PipelineShape
from launcher.contract.config import LaunchConfig
from launcher.contract.mesh import Cluster
from launcher.contract.strategy import JobShape
from launcher.plan.cost.shapes import model_shape
from launcher.runtime.api import IGNORE_INDEX, GlobalSlice, slice_of
from launcher.runtime.data.microbatches import Microbatch
from launcher.runtime.model.build import build_chunks
from launcher_plugins.parallel.tensor.plan import TensorParallel
from launcher_plugins.parallel.tensor.runtime.collectives import TensorParallelGroup
from launcher_plugins.parallel.tensor.runtime.layers import apply
from tests.helpers.contexts import make_config, make_context
from tests.helpers.objects import inside
from tests.helpers.plans import staged_plan
from tests.helpers.ranks import run_ranks

GPT = {"family": "gpt"}
LLAMA = {"family": "llama", "num_kv_heads": 2, "tied_embeddings": False, "ffn_size": 40}
CASES: dict[str, dict[str, Any]] = {
    "gpt": {"model": GPT},
    "llama": {"model": LLAMA},
    "gpt dropout": {"model": GPT | {"dropout": 0.2}},
    "gpt untied": {"model": GPT | {"tied_embeddings": False}},
    "llama biases norms window": {
        "model": LLAMA | {"attention_bias": "all", "qk_norm": True, "sliding_window": 3},
        "parallel": {"sequence_parallel": True, "recompute": "selective"},
    },
    "llama tied": {"model": LLAMA | {"tied_embeddings": True}},
    "gpt sequence parallel": {"model": GPT | {"dropout": 0.2}, "parallel": {"sequence_parallel": True}},
    "llama sequence parallel": {"model": LLAMA | {"dropout": 0.2}, "parallel": {"sequence_parallel": True}},
    "gpt recompute": {
        "model": GPT | {"dropout": 0.2},
        "parallel": {"sequence_parallel": True, "recompute": "full"},
    },
    "gpt selective": {"model": GPT | {"dropout": 0.2}, "parallel": {"recompute": "selective"}},
    "llama sequence parallel selective": {
        "model": LLAMA | {"dropout": 0.2},
        "parallel": {"sequence_parallel": True, "recompute": "selective"},
    },
    "one rank all padding": {"model": GPT | {"vocab_size": 9}},
}
FOR_FOUR_RANKS = [case for case in CASES if "llama" not in case]  # whose 2 key and value heads are too few
SABOTAGED = ("gpt", "llama sequence parallel")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One rank's loss and gradients, with the number of collectives."""

    loss: float
    gradients: list[tuple[GlobalSlice, Tensor]]
    num_calls: int


class Saboteur(TensorParallelGroup):
    """Leaves out the collective number ``skip`` on every rank."""

    skip: int | None = None
    num_calls = 0

    @classmethod
    def is_skipped(cls) -> bool:
        cls.num_calls += 1
        return cls.num_calls - 1 == cls.skip

    def all_reduce(self, x: Tensor, operation: Any = "sum") -> Tensor:
        return x if self.is_skipped() else super().all_reduce(x, operation)

    def all_gather_sequence(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, 1) if self.is_skipped() else super().all_gather_sequence(x)

    def reduce_scatter_sequence(self, x: Tensor) -> Tensor:
        return (
            x.chunk(self.size, 1)[self.rank].clone()
            if self.is_skipped()
            else super().reduce_scatter_sequence(x)
        )


def config_of(case: str, tp: int) -> LaunchConfig:
    sections = CASES[case]
    return make_config(
        model=sections["model"],
        parallel=sections.get("parallel", {}) | {"tp": tp},
        batch={"seq_length": 8},
    )


def make_batch(vocab_size: int) -> Microbatch:
    tokens = torch.arange(18).reshape(2, 9) * 7 % vocab_size
    targets = tokens[:, 1:].clone()
    targets[0, 1] = IGNORE_INDEX
    return Microbatch(
        inputs=tokens[:, :-1], targets=targets, samples=torch.tensor([3, 5]), num_targets=0, step=4
    )


def forward_backward(rank: int, config: LaunchConfig, skip: int | None = None) -> Result:
    ctx = make_context(staged_plan(config), rank)
    Saboteur.skip, Saboteur.num_calls = skip, 0
    if config.parallel.tp > 1:
        apply(ctx)
        inside(ctx.layers)._group.__class__ = Saboteur
    (chunk,) = build_chunks(ctx)
    loss = chunk(None, make_batch(config.model.vocab_size or 0))
    loss.backward()
    gradients = []
    for param in chunk.parameters():
        assert param.grad is not None
        if slice_of(param).is_summed_over_tp:
            dist.all_reduce(param.grad, group=ctx.groups.tp.handle)
        gradients.append((slice_of(param), param.grad))
    return Result(loss=float(loss.detach()), gradients=gradients, num_calls=Saboteur.num_calls)


def all_cases(rank: int, tp: int, cases: list[str]) -> dict[str, Result]:
    return {case: forward_backward(rank, config_of(case, tp)) for case in cases}


def all_sabotages(rank: int, case: str) -> list[Result]:
    config = config_of(case, 2)
    num_calls = forward_backward(rank, config).num_calls
    return [forward_backward(rank, config, skip) for skip in range(num_calls)]


@pytest.fixture(scope="module")
def split_results() -> dict[int, list[dict[str, Result]]]:
    """The results of every case on 2 and on 4 ranks."""
    return {2: run_ranks(2, all_cases, 2, list(CASES)), 4: run_ranks(4, all_cases, 4, FOR_FOUR_RANKS)}


def assemble(results: list[Result]) -> dict[str, Tensor]:
    """The global gradients from all ranks' slices; copies have to be equal."""
    whole: dict[str, Tensor] = {}
    for result in results:
        for where, gradient in result.gradients:
            inside = where.unpadded_shape(gradient.shape)
            padding = gradient.clone()
            padding[tuple(slice(0, n) for n in inside)] = 0
            assert not padding.any(), f"padding of {where.name} has a gradient"
            box = tuple(slice(o, o + n) for o, n in zip(where.offset, inside, strict=True))
            part = gradient[tuple(slice(0, n) for n in inside)]
            if not where.is_sharded and where.name in whole:
                torch.testing.assert_close(part, whole[where.name], msg=where.name)
            whole.setdefault(where.name, torch.zeros(where.shape))[box] = part
    return whole


def assert_equal(results: list[Result], reference: Result) -> None:
    for result in results:
        assert result.loss == pytest.approx(reference.loss, rel=1e-6)
    expected = assemble([reference])
    found = assemble(results)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize(
    ("case", "tp"), [(case, 2) for case in CASES] + [(case, 4) for case in FOR_FOUR_RANKS]
)
def test_split_layers_equal_whole_ones(split_results: Any, case: str, tp: int) -> None:
    reference = forward_backward(0, config_of(case, 1))
    assert_equal([result[case] for result in split_results[tp]], reference)


@pytest.mark.parametrize("case", SABOTAGED)
def test_every_collective_is_needed(case: str) -> None:
    reference = forward_backward(0, config_of(case, 1))
    sabotaged = run_ranks(2, all_sabotages, case)
    num_calls = len(sabotaged[0])
    assert num_calls > 10
    for skip in range(num_calls):
        with pytest.raises(AssertionError):
            assert_equal([results[skip] for results in sabotaged], reference)


@pytest.mark.parametrize(
    "case", ["gpt", "llama sequence parallel", "gpt recompute", "llama sequence parallel selective"]
)
def test_messages_are_as_many_and_as_large_as_planned(case: str) -> None:
    sent = run_ranks(2, _messages, case)
    config = config_of(case, 2)
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    planned = dict.fromkeys(kinds, 0)
    for collective in TensorParallel().cost(_job(config), 0).collectives:
        if collective.phase != "step":
            planned[collective.operation] += collective.count * collective.num_bytes
    assert sent[0] == sent[1] == planned


def _messages(rank: int, case: str) -> dict[str, int]:
    """Bytes of the whole buffers of one forward and backward, by kind."""
    sent = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), 0)

    class Counting(TensorParallelGroup):
        def all_reduce(self, x: Tensor, operation: Any = "sum") -> Tensor:
            sent["all_reduce"] += x.nbytes
            return super().all_reduce(x, operation)

        def all_gather_sequence(self, x: Tensor) -> Tensor:
            sent["all_gather"] += x.nbytes * self.size
            return super().all_gather_sequence(x)

        def reduce_scatter_sequence(self, x: Tensor) -> Tensor:
            sent["reduce_scatter"] += x.nbytes
            return super().reduce_scatter_sequence(x)

    config = config_of(case, 2)
    ctx = make_context(staged_plan(config), rank)
    apply(ctx)
    inside(ctx.layers)._group.__class__ = Counting
    (chunk,) = build_chunks(ctx)
    chunk(None, make_batch(37)).backward()
    return sent


def _job(config: LaunchConfig) -> JobShape:
    plan = staged_plan(config)
    model = config.model
    resolved = replace(
        model,
        num_kv_heads=model.num_kv_heads or model.num_heads,
        ffn_size=model.ffn_size or 4 * (model.hidden_size or 0),
    )
    return JobShape(
        config=config,
        cluster=Cluster(config=config.cluster),
        mesh=plan.mesh,
        model=model_shape(resolved, config.batch.seq_length, has_fused_norm=True),
        pipeline=PipelineShape(num_pp_ranks=1),
        stages=plan.stages,
        micro_size=plan.batch.micro_size,
        global_size=plan.batch.global_size,
    )


def test_norm_gradients_of_sequence_slices_are_partial_until_summed() -> None:
    results = run_ranks(2, _partial_norm_gradients)
    assert not torch.allclose(results[0], results[1])
    reference = assemble([forward_backward(0, config_of("llama sequence parallel", 1))])
    torch.testing.assert_close(results[0] + results[1], reference["norm.weight"], rtol=1e-4, atol=2e-5)


def _partial_norm_gradients(rank: int) -> Tensor:
    ctx = make_context(staged_plan(config_of("llama sequence parallel", 2)), rank)
    apply(ctx)
    (chunk,) = build_chunks(ctx)
    chunk(None, make_batch(37)).backward()
    (norm,) = [param for param in chunk.parameters() if slice_of(param).name == "norm.weight"]
    assert norm.grad is not None
    return norm.grad


def test_padded_rows_of_the_vocabulary_are_zero_and_only_the_slice_is_allocated() -> None:
    for rank, (shape, offset, num_inside, padding) in enumerate(run_ranks(2, _embedding_facts)):
        assert shape == (19, 16)
        assert offset == (19 * rank, 0)
        assert num_inside == (19, 18)[rank]
        assert padding == 0


def _embedding_facts(rank: int) -> tuple[tuple[int, ...], tuple[int, ...], int, float]:
    ctx = make_context(staged_plan(config_of("gpt", 2)), rank)
    apply(ctx)
    (chunk,) = build_chunks(ctx)
    (weight,) = [param for param in chunk.parameters() if slice_of(param).name == "embedding.weight"]
    where = slice_of(weight)
    num_inside = where.unpadded_shape(weight.shape)[0]
    return tuple(weight.shape), where.offset, num_inside, float(weight[num_inside:].abs().sum())


def test_bf16_split_stays_near_the_whole() -> None:
    losses = run_ranks(2, _bf16_loss, 2)
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(_bf16_loss(0, 1), rel=2e-2)


def _bf16_loss(rank: int, tp: int) -> float:
    config = make_config(
        model=LLAMA, parallel={"tp": tp}, batch={"seq_length": 8}, precision={"compute": "bf16"}
    )
    ctx = make_context(staged_plan(config), rank)
    if tp > 1:
        apply(ctx)
    (chunk,) = build_chunks(ctx)
    loss = chunk(None, make_batch(37))
    assert loss.dtype == torch.float32
    loss.backward()
    return float(loss.detach())
