"""Every optimizer computes under each layout that it goes together with what it computes on one device, holds
what the plan says, and goes on from its checkpoints; a layout that splits what it needs whole does not."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import _muon

from launcher.base.errors import ConfigError
from launcher.contract.optim.plugin import Optimizer
from launcher.contract.plan import Plan
from launcher.plan.cost.shapes import model_shape
from launcher.runtime.api import slice_of
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.model.build import build_chunks
from launcher.runtime.process.rank import make_context
from launcher.runtime.train import native_update
from launcher.runtime.train.loop import Trainer
from launcher.runtime.train.optimizer import make_optimizer, state_shapes
from launcher_plugins.optimizers.adafactor import Adafactor
from launcher_plugins.optimizers.muon import Muon
from tests.helpers.contexts import make_context as lonely_context
from tests.helpers.equality import CPU, Trained, assert_equal, job, train, train_each
from tests.helpers.halves import STEPS, first_half, losses_of, second_half, uninterrupted
from tests.helpers.objects import inside
from tests.helpers.ranks import run_ranks
from tests.helpers.servers import serve_and_train, servers_job

ELEMENTWISE: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "nesterov": True},
    "lion": {"name": "lion", "lr": 1e-3},
}
WHOLE: dict[str, dict[str, Any]] = {
    "adafactor": {"name": "adafactor"},
    "muon": {"name": "muon"},
}
ALL = {"adamw": {}, **ELEMENTWISE, **WHOLE}


def orthogonalise_in_fp32(trainer: Trainer, loader: Loader) -> None:
    """torch does it in bf16, which makes a part in 100 of a difference in the last bit of fp32."""

    def orthogonalised(
        grad: Tensor, coefficients: tuple[float, ...], num_iterations: int, eps: float
    ) -> Tensor:
        a, b, c = coefficients
        is_tall = grad.size(0) > grad.size(1)
        found = grad.T if is_tall else grad
        found = found / found.norm().clamp(min=eps)
        for _ in range(num_iterations):
            gram = found @ found.T
            found = a * found + (b * gram + c * gram @ gram) @ found
        return found.T if is_tall else found

    vars(_muon)["_zeropower_via_newtonschulz"] = orthogonalised


@cache
def alone(name: str) -> Trained:
    return train(job(optim=ALL[name]), orthogonalise_in_fp32)


TWO_RANKS: dict[str, tuple[dict[str, dict[str, Any]], dict[str, Any]]] = {
    "dp2": (WHOLE | ELEMENTWISE, {"dp": 2}),
    "pp2 tied": (WHOLE | ELEMENTWISE, {"pp": 2}),
    "interleaved": (WHOLE | ELEMENTWISE, {"pp": 2, "num_chunks": 2, "schedule": "interleaved_1f1b"}),
    "zero bubble": (WHOLE | ELEMENTWISE, {"pp": 2, "schedule": "zb_h1"}),
    "tp2": (ELEMENTWISE, {"tp": 2}),
    "sequence parallel": (ELEMENTWISE, {"tp": 2, "sequence_parallel": True}),
    "zero 1": (ELEMENTWISE, {"dp": 2, "zero_stage": 1}),
    "zero 2": (ELEMENTWISE, {"dp": 2, "zero_stage": 2}),
    "zero 3": (ELEMENTWISE, {"dp": 2, "zero_stage": 3}),
    "dp2 pp2": (WHOLE | ELEMENTWISE, {"dp": 2, "pp": 2}),
    "dp2 tp2": (ELEMENTWISE, {"dp": 2, "tp": 2}),
    "zero 1 pp2": (ELEMENTWISE, {"dp": 2, "pp": 2, "zero_stage": 1}),
}


@pytest.mark.usefixtures("deepspeed_in_parent")
@pytest.mark.parametrize("layout", TWO_RANKS)
def test_a_layout_computes_what_one_device_computes(layout: str) -> None:
    optimizers, parallel = TWO_RANKS[layout]
    plans = [job(parallel=parallel, optim=optim) for optim in optimizers.values()]
    for name, found in zip(optimizers, train_each(plans, orthogonalise_in_fp32), strict=True):
        assert_equal(found, alone(name))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_servers_compute_what_one_device_computes(name: str, tmp_path: Path) -> None:
    plan = servers_job(optim=ELEMENTWISE[name])
    assert_equal(serve_and_train(plan, tmp_path).trained, alone(name))


def train_one_replica_alone(trainer: Trainer, loader: Loader) -> None:
    orthogonalise_in_fp32(trainer, loader)
    inside(trainer.update)._buckets.exchange = None


@pytest.mark.parametrize("name", [*ELEMENTWISE, *WHOLE])
def test_gradients_that_are_not_exchanged_are_told_apart(name: str) -> None:
    expected = alone(name)
    with pytest.raises(AssertionError):
        assert_equal(train(job(parallel={"dp": 2}, optim=ALL[name]), train_one_replica_alone), expected)


@pytest.mark.parametrize(("name", "kind"), [("adafactor", Adafactor), ("muon", Muon)])
def test_split_matrices_are_refused_as_they_would_be_told_apart(
    name: str, kind: type[Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(name)
    with pytest.raises(ConfigError, match=f"optim.name={name}: updates a tensor by all of its elements"):
        job(parallel={"tp": 2}, optim=ALL[name])
    monkeypatch.setattr(kind, "is_elementwise", True)
    monkeypatch.setattr(kind, "states", lambda self, parameter, config: {})
    found = train(job(parallel={"tp": 2}, optim=ALL[name]), orthogonalise_in_fp32)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(
            torch.tensor(found.losses), torch.tensor(expected.losses), rtol=2e-5, atol=0
        )


def held_states(rank: int, plan: Plan) -> int:
    trainer = Trainer(make_context(plan.rank(rank), CPU))
    trainer.step(0, next(Loader(trainer.ctx).steps(0)))
    states = inside(trainer.update)._optimizer.state.values()
    return sum(each.nbytes for state in states for kind, each in state.items() if kind != "step")


@pytest.mark.parametrize("name", ALL)
def test_an_optimizer_holds_what_the_plan_says(name: str) -> None:
    plan = job(parallel={"pp": 2}, optim=ALL[name])
    assert run_ranks(2, held_states, plan) == [planned.optimizer_bytes for planned in plan.memory]


@pytest.mark.parametrize("name", ALL)
def test_states_have_the_names_and_shapes_that_the_plugin_says(name: str) -> None:
    ctx = lonely_context(job(optim=ALL[name]))
    model = nn.ModuleList(build_chunks(ctx))
    params = list(dict.fromkeys(model.parameters()))
    optimizer = make_optimizer(((param, slice_of(param)) for param in params), ctx)
    assert optimizer is not None
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    for param in params:
        found = {kind: tuple(each.shape) for kind, each in optimizer.state[param].items() if kind != "step"}
        assert found == state_shapes(ctx.config, slice_of(param), param.shape)


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"tied_embeddings": True, "max_position_embeddings": 32},
        {"family": "llama", "num_kv_heads": 2, "head_dim": 8, "tied_embeddings": False},
        {"family": "llama", "num_kv_heads": 2, "attention_bias": "qkv", "qk_norm": True},
        {"family": "llama", "num_kv_heads": 2, "attention_bias": "all"},
    ],
    ids=["gpt", "gpt tied", "llama", "biases of queries, keys and values, norms of heads", "all biases"],
)
def test_a_plan_knows_the_names_and_shapes_of_the_parameters(model: dict[str, Any]) -> None:
    plan = job(model=model)
    built = nn.ModuleList(build_chunks(lonely_context(plan)))
    found = {slice_of(param).name: slice_of(param).shape for param in built.parameters()}
    shape = model_shape(plan.config.model, plan.batch.seq_length, has_fused_norm=False)
    assert found == {each.name: each.shape for each in shape.parameters}


RESUMES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, dict[str, Any]]]] = {
    "dp2 to pp2": ({"dp": 2}, {"pp": 2}, ALL),
    "tp2 to zero 1": ({"tp": 2}, {"dp": 2, "zero_stage": 1}, ELEMENTWISE),
    "zero 2 to dp2": ({"dp": 2, "zero_stage": 2}, {"dp": 2}, ELEMENTWISE),
}


def of_each(rank: int, half: Callable[..., Any], plans: dict[str, Plan], root: Path | None) -> dict[str, Any]:
    """What one of `tests.helpers.halves` gives for each plan; the second one in fp32."""
    orthogonalise_in_fp32(None, None)  # type: ignore[arg-type]
    return {name: half(rank, plan, *((root / name,) if root else ())) for name, plan in plans.items()}


@pytest.mark.usefixtures("deepspeed_in_parent")
@pytest.mark.parametrize("change", RESUMES)
def test_training_goes_on_under_another_layout(change: str, tmp_path: Path) -> None:
    before, after, optimizers = RESUMES[change]

    def plans(parallel: dict[str, Any]) -> dict[str, Plan]:
        return {name: job(parallel=parallel, optim=optim) for name, optim in optimizers.items()}

    whole = run_ranks(1, of_each, uninterrupted, plans({}), None)
    first = run_ranks(2, of_each, first_half, plans(before), tmp_path)
    second = run_ranks(2, of_each, second_half, plans(after), tmp_path)
    for name in optimizers:
        expected, *halves = (losses_of([rank[name] for rank in part]) for part in (whole, first, second))
        assert len(expected) == STEPS
        assert [*halves[0], *halves[1]] == pytest.approx(expected, rel=2e-5), name


def second_half_without_states(rank: int, plan: Plan, root: Path) -> list[float | None]:
    """As `second_half`, the states of the optimizer lost."""
    vars(native_update)["set_state"] = lambda optimizer, tensor, states, num_updates: None
    return second_half(rank, plan, root)


@pytest.mark.parametrize("name", ALL)
def test_a_lost_state_is_told_apart(name: str, tmp_path: Path) -> None:
    plan = job(optim=ALL[name])
    (whole,) = run_ranks(1, uninterrupted, plan)
    run_ranks(1, first_half, plan, tmp_path)
    (found,) = run_ranks(1, second_half_without_states, plan, tmp_path)
    assert found[0] == pytest.approx(whole[2], rel=2e-5), "the weights are there"
    assert found[1] != pytest.approx(whole[3], rel=2e-5)
