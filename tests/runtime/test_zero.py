"""ZeRO through DeepSpeed computes what one device computes, splits what it says it splits, and goes on from
any checkpoint."""

from __future__ import annotations

import ctypes
import resource
import sys
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.contract.model.shape import LayerShape, ModelShape
from launcher.contract.plan import Plan
from launcher.plan.checked_job import PlanInputs
from launcher.runtime.api import slice_of
from launcher.runtime.checkpoint.saving import restore
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.model.build import build_chunks
from launcher.runtime.process.rank import make_context
from launcher.runtime.train.loop import Trainer
from launcher_plugins.parallel.zero import deepspeed_json as zero_json
from launcher_plugins.parallel.zero import deepspeed_keys as zero_keys
from launcher_plugins.parallel.zero.deepspeed_json import deepspeed_json
from launcher_plugins.parallel.zero.runtime.state import num_good_steps, set_num_good_steps
from launcher_plugins.parallel.zero.runtime.update import Zero1Update
from tests.helpers.equality import CPU, Sabotage, assert_equal, job, reference, skip_sums_over, train
from tests.helpers.halves import save
from tests.helpers.objects import inside, substitute
from tests.helpers.ranks import RankError, run_ranks

pytestmark = pytest.mark.usefixtures("deepspeed_in_parent")
GPT = {"num_layers": 2}
LLAMA = GPT | {"family": "llama", "num_kv_heads": 2, "tied_embeddings": False}
ALL_THREE = LLAMA | {"attention_bias": "all", "qk_norm": True, "head_dim": 8, "sliding_window": 3}
PADDED = GPT | {"vocab_size": 257}
DROPOUT = {"dropout": 0.1}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero 1": (GPT, {"dp": 2, "zero_stage": 1}),
    "zero 2": (GPT, {"dp": 2, "zero_stage": 2}),
    "zero 3": (GPT, {"dp": 2, "zero_stage": 3}),
    "zero 1 dp4 vocabulary odd": (PADDED, {"dp": 4, "zero_stage": 1}),
    "zero 1 pp2 tied dropout": (
        GPT | DROPOUT,
        {"dp": 2, "pp": 2, "zero_stage": 1, "recompute": "full"},
    ),
    "zero 1 pp2 zero bubble": (GPT, {"dp": 2, "pp": 2, "zero_stage": 1, "schedule": "zb_h1"}),
    "zero 1 tp2 sequence parallel": (GPT, {"dp": 2, "tp": 2, "zero_stage": 1, "sequence_parallel": True}),
    "zero 1 tp2 pp2": (PADDED, {"dp": 2, "tp": 2, "pp": 2, "zero_stage": 1}),
    "zero 2 recompute dropout": (GPT | DROPOUT, {"dp": 2, "zero_stage": 2, "recompute": "full"}),
    "zero 2 tp2 sequence parallel": (LLAMA, {"dp": 2, "tp": 2, "zero_stage": 2, "sequence_parallel": True}),
    "zero 1 tp2 biases norms window": (ALL_THREE, {"dp": 2, "tp": 2, "zero_stage": 1}),
    "zero 2 tp2 biases norms window": (ALL_THREE, {"dp": 2, "tp": 2, "zero_stage": 2}),
    "zero 3 tp2 biases norms window": (ALL_THREE, {"dp": 2, "tp": 2, "zero_stage": 3}),
    "zero 3 tp2": (PADDED, {"dp": 2, "tp": 2, "zero_stage": 3}),
    "zero 3 recompute dropout": (LLAMA | DROPOUT, {"dp": 2, "zero_stage": 3, "recompute": "full"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_split_states_compute_what_one_device_computes(layout: str) -> None:
    """With four or two microbatches accumulated, and clipping at work."""
    model, parallel = LAYOUTS[layout]
    assert_equal(train(job(model=model, parallel=parallel)), reference(model))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_optimizer_state_may_be_updated_in_the_memory_of_the_cpu(stage: int) -> None:
    plan = job(model=GPT, parallel={"dp": 2, "zero_stage": stage})
    assert_equal(train(offloaded(plan)), reference(GPT))


def offloaded(plan: Plan) -> Plan:
    """As a plan for GPUs has it: on a CPU the planner refuses what changes nothing there."""
    parallel = replace(plan.config.parallel, zero_offload=True)
    config = replace(plan.config, parallel=parallel)
    documents = {"deepspeed.json": deepspeed_json(config, plan.num_parameters)}
    return replace(plan, config=config, documents=documents)


@pytest.mark.parametrize(("stage", "gradients"), [(1, "fp32"), (1, "bf16"), (2, "fp32"), (3, "fp32")])
def test_bf16_follows_the_native_path(stage: int, gradients: str) -> None:
    """Up to the rounding of bf16, of which a step is 1/256."""
    precision = {"name": "bf16", "compute": "bf16", "gradients": gradients, "master_weights": True}
    device = {"peak_flops": {"fp32": 1e9, "bf16": 1e9}}
    native = train(job(model=LLAMA, precision=precision, device=device))
    found = train(
        job(model=LLAMA, precision=precision, device=device, parallel={"dp": 2, "zero_stage": stage})
    )
    for name in ("losses", "norms"):
        torch.testing.assert_close(
            torch.tensor(getattr(found, name)), torch.tensor(getattr(native, name)), rtol=5e-3, atol=0
        )
    for name, weight in native.weights.items():
        torch.testing.assert_close(
            found.weights[name], weight, rtol=0.02, atol=0.02 * float(weight.abs().max())
        )


# What follows breaks one thing each; the comparison above must see it.


def take_the_mean_for_the_sum(trainer: Trainer, loader: Loader) -> None:
    substitute(Zero1Update, "loss_scale", 1.0)


def count_split_parameters_on_one_rank(trainer: Trainer, loader: Loader) -> None:
    for param in inside(trainer.update)._params:
        param.model_parallel = False


def count_the_tied_copy_too(trainer: Trainer, loader: Loader) -> None:
    for param in inside(trainer.update)._params:
        param.ds_pipe_replicated = False


def lose_the_last_boundary(trainer: Trainer, loader: Loader) -> None:
    engine = inside(trainer.update)._engine
    allreduce = engine.allreduce_gradients

    def forgetting() -> None:
        inside(trainer.update)._params[0].grad.zero_()
        allreduce()

    engine.allreduce_gradients = forgetting


SABOTAGES: dict[str, tuple[str, Sabotage]] = {
    "the mean over the replicas is taken for the sum": ("zero 1", take_the_mean_for_the_sum),
    "one gradient is lost": ("zero 1", lose_the_last_boundary),
    "split parameters count on one rank only": ("zero 1 tp2 pp2", count_split_parameters_on_one_rank),
    "the tied copy counts twice": ("zero 1 pp2 tied dropout", count_the_tied_copy_too),
    "tied gradients are not summed": ("zero 1 pp2 tied dropout", skip_sums_over("tied")),
    "the sequence's parts are not summed": ("zero 1 tp2 sequence parallel", skip_sums_over("tp")),
}


@pytest.mark.parametrize("fault", SABOTAGES)
def test_the_comparison_sees_that(fault: str) -> None:
    layout, sabotage = SABOTAGES[fault]
    model, parallel = LAYOUTS[layout]
    with pytest.raises(AssertionError) as caught:
        assert_equal(train(job(model=model, parallel=parallel), sabotage), reference(model))
    assert not isinstance(caught.value, RankError), "it crashed, which is not what the comparison is for"


def a_step_with_a_weight_that_is_no_number(rank: int, plan: Plan) -> None:
    ctx = make_context(plan.rank(rank), CPU)
    trainer = Trainer(ctx)
    next(iter(inside(trainer.update)._params)).data.fill_(torch.nan)
    trainer.step(0, next(Loader(ctx).steps(0)))


@pytest.mark.parametrize("stage", [1, 2])
def test_a_gradient_that_is_not_finite_ends_the_run(stage: int) -> None:
    plan = job(model=GPT, parallel={"dp": 2, "zero_stage": stage})
    with pytest.raises(RankError, match=r"gradient of step 1 is not finite .* try a smaller optim\.lr"):
        run_ranks(2, a_step_with_a_weight_that_is_no_number, plan)


def owned_elements(rank: int, plan: Plan) -> tuple[int, int]:
    """Elements of the optimizer's weights that are this rank's, and of all parameters."""
    update = inside(Trainer(make_context(plan.rank(rank), CPU)).update)
    parts = update._parts()
    flats = {id(part.flat): part.flat.numel() for part in parts}
    assert sum(flats.values()) - sum(part.numel for part in parts) < 16 * len(parts), "only padding is extra"
    return sum(part.numel for part in parts), sum(prod(slice_of(p).shape) for p in update._params)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_replica_owns_its_share_and_together_they_own_everything_once(stage: int) -> None:
    plan = job(model=PADDED, parallel={"dp": 2, "zero_stage": stage})
    owned, whole = zip(*run_ranks(2, owned_elements, plan), strict=True)
    assert sum(owned) == whole[0]
    assert max(owned) <= whole[0] / 2 + 64


def a_timed_step(rank: int, plan: Plan) -> dict[str, int]:
    """Number of messages of each kind in one step."""
    ctx = make_context(plan.rank(rank), CPU)
    trainer, steps = Trainer(ctx), Loader(ctx).steps(0)
    ctx.clock.start()
    trainer.step(0, next(steps))
    return {kind: len(times) for kind, times in ctx.clock.lap()["collectives_ns"].items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_messages_of_deepspeed_are_on_the_clock_of_every_replica_alike(stage: int) -> None:
    plan = job(model=GPT, parallel={"dp": 2, "zero_stage": stage})
    first, second = run_ranks(2, a_timed_step, plan)
    assert first == second
    assert first["dp"] > 2, "more than the loss and the count of its targets"


M_MMAP_THRESHOLD = -3
"""From which size on glibc gives an allocation pages of its own."""
BIG = {"num_layers": 24, "hidden_size": 256, "num_heads": 4, "vocab_size": 256}
"""19 million parameters, 76 MB; a layer has 3 MB."""


def build_under_a_limit(rank: int, plan: Plan, limit_bytes: int) -> int:
    """Bytes of data that building the model takes; allocations beyond the limit fail."""
    ctx = make_context(plan.rank(rank), CPU)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # a tensor that is freed leaves no hole
    fill_holes()
    before = data_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (before + limit_bytes, resource.RLIM_INFINITY))
    chunks = build_chunks(ctx)
    assert chunks
    return data_bytes() - before


def fill_holes() -> None:
    """Takes the room that earlier tests of the parent process left in its memory, so that what is allocated
    from now on is new."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    for size in (4 << 20, 1 << 20, 1 << 18, 1 << 16):
        while (before := data_bytes()) >= 0:
            block = libc.malloc(size)
            if data_bytes() > before:
                libc.free(block)
                break


def data_bytes() -> int:
    """Private writable memory of this process, touched or not."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_stage_3_starts_a_model_that_does_not_fit_on_one_rank() -> None:
    limit = 62 << 20
    split = job(model=BIG, parallel={"dp": 4, "zero_stage": 3})
    assert max(run_ranks(4, build_under_a_limit, split, limit)) < limit
    with pytest.raises(RankError, match=r"(can't allocate memory|MemoryError)"):
        run_ranks(1, build_under_a_limit, job(model=BIG), limit)


class Wide:
    """A user's model of 151 MB, whose layers of 3 MB are made one at a time, or all at once."""

    def __init__(self, *, at_once: bool) -> None:
        made = (nn.Linear(1024, 768) if index % 2 == 0 else nn.Linear(768, 1024) for index in range(48))
        self.layers = list(made) if at_once else made

    @staticmethod
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).square().sum()


def wide(*, at_once: bool) -> Plan:
    """Planned with the sizes that a measurement would find: they are not what is tested here."""
    layer = LayerShape(
        name="linear",
        num_parameters=1024 * 768 + 1024,
        num_replicated_parameters=1024 * 768 + 1024,
        forward_flops=1.0,
        kept_elements=1,
        kept_replicated_elements=0,
        output_elements=1024,
        output_shape=(1024,),
    )
    shape = ModelShape(
        family="custom", layers=(layer,) * 48, prologue=None, epilogue=None, num_tied_parameters=0
    )
    sizes = dict.fromkeys(("num_layers", "hidden_size", "num_heads", "vocab_size"))
    model = sizes | {"family": "custom", "target": "wide:Wide", "options": {"at_once": at_once}}
    return job(inputs=PlanInputs(shape=shape), model=model, parallel={"dp": 4, "zero_stage": 3})


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_stage_3_starts_a_users_model_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wide", SimpleNamespace(Wide=Wide))
    limit = 100 << 20
    assert max(run_ranks(4, build_under_a_limit, wide(at_once=False), limit)) < limit
    with pytest.raises(RankError, match=r"(can't allocate memory|MemoryError)"):
        run_ranks(4, build_under_a_limit, wide(at_once=True), limit)


# Checkpoints


STEPS = 6
"""Two under each of three layouts."""
CHAINS: dict[str, tuple[dict[str, Any], ...]] = {
    "zero 1, one device, zero 3": ({"dp": 2, "zero_stage": 1}, {}, {"dp": 2, "zero_stage": 3}),
    "zero 3, zero 2 tp2, zero 1 pp2": (
        {"dp": 2, "zero_stage": 3},
        {"dp": 2, "tp": 2, "zero_stage": 2},
        {"dp": 2, "pp": 2, "zero_stage": 1},
    ),
    "zero 1 dp4, zero 1 dp2, tp2": ({"dp": 4, "zero_stage": 1}, {"dp": 2, "zero_stage": 1}, {"tp": 2}),
}


def some_steps(rank: int, plan: Plan, root: Path, first: int, last: int) -> list[float | None]:
    ctx = make_context(plan.rank(rank), CPU)
    trainer = Trainer(ctx)
    if first:
        assert restore(trainer.ctx, trainer.update, root) == first
    steps = Loader(ctx).steps(first)
    losses = [trainer.step(step, next(steps)).loss for step in range(first, last)]
    save(trainer, root, last)
    return losses


def run_chain(layouts: tuple[dict[str, Any], ...], root: Path) -> list[float]:
    losses: list[float] = []
    for number, parallel in enumerate(layouts):
        plan, count = job(model=PADDED | DROPOUT, parallel=parallel), STEPS // len(layouts)
        results = run_ranks(plan.world_size, some_steps, plan, root, number * count, (number + 1) * count)
        (last_stage, *_) = (result for result in results if result[0] is not None)
        losses += last_stage
    return losses


@pytest.mark.parametrize("chain", CHAINS)
def test_training_goes_on_from_one_stage_to_another(chain: str, tmp_path: Path) -> None:
    expected = run_chain(({},), tmp_path / "whole")
    found = run_chain(CHAINS[chain], tmp_path / "chain")
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=0)


def every_pair_of_stages(rank: int, plans: list[Plan], root: Path) -> dict[tuple[int, int], float | None]:
    """Loss of the step after a resume, by stage before and stage after; all in one process."""
    losses = {}
    for before, plan in enumerate(plans):
        some_steps(rank, plan, root / str(before), 0, 2)
        for after, other in enumerate(plans):
            trainer = Trainer(ctx := make_context(other.rank(rank), CPU))
            assert restore(trainer.ctx, trainer.update, root / str(before)) == 2
            losses[before, after] = trainer.step(2, next(Loader(ctx).steps(2))).loss
    return losses


def test_every_stage_goes_on_from_every_other(tmp_path: Path) -> None:
    (_, _, expected, *_) = run_chain(({},), tmp_path / "whole")
    plans = [job(model=PADDED | DROPOUT, parallel={"dp": 2, "zero_stage": stage}) for stage in (0, 1, 2, 3)]
    found, _ = run_ranks(2, every_pair_of_stages, plans, tmp_path, timeout_s=180)
    assert found == {pair: pytest.approx(expected, rel=2e-5) for pair in product(range(4), repeat=2)}


def saved_by_each(rank: int, plans: dict[str, Plan], root: Path) -> None:
    for name, plan in plans.items():
        some_steps(rank, plan, root / name, 0, 2)


def loss_after_each(rank: int, plan_of: dict[str, Plan], root: Path) -> dict[str, float | None]:
    """Loss of the step after a resume from each folder, under the plan for it; all in one process."""
    losses = {}
    for name, plan in plan_of.items():
        trainer = Trainer(ctx := make_context(plan.rank(rank), CPU))
        assert restore(trainer.ctx, trainer.update, root / name.partition(",")[0]) == 2
        losses[name] = trainer.step(2, next(Loader(ctx).steps(2))).loss
    return losses


def test_every_stage_goes_on_from_one_device_to_two_and_back(tmp_path: Path) -> None:
    """On one device there is no stage but 0: the plan refuses to split what one replica has."""
    (_, _, expected, *_) = run_chain(({},), tmp_path / "whole")
    alone = job(model=PADDED | DROPOUT)
    split = {
        f"stage {stage}": job(model=PADDED | DROPOUT, parallel={"dp": 2, "zero_stage": stage})
        for stage in range(4)
    }
    run_ranks(2, saved_by_each, split, tmp_path, timeout_s=90)
    run_ranks(1, saved_by_each, {"alone": alone}, tmp_path)
    (to_one,) = run_ranks(1, loss_after_each, dict.fromkeys(split, alone), tmp_path)
    from_one = {f"alone, {name}": plan for name, plan in split.items()}
    to_two, _ = run_ranks(2, loss_after_each, from_one, tmp_path, timeout_s=90)
    assert to_one | to_two == dict.fromkeys([*split, *from_one], pytest.approx(expected, rel=2e-5))


def steps_without_moments(rank: int, plan: Plan, root: Path) -> list[float | None]:
    ctx = make_context(plan.rank(rank), CPU)
    trainer = Trainer(ctx)
    first = restore(trainer.ctx, trainer.update, root)
    for state in inside(trainer.update)._engine.optimizer.optimizer.state.values():
        state["exp_avg"].zero_()
    steps = Loader(ctx).steps(first)
    return [trainer.step(step, next(steps)).loss for step in range(first, STEPS)]


def test_a_lost_optimizer_state_is_told_apart(tmp_path: Path) -> None:
    expected = run_chain(({},), tmp_path / "whole")[2:]
    plan = job(model=PADDED | DROPOUT, parallel={"dp": 2, "zero_stage": 1})
    run_ranks(2, some_steps, plan, tmp_path / "cut", 0, 2)
    found, _ = run_ranks(2, steps_without_moments, plan, tmp_path / "cut")
    with pytest.raises(AssertionError):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=0)


def test_the_loss_scale_of_deepspeed_counts_on() -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    settings = {"scale_window": 5, "min_scale": 1.0, "delayed_shift": 1, "consecutive_hysteresis": False}
    scaler, resumed = (DynamicLossScaler(init_scale=8.0, **settings) for _ in range(2))
    scaler.last_overflow_iter, scaler.cur_iter = 1, 4
    assert num_good_steps(scaler) == 2
    set_num_good_steps(resumed, 2)
    for _ in range(5):
        scaler.update_scale(False)
        resumed.update_scale(False)
        assert resumed.cur_scale == scaler.cur_scale
    assert scaler.cur_scale == 16.0, "they doubled at the same step"


def test_deepspeed_knows_every_key_that_may_be_set() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields
    known = {name for field, info in fields.items() for name in (field, info.alias)}
    assert known >= {*zero_keys._EVERY_STAGE, *zero_keys._STAGE_3, *zero_keys._UNUSABLE}


def test_every_key_that_deepspeed_reads_is_decided_on() -> None:
    """A key that a newer DeepSpeed reads is refused until it is: only those that are named are taken."""
    from deepspeed.runtime import config as deepspeed_config

    asked: set[str] = set()

    class Listening(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            asked.add(key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            asked.add(str(key))
            return super().__contains__(key)

        def keys(self) -> Any:
            return self

    deepspeed_config.DeepSpeedConfig(Listening(train_batch_size=1))
    ours = {key.partition(".")[0] for key in zero_json._SOURCES}
    removed = deepspeed_config._REMOVED_TOP_LEVEL_CONFIG_KEYS  # which it refuses itself
    decided = {*zero_keys.TAKEN, *zero_keys.UNUSED, *ours, *removed}
    assert asked - decided == {"zero_allow_untested_optimizer"}, "which has a fixed value"
    assert asked >= {"train_batch_size", "steps_per_print", "tensorboard", "prescale_gradients", "timers"}


def test_keys_that_are_taken_start() -> None:
    said: dict[str, Any] = {"log_level": "error", "zero_optimization": {"enable_sanity_checks": True}}
    for key, value in zero_keys._HOLDING.items():
        top, _, name = key.partition(".")
        said[top] = said.get(top, {}) | {name: value} if name else value
    plan = job(model=GPT, parallel={"dp": 2, "zero_stage": 2, "zero_options": said})
    assert_equal(train(plan), reference(GPT))
