"""Models whose parameters are not all trained: every layout computes what plain torch computes on one device,
holds what its plan says, and goes on from the checkpoint of another."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from launcher.base.errors import PlanError
from launcher.contract.model.shape import ModelShape
from launcher.contract.optim.config import GroupConfig
from launcher.contract.optim.rates import learning_rate
from launcher.contract.plan import Plan
from launcher.plan.checked_job import PlanInputs
from launcher.runtime.checkpoint.saving import restore
from launcher.runtime.checkpoint.shard import sha256_of
from launcher.runtime.checkpoint.store import folder_of, write_marker
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.measure.memory import live_bytes
from launcher.runtime.model import user_model
from launcher.runtime.model.deferred_weight_gradients import split_with
from launcher.runtime.model.measure_shape import describe
from launcher.runtime.process.rank import make_context
from launcher.runtime.train.loop import Trainer
from launcher_plugins.parallel.zero.deepspeed_json import deepspeed_json
from tests.helpers.contexts import make_config
from tests.helpers.equality import CPU, NUM_STEPS, Trained, assert_equal, job, train, train_each
from tests.helpers.halves import (
    HALF,
    STEPS,
    first_half,
    losses_of,
    save,
    second_half,
    uninterrupted,
)
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.run_folders import make_folders
from tests.helpers.servers import rank_of_servers, serve_and_train, servers_job
from tests.helpers.two_levels import TWO_LEVELS

pytestmark = pytest.mark.usefixtures("deepspeed_in_parent")
WIDTH, VOCAB = 16, 256


class Linear(nn.Linear):
    """One whose weight gradient can be deferred."""

    def split_with(self, deferral: Any) -> None:
        self.deferral = deferral

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.deferral.linear(x, self.weight, self.bias))


class NoGrad(nn.Module):
    """A feature extractor whose parameters require a gradient and get none."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Detached(Linear):
    """Trains itself, and nothing before."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


class Adapter(nn.Module):
    """A frozen matrix with a trained one of low rank beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base, self.down = frozen(Linear(width, width)), nn.Linear(width, 2, bias=False)
        self.up = nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def layers_of(kind: str, width: int) -> list[nn.Module]:
    table, head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
    body = [Linear(width, width) for _ in range(2)]
    made: dict[str, Callable[[], list[nn.Module]]] = {
        "first": lambda: [frozen(table), frozen(body[0]), body[1], head],
        "first stages": lambda: [frozen(table), *map(frozen, body), head],
        "middle": lambda: [table, frozen(body[0]), body[1], head],
        "last": lambda: [table, body[0], frozen(body[1]), frozen(head)],
        "adapters": lambda: [frozen(table), Adapter(width), Adapter(width), frozen(head)],
        "biases": lambda: [frozen(table), *map(biases, body), frozen(head)],
        "no grad first": lambda: [NoGrad(table), *body, head],
        "no grad middle": lambda: [table, NoGrad(body[0]), body[1], head],
        "detached": lambda: [table, body[0], Detached(width, width), head],
        "none": lambda: [table, *body, head],
        "all": lambda: [frozen(table), *map(frozen, body), frozen(head)],
    }
    return made[kind]()


def biases(layer: nn.Module) -> nn.Module:
    """With the bias alone trained."""
    for name, param in layer.named_parameters():
        param.requires_grad_(name == "bias")
    return layer


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, -2), targets.flatten(), reduction="sum")


@pytest.fixture(scope="module", autouse=True)
def _module() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "partly_trained", SimpleNamespace(build=build))
        yield


def build(kind: str, width: int = WIDTH) -> Any:
    return SimpleNamespace(layers=layers_of(kind, width), loss=loss_of)


def settings(kind: str, width: int = WIDTH, **sections: Any) -> dict[str, Any]:
    model = dict.fromkeys(("num_layers", "num_heads", "hidden_size", "vocab_size"))
    options = {"kind": kind, "width": width}
    model |= {"family": "custom", "target": "partly_trained:build", "options": options}
    optim = {"weight_decay": 0.3} | sections.pop("optim", {})
    shape = describe(make_config(model=model).model, torch.zeros(1, 8, dtype=torch.int64))
    return {"model": model, "optim": optim, "inputs": PlanInputs(shape=shape), **sections}


def plan_of(kind: str, parallel: dict[str, Any], **sections: Any) -> Plan:
    return job(**settings(kind, parallel=parallel, **sections))


@cache
def plain_torch(kind: str) -> Trained:
    """The training written out, on one device, with nothing of the launcher's but its batches."""
    plan = plan_of(kind, {})
    optim, ctx = plan.config.optim, make_context(plan.rank(0), CPU)
    layers = list(user_model.load_custom(plan.config.model, plan.config.seed).layers)
    for layer in layers:
        split_with(layer, ctx.split_backward)
    named = {f"layers.{i}.{n}": p for i, layer in enumerate(layers) for n, p in layer.named_parameters()}
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in named.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, **optim.options)
    losses, norms, steps = [], [], Loader(ctx).steps(0)
    for step in range(NUM_STEPS):
        batches = next(steps)
        hidden = torch.cat([batch.inputs for batch in batches])
        for layer in layers:
            hidden = layer(hidden)
        targets = torch.cat([batch.targets for batch in batches])
        loss = loss_of(hidden, targets) / targets.numel()
        adam.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(named.values(), optim.clip_norm or torch.inf)))
        for group in adam.param_groups:
            group["lr"] = learning_rate(optim, step, plan.config.train.num_steps)
        adam.step()
        losses.append(loss.item())
    moments = {
        f"{kind}/{name}": adam.state[param][kind]
        for name, param in named.items()
        for kind in ("exp_avg", "exp_avg_sq")
        if param in adam.state
    }
    weights = {name: param.detach() for name, param in named.items()}
    return Trained(losses=losses, norms=norms, weights=weights, moments=moments)


FROZEN = ("first", "first stages", "middle", "last", "adapters", "biases")
KINDS = (*FROZEN, "no grad first", "no grad middle", "detached")
DEEP = ("first stages", "last", "biases")
"""Those with stages that train nothing, or only what does not decay."""
LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "dp2": (KINDS, {"dp": 2}),
    "1f1b": (KINDS, {"pp": 2}),
    "gpipe recompute": (KINDS, {"pp": 2, "schedule": "gpipe", "recompute": "full"}),
    "interleaved": (KINDS, {"pp": 2, "num_chunks": 2, "schedule": "interleaved_1f1b"}),
    "zero bubble": (KINDS, {"pp": 2, "schedule": "zb_h1"}),
    "zero 1": (KINDS, {"dp": 2, "zero_stage": 1}),
    "zero 2": (KINDS, {"dp": 2, "zero_stage": 2}),
    "zero 3": (KINDS, {"dp": 2, "zero_stage": 3, "recompute": "full"}),
    "pp4": (DEEP, {"pp": 4}),
    "zero 1 pp2": (DEEP, {"dp": 2, "pp": 2, "zero_stage": 1}),
    "zero 1 zero bubble": (DEEP, {"dp": 2, "pp": 2, "zero_stage": 1, "schedule": "zb_h1"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_that_are_not_trained_leave_every_layout_equal_to_plain_torch(layout: str) -> None:
    kinds, parallel = LAYOUTS[layout]
    found = train_each([plan_of(kind, parallel) for kind in kinds])
    for kind, trained in zip(kinds, found, strict=True):
        assert_equal(trained, plain_torch(kind))


def test_parts_that_are_not_trained_leave_sums_of_two_levels_equal_to_plain_torch() -> None:
    found = train_each([plan_of(kind, {"dp": 4}, **TWO_LEVELS) for kind in KINDS])
    for kind, trained in zip(KINDS, found, strict=True):
        assert_equal(trained, plain_torch(kind))


def test_a_stage_that_trains_nothing_goes_with_bf16_and_with_offloaded_states() -> None:
    precision = {"name": "bf16", "compute": "bf16", "master_weights": True}
    mixed = {"precision": precision, "device": {"peak_flops": {"fp32": 1e9, "bf16": 1e9}}}
    spread = {"dp": 2, "pp": 2, "zero_stage": 1}
    native = train(plan_of("last", {}, **mixed))
    found, moved = train_each([plan_of("last", spread, **mixed), offloaded(plan_of("last", spread))])
    torch.testing.assert_close(torch.tensor(found.norms), torch.tensor(native.norms), rtol=5e-3, atol=0)
    for name, weight in native.weights.items():
        largest = float(weight.abs().max())
        torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=0.02 * largest)
    assert_equal(moved, plain_torch("last"))


def offloaded(plan: Plan) -> Plan:
    """As a plan for GPUs has it: on a CPU the planner refuses what changes nothing there."""
    config = replace(plan.config, parallel=replace(plan.config.parallel, zero_offload=True))
    documents = {"deepspeed.json": deepspeed_json(config, plan.num_parameters - plan.num_frozen_parameters)}
    return replace(plan, config=config, documents=documents)


def test_the_comparison_sees_weights_that_decay_though_no_gradient_reaches_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(user_model, "_freeze", lambda layers, number: None)
    with pytest.raises(AssertionError, match="Tensor-likes are not close") as caught:
        assert_equal(train(plan_of("no grad first", {})), plain_torch("no grad first"))
    assert not isinstance(caught.value, RankError), "it crashed, which is not what the comparison is for"


def test_parameter_servers_leave_them_alone(tmp_path: Path) -> None:
    plan = servers_job(options={"servers": 2}, **settings("first"))
    assert_equal(serve_and_train(plan, tmp_path).trained, plain_torch("first"))


def test_neighbours_that_average_leave_them_alone(tmp_path: Path) -> None:
    plan = plan_of("first", {"dp": 2, "pp": 2}, architecture={"name": "gossip"})
    assert run_ranks(4, averaging, plan, tmp_path) == [True] * 4


def averaging(rank: int, plan: Plan, folder: Path) -> bool:
    """Whether two steps and a checkpoint that is read back leave them as they are."""
    ctx = make_context(plan.rank(rank), CPU)
    trainer, steps = Trainer(ctx), Loader(ctx).steps(0)
    params = [
        p for module in trainer.part.modules.values() for p in module.parameters() if not p.requires_grad
    ]
    before = [param.clone() for param in params]
    for step in range(2):
        trainer.step(step, next(steps))
    save(trainer, folder, 2)
    double_what_is_not_trained(trainer)
    restore(ctx, trainer.update, folder)
    return all(map(torch.equal, params, before))


def test_a_model_with_nothing_to_train_is_refused() -> None:
    rule = r"model\.target=partly_trained:build: there is nothing to train: no parameter of its 4 layers gets"
    with pytest.raises(PlanError, match=rf"{rule} a gradient\. Let at least one have requires_grad"):
        plan_of("all", {})


def test_a_measured_shape_says_what_is_trained_and_what_its_backward_computes() -> None:
    table, body, head = VOCAB * WIDTH, WIDTH * WIDTH + WIDTH, WIDTH * VOCAB + VOCAB
    small, large = 2 * 8 * WIDTH * WIDTH, 2 * 8 * WIDTH * VOCAB
    first, middle, detached = (shape_of(kind) for kind in ("first", "middle", "detached"))
    assert [layer.num_frozen_parameters for layer in first.layers] == [table, body, 0, 0]
    assert [layer.has_backward for layer in first.layers] == [False, False, True, True]
    assert [layer.backward_flops for layer in first.layers] == [0, 0, small, 2 * large]
    assert [layer.kept_elements for layer in first.layers] == [0, 0, 2 * 8 * WIDTH, 0]
    assert [layer.num_frozen_parameters for layer in middle.layers] == [0, body, 0, 0]
    assert [layer.backward_flops for layer in middle.layers] == [0, small, 2 * small, 2 * large]
    assert [layer.kept_elements for layer in middle.layers] == [8, 8 * WIDTH, 8 * WIDTH, 0]
    assert [layer.num_trained_parameters for layer in detached.layers] == [0, 0, body, head]
    assert (first.cut_at, detached.cut_at, shape_of("no grad middle").cut_at) == (None, 2, 1)


def shape_of(kind: str) -> ModelShape:
    shape = settings(kind)["inputs"].shape
    assert shape is not None
    return shape


def test_no_gradient_is_sent_to_a_stage_that_none_reaches() -> None:
    plan = plan_of("no grad middle", {"pp": 4})
    assert [stage.num_frozen for stage in plan.stages] == [1, 1, 0, 0]
    assert [("SB" in actions, "RB" in actions) for actions in plan.schedule.actions] == [
        (False, False),
        (False, False),
        (False, True),
        (True, False),
    ]
    assert [row.pp_rank for row in plan.traffic if row.purpose == "activation gradients"] == [3]
    assert (
        "Layers 0 to 1 are not trained, though parameters there require a gradient: layer 1 passes none on "
        "(a forward under no_grad, or a detached input)."
    ) in plan.notes


SIZES = {
    "dp2": {"dp": 2},
    "pp2": {"pp": 2},
    "zero 1": {"dp": 2, "zero_stage": 1},
    "zero 3": {"dp": 2, "zero_stage": 3},
}


@pytest.mark.parametrize("layout", SIZES)
def test_what_is_held_and_saved_is_what_is_planned(layout: str) -> None:
    train = {"checkpoint_interval": 1, "num_steps": 3}
    plan = plan_of("first", SIZES[layout], width=128, train=train)
    found = run_ranks(2, bytes_of, plan)
    for planned in plan.memory:
        ranks = [
            each for rank, each in enumerate(found) if plan.rank(rank).stages[0].pp_rank == planned.pp_rank
        ]
        states, saved = sum(planned.update_bytes.values()), planned.other_bytes["checkpoint copy"]
        states += planned.other_bytes.get("receive buffers", 0)  # which a rank keeps from step to step
        assert [held for held, *_ in ranks] == pytest.approx([states] * len(ranks), rel=0.02)
        assert max(bytes_saved for _, bytes_saved, _ in ranks) == pytest.approx(saved, abs=64)


def test_a_stage_keeps_what_is_planned() -> None:
    """Of a frozen matrix not its input; of a stage that no gradient reaches, nothing."""
    report = {"claims": True, "warmup_steps": 2}
    for kind in ("first", "middle"):
        plan = plan_of(kind, {"pp": 2}, width=128, report=report, train={"num_steps": 3})
        (_, _, kept), _ = run_ranks(2, bytes_of, plan)
        assert kept == pytest.approx(plan.memory[0].activations_bytes, rel=0.02)
        assert (kept > 0) == (kind == "middle")


def bytes_of(rank: int, plan: Plan) -> tuple[int, int, int]:
    """Bytes of the states, of a checkpoint, and of what autograd holds at most."""
    before, ctx = live_bytes(CPU), make_context(plan.rank(rank), CPU)
    trainer, steps = Trainer(ctx), Loader(ctx).steps(0)
    for step in range(2):
        trainer.step(step, next(steps))
    found = trainer.memory.record(2)
    assert found is not None
    saved = sum(fragment.tensor.nbytes for fragment in trainer.update.state())
    return found.states_bytes - before, saved, found.held_peak_bytes or 0


def test_a_checkpoint_holds_them_for_every_layout(tmp_path: Path) -> None:
    """Each step under another layout; what is not trained begins with other values than the seed gives."""
    plans = [
        plan_of("first", {}),
        servers_job(**settings("first")),
        plan_of("first", {"dp": 2, "zero_stage": 3}),
        plan_of("first", {"dp": 2, "pp": 2, "zero_stage": 1}),
        plan_of("first", {"pp": 2}),
    ]
    losses = [
        next(loss for loss in reversed(run_ranks(plan.world_size, one_step, plan, tmp_path, step)) if loss)
        for step, plan in enumerate(plans)
    ]
    (whole,) = run_ranks(1, all_steps, plans[0], len(plans))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(whole), rtol=2e-5, atol=0)
    (index,) = (folder_of(tmp_path / "checkpoints", len(plans))).glob("shard-00000.json")
    names = {piece["name"] for piece in json.loads(index.read_text())["pieces"]}
    assert names == {
        "weight/layers.0.weight",
        "weight/layers.1.weight",
        "weight/layers.1.bias",
        "optimizer/step",
    }


OF_OLDER = {
    "pp 2": ("first", {"pp": 2}, {}),
    "ZeRO 3": ("first", {"dp": 2, "zero_stage": 3}, {}),
    "gossip": ("first", {"dp": 2}, {"architecture": {"name": "gossip"}}),
    "hierarchical": ("no grad first", {"dp": 4}, TWO_LEVELS),
}


@pytest.mark.parametrize("layout", OF_OLDER)
def test_a_checkpoint_of_a_version_that_did_not_save_them_is_resumed(
    layout: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kind, parallel, sections = OF_OLDER[layout]
    plan = plan_of(kind, parallel, **sections)
    expected = losses_of(run_ranks(plan.world_size, uninterrupted, plan))
    losses = losses_of(run_ranks(plan.world_size, first_half, plan, tmp_path))
    strip(tmp_path, lambda name: name in NOT_TRAINED[kind])
    losses += losses_of(run_ranks(plan.world_size, second_half, plan, tmp_path))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-6, atol=0)
    assert "an older checkpoint without" in capfd.readouterr().out


def test_servers_resume_a_checkpoint_of_such_a_version(tmp_path: Path) -> None:
    plan = servers_job(**settings("first"))
    whole = serve_and_train(plan, tmp_path / "whole", num_steps=2)
    serve_and_train(plan, tmp_path, num_steps=1)
    strip(tmp_path / "checkpoints", lambda name: name in NOT_TRAINED["first"])
    resumed = serve_and_train(plan, tmp_path, num_steps=2, resume=True).trained
    assert_equal(replace(resumed, losses=[], norms=[]), replace(whole.trained, losses=[], norms=[]))


def test_the_comparison_sees_weights_that_are_not_those_of_the_start(tmp_path: Path) -> None:
    plan = plan_of("first", {"pp": 2})
    expected = losses_of(run_ranks(2, uninterrupted, plan))[HALF:]
    run_ranks(2, first_half, plan, tmp_path)
    strip(tmp_path, lambda name: name in NOT_TRAINED["first"])
    losses = losses_of(run_ranks(2, second_half_of_others, plan, tmp_path))
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-6, atol=0)


def second_half_of_others(rank: int, plan: Plan, root: Path) -> list[float | None]:
    ctx = make_context(plan.rank(rank), CPU)
    trainer = Trainer(ctx)
    double_what_is_not_trained(trainer)
    steps = Loader(ctx).steps(restore(ctx, trainer.update, root))
    return [trainer.step(step, next(steps)).loss for step in range(HALF, STEPS)]


@pytest.mark.parametrize("lost", ["weight/layers.0.weight", "weight/layers.2.weight"])
def test_a_checkpoint_that_lacks_other_weights_is_refused(lost: str, tmp_path: Path) -> None:
    """One of those that are not trained, of a version that saved them; one that is trained."""
    plan = plan_of("first", {})
    run_ranks(1, first_half, plan, tmp_path)
    strip(tmp_path, lambda name: name == lost)
    message = (
        rf"does not hold all of {lost} at \(0, 0\) size \(\d+, 16\): it is of another model\. "
        r"Use the code and the settings of the run that wrote it\."
    )
    with pytest.raises(RankError, match=message):
        run_ranks(1, second_half, plan, tmp_path)


NOT_TRAINED = {
    "first": ("weight/layers.0.weight", "weight/layers.1.weight", "weight/layers.1.bias"),
    "no grad first": ("weight/layers.0.layer.weight",),
}


def strip(root: Path, is_lost: Callable[[str], bool]) -> None:
    """Takes tensors out of the newest checkpoint."""
    *_, folder = sorted(root.glob("step-*"))
    for path in folder.glob("shard-*.json"):
        index, shard = json.loads(path.read_text()), path.with_suffix(".safetensors")
        index["pieces"] = [piece for piece in index["pieces"] if not is_lost(piece["name"])]
        stored = load_file(shard)
        save_file({piece["key"]: stored[piece["key"]] for piece in index["pieces"]}, shard)
        path.write_text(json.dumps(index | {"sha256": sha256_of(shard)}))
    write_marker(folder, int(folder.name.removeprefix("step-")))


def one_step(rank: int, plan: Plan, folder: Path, step: int) -> float | None:
    make_folders(folder)
    if len(plan.roles) > 1:
        done = rank_of_servers(rank, plan, folder, None, step + 1, True)
        return done[0][0].loss if done else None
    ctx = make_context(plan.rank(rank), CPU)
    trainer, steps = Trainer(ctx), Loader(ctx).steps(step)
    if step:
        restore(ctx, trainer.update, folder / "checkpoints")
    else:
        double_what_is_not_trained(trainer)
    loss = trainer.step(step, next(steps)).loss
    save(trainer, folder / "checkpoints", step + 1)
    return loss


def all_steps(rank: int, plan: Plan, num_steps: int) -> list[float | None]:
    ctx = make_context(plan.rank(rank), CPU)
    trainer, steps = Trainer(ctx), Loader(ctx).steps(0)
    double_what_is_not_trained(trainer)
    return [trainer.step(step, next(steps)).loss for step in range(num_steps)]


def double_what_is_not_trained(trainer: Trainer) -> None:
    for module in trainer.part.modules.values():
        for param in module.parameters():
            if not param.requires_grad:
                param.mul_(2)


BY_NAME = {
    "first": ("layers.0.*", "layers.1.*"),
    "middle": ("layers.1.*",),
    "biases": ("layers.[03].*", "layers.[12].weight"),
}
"""Groups that freeze what a model of the kind freezes itself."""


@pytest.mark.parametrize("parallel", [{"dp": 2}, {"pp": 2}, {"dp": 2, "zero_stage": 3}], ids=str)
def test_layers_that_are_frozen_by_name_are_as_if_they_were_built_so(parallel: dict[str, Any]) -> None:
    plans = {}
    for kind, names in BY_NAME.items():
        groups = {"still": GroupConfig(names=names, frozen=True)}
        plans[kind] = plan_of("none", parallel, optim={"groups": groups})
        built = plan_of(kind, parallel)
        for name in ("num_frozen_parameters", "num_state_elements"):
            assert getattr(plans[kind], name) == getattr(built, name)
        assert [each.num_frozen for each in plans[kind].stages] == [each.num_frozen for each in built.stages]
    for kind, found in zip(plans, train_each([*plans.values()]), strict=True):
        assert_equal(found, plain_torch(kind))
