"""Fused or not, compiled or not: the same up to rounding, and held is what was planned."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.base.errors import JobError
from launcher.contract.plan import Plan
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.measure.memory import live_bytes
from launcher.runtime.model.blocks import plain_attention
from launcher.runtime.model.compile import layer_calls
from launcher.runtime.process.environment import prepare_compiler
from launcher.runtime.process.rank import make_context
from launcher.runtime.train.loop import Trainer
from tests.helpers.equality import CPU, assert_equal, job, reference, train
from tests.helpers.objects import inside
from tests.helpers.ranks import RankError, run_ranks

GPT = {"num_layers": 2}
WINDOW = GPT | {"family": "llama", "num_kv_heads": 2, "sliding_window": 3}
GROUPED = GPT | {"family": "llama", "num_kv_heads": 2, "tied_embeddings": False}
DROPOUT = GPT | {"dropout": 0.1}
TIMEOUT_S = 120


# The optimizer


@pytest.mark.parametrize("kernels", ["foreach", "loop"])
def test_every_kind_of_optimizer_makes_the_same_update(kernels: str) -> None:
    assert_equal(train(job(model=GPT, fusion={"optimizer": kernels})), reference(GPT))


@pytest.mark.usefixtures("deepspeed_in_parent")
@pytest.mark.parametrize("kernels", ["foreach", "loop"])
def test_deepspeed_takes_every_kind_of_optimizer(kernels: str) -> None:
    plan = job(model=GPT, parallel={"dp": 2, "zero_stage": 1}, fusion={"optimizer": kernels})
    assert_equal(train(plan), reference(GPT))


class Made(TorchDispatchMode):
    """Follows the bytes of what operations make, as long as it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs or {}))}
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given | self._known:
                self._known.add(storage.data_ptr())
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(tensor, self._end, storage.data_ptr(), storage.nbytes())
        return out

    def _end(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.now -= size


def tensors_in(values: Any) -> list[Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def scratch_of_a_step(rank: int, plan: Plan) -> int:
    ctx = make_context(plan.rank(rank), CPU)
    trainer, steps = Trainer(ctx), Loader(ctx).steps(0)
    trainer.step(0, next(steps))
    with Made() as made:
        inside(trainer.update)._optimizer.step()
    return made.peak


@pytest.mark.parametrize("kernels", ["fused", "foreach", "loop"])
def test_an_optimizer_makes_the_scratch_of_the_plan_and_no_more(kernels: str) -> None:
    plan = job(model=GPT | {"hidden_size": 64}, fusion={"optimizer": kernels})
    (found,) = run_ranks(1, scratch_of_a_step, plan)
    planned = plan.memory[0].other_bytes.get("optimizer scratch", 0)
    if kernels == "loop":
        assert planned / 3 < found <= planned, "a whole layer is the bound of its largest tensor"
    else:
        assert found == pytest.approx(planned, rel=0.03, abs=1024)


# Attention


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_plain_attention_is_the_fused_one(kv_heads: int) -> None:
    torch.manual_seed(0)
    shapes = [(2, 4, 7, 8), (2, kv_heads, 7, 8), (2, kv_heads, 7, 8)]
    fused = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    plain = [tensor.detach().clone().requires_grad_() for tensor in fused]
    query, key, value = fused
    attention = nn.functional.scaled_dot_product_attention
    expected = attention(query, key, value, is_causal=True, enable_gqa=True)
    found = plain_attention(*plain)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    for one, other in zip(plain, fused, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "recompute": "full"}], ids=str)
@pytest.mark.parametrize("model", [GROUPED, WINDOW], ids=["causal", "window"])
def test_a_model_with_plain_attention_computes_the_same(
    model: dict[str, Any], layout: dict[str, Any]
) -> None:
    plan = job(model=model, parallel=layout, fusion={"attention": "plain"})
    assert_equal(train(plan), reference(model))


# Compiled layers


def compiled(model: dict[str, Any], parallel: dict[str, Any], **sections: Any) -> Plan:
    fusion, report = {"compile": "block"}, {"warmup_steps": 1}
    return job(model=model, parallel=parallel, fusion=fusion, report=report, **sections)


def num_graphs(rank: int, plan: Plan) -> int:
    """Parts of the model that were compiled in a start of two steps."""
    from torch._dynamo.utils import counters

    ctx = make_context(plan.rank(rank), CPU)
    trainer, steps = Trainer(ctx), Loader(ctx).steps(0)
    for step in range(2):
        trainer.step(step, next(steps))
    return int(counters["stats"]["unique_graphs"])


def test_layers_share_what_is_compiled_and_a_second_start_compiles_nothing_again(compiler: Path) -> None:
    def kernels() -> set[Path]:
        return set(compiler.rglob("*.so"))

    assert run_ranks(1, num_graphs, compiled(DROPOUT, {}), timeout_s=TIMEOUT_S) == [1]
    made = kernels()
    assert made
    more_layers = compiled(DROPOUT | {"num_layers": 4}, {})
    assert run_ranks(1, num_graphs, more_layers, timeout_s=TIMEOUT_S) == [1]
    assert kernels() == made


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pp2 recompute": (DROPOUT, {"pp": 2, "recompute": "full"}),
    "dp2 zero 1": (DROPOUT, {"dp": 2, "zero_stage": 1}),
    "dp2 zero 2": (DROPOUT, {"dp": 2, "zero_stage": 2}),
    "tp2": (GPT, {"tp": 2}),
    "tp2 biases norms window": (WINDOW | {"attention_bias": "all", "qk_norm": True}, {"tp": 2}),
}


@pytest.mark.usefixtures("deepspeed_in_parent", "compiler")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_layers_compute_what_the_others_compute(layout: str) -> None:
    """Within 2e-5, the tolerance of every layout; dropout goes on with every step."""
    model, parallel = LAYOUTS[layout]
    assert_equal(train(compiled(model, parallel), timeout_s=TIMEOUT_S), reference(model))


def keep_the_first_steps_dropout(trainer: Trainer, loader: Loader) -> None:
    """As a kernel would that had taken the number of the step for a constant."""
    for stage in trainer.part.modules.values():
        for block in inside(stage).blocks:
            first: list[Any] = []

            def rows(batch: Any, block: Any = block, first: list[Any] = first) -> Any:
                first.append(type(block).seeds(block, batch))
                return first[0]

            block.seeds = rows


@pytest.mark.usefixtures("compiler")
def test_the_comparison_sees_a_step_that_was_compiled_in() -> None:
    plan = compiled(DROPOUT, {})
    with pytest.raises(AssertionError) as caught:
        assert_equal(train(plan, keep_the_first_steps_dropout, TIMEOUT_S), reference(DROPOUT))
    assert not isinstance(caught.value, RankError), "it crashed, which is not what the comparison is for"


class Versions(nn.Module):
    """Another code for every number that it is called with."""

    def forward(self, x: Tensor, number: int) -> Tensor:
        return x * number


def call_with_many_numbers(rank: int, plan: Plan) -> None:
    (call,) = layer_calls([Versions()], plan.config)
    for number in range(100):
        call(torch.ones(2), number)


@pytest.mark.usefixtures("compiler")
def test_a_layer_that_would_go_on_uncompiled_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.runtime.model.compile._NUM_VERSIONS", 1)
    with pytest.raises(RankError, match="recompile_limit"):
        run_ranks(1, call_with_many_numbers, compiled(GPT, {}), timeout_s=TIMEOUT_S)


def test_a_rank_without_a_compiler_says_how_to_mend_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        JobError, match=r"has no C\+\+ compiler .*: install g\+\+, .* set fusion\.compile=none"
    ):
        prepare_compiler("cpu")


def test_what_is_compiled_is_kept_in_a_folder_of_this_machine_and_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("launcher.runtime.process.environment.missing_for_compile", lambda *_: "")
    monkeypatch.setattr("launcher.runtime.process.environment.cxx_compiler", lambda _: "/usr/bin/g++")
    monkeypatch.setattr("socket.gethostname", lambda: "node07")
    prepare_compiler("cpu")
    folder = tmp_path / "trireme" / "compiled" / "node07"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert os.environ["CXX"] == "/usr/bin/g++"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    prepare_compiler("cpu")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"


def test_what_a_compiler_only_imagines_is_not_held() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        imagined = torch.empty(1 << 20)
    assert imagined.device == CPU
    assert live_bytes(CPU, imagined) == 0
