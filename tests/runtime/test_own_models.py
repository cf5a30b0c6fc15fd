"""Layers of a user's own: what does no harm gives under every layout what one device gives, the rest is
refused before it trains."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from launcher.base.errors import ConfigError, JobError, PlanError
from launcher.contract.data.config import DataConfig
from launcher.contract.model.shape import ModelShape, TensorShape
from launcher.contract.plan import Plan
from launcher.plan.checked_job import PlanInputs
from launcher.runtime.api import DTYPES
from launcher.runtime.model.measure_shape import describe
from launcher.runtime.model.stage import Pack
from launcher.runtime.process.measure import first_inputs
from tests.helpers.contexts import make_config
from tests.helpers.equality import Trained, assert_equal, job, train
from tests.helpers.halves import first_half, losses_of, second_half, started, uninterrupted
from tests.helpers.objects import inside
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.servers import serve_and_train
from tests.helpers.two_levels import TWO_LEVELS, skip_a_level

pytestmark = pytest.mark.usefixtures("user_models")

SIZES = dict.fromkeys(("num_layers", "hidden_size", "num_heads", "vocab_size", "tied_embeddings"))
DATA = {"source": None, "target": "own_layers:Copy"}
PRECISION = {"compute": "bf16", "master_weights": True}
MIXED = {"peak_flops": {"fp32": 1e9, "bf16": 1e9, "fp16": 1e9}}


@cache
def shape_of(kind: str, compute: str = "fp32") -> ModelShape:
    model = make_config(model=custom(kind)).model
    data = DataConfig(**{**vars(make_config().data), **DATA})
    return describe(model, first_inputs(data, make_config().batch.seq_length)[0], DTYPES[compute])


def custom(kind: str) -> dict[str, Any]:
    sizes = SIZES | {"tied_embeddings": False}
    return sizes | {"family": "custom", "target": "own_layers:Made", "options": {"kind": kind}}


def plan_of(kind: str, shape: ModelShape | None = None, **sections: Any) -> Plan:
    compute = sections.get("precision", {}).get("compute", "fp32")
    inputs = PlanInputs(shape=shape or shape_of(kind, compute))
    return job(inputs, model=custom(kind), **{"data": DATA, **sections})


@cache
def reference() -> Trained:
    return train(plan_of("harmless"))


LAYOUTS: dict[str, dict[str, Any]] = {
    "dp 2": {"dp": 2},
    "pp 4, recomputed": {"pp": 4, "recompute": "full"},
    "interleaved": {"pp": 2, "num_chunks": 2, "schedule": "interleaved_1f1b"},
    "pp 2, ZeRO 1": {"dp": 2, "pp": 2, "zero_stage": 1},
    "ZeRO 2": {"dp": 2, "zero_stage": 2},
    "ZeRO 3, recomputed": {"dp": 2, "zero_stage": 3, "recompute": "full"},
}


@pytest.mark.usefixtures("deepspeed_in_parent")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_layers_keep_and_pass_on_is_the_same_with(layout: str) -> None:
    assert_equal(train(plan_of("harmless", parallel=LAYOUTS[layout])), reference())


def test_what_layers_keep_and_pass_on_is_the_same_with_servers(tmp_path: Path) -> None:
    servers = {"name": "parameter_server", "options": {}}
    train = {"checkpoint_interval": 1000}
    plan = plan_of("harmless", architecture=servers, parallel={"dp": 2}, train=train)
    assert_equal(serve_and_train(plan, tmp_path).trained, reference())


def test_what_layers_keep_and_pass_on_is_the_same_with_sums_of_two_levels() -> None:
    plan = plan_of("harmless", parallel={"dp": 4}, **TWO_LEVELS)
    assert_equal(train(plan), reference())
    with pytest.raises(AssertionError, match="not close"):
        assert_equal(train(plan, skip_a_level("sum_across")), reference())


COMPILED: dict[str, Any] = {"fusion": {"compile": "block"}, "report": {"warmup_steps": 1}}


@pytest.mark.usefixtures("compiler")
def test_what_layers_keep_and_pass_on_is_the_same_compiled() -> None:
    """A buffer that is made in the first forward, several tensors between two layers, a frozen table."""
    plan = plan_of("short", parallel={"pp": 2}, **COMPILED)
    assert_equal(train(plan, timeout_s=120), train(plan_of("short")))


def test_the_comparison_sees_a_compiled_layer_that_computes_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compiled(layer: nn.Module, **_: Any) -> Any:
        return lambda given: tree_map(lambda t: t * 1.001 if t.is_floating_point() else t, layer(given))

    monkeypatch.setattr(torch, "compile", compiled)
    with pytest.raises(AssertionError, match="not close"):
        assert_equal(train(plan_of("short", **COMPILED)), train(plan_of("short")))


def test_what_layers_keep_is_made_again_on_a_resume_under_another_layout(tmp_path: Path) -> None:
    expected = losses_of(run_ranks(1, uninterrupted, plan_of("harmless")))
    before, after = plan_of("harmless", parallel={"pp": 2}), plan_of("harmless", parallel={"dp": 2})
    losses = losses_of(run_ranks(2, first_half, before, tmp_path))
    losses += losses_of(run_ranks(2, second_half, after, tmp_path))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=2e-5, atol=0)


def test_several_tensors_pass_between_stages_in_bf16() -> None:
    one, split = (train(precise("harmless", "bf16", pp=pp)) for pp in (1, 2))
    assert_equal(split, one)


def test_what_is_not_as_planned_is_not_sent() -> None:
    pack = Pack((TensorShape(shape=(8,), dtype="int64"),), torch.float32)
    message = (
        r"a layer gives \(2, 8\) torch\.int32 to the next stage, planned is \(8,\) torch\.int64 for a sample"
    )
    with pytest.raises(JobError, match=message):
        pack(torch.zeros(2, 8, dtype=torch.int32))


def test_a_layer_that_counts_would_be_told_apart() -> None:
    """The sabotage: a plan made as if it were harmless."""
    whole, recomputed = (
        train(plan_of("counting", shape_of("positions"), parallel={"recompute": mode}))
        for mode in ("none", "full")
    )
    with pytest.raises(AssertionError):
        assert_equal(recomputed, whole)


STATE = r"whenever it runs: the result would depend on .* no checkpoint holds it\. Take dropout, counters and"
DRAWS = r"other ones on every rank and when it is recomputed\. Take dropout, counters and running statistics"
OTHER = r"gives a sample another result beside other ones, and the layout decides .*the first dim \(batch"
AGAIN = r"gives another result when it runs again on the same input, as for recomputation\. Take dropout,"
REFUSED = {
    "counting": rf"\(Counting\) changes its attribute num_seen {STATE}",
    "counting buffer": rf"\(Counting\) changes its buffer steps {STATE}",
    "expert bias": rf"\(ExpertBias\) changes its buffer bias {STATE}",
    "alternating": rf"\(Alternating\) {AGAIN}",
    "attention dropout": rf"\(TransformerEncoderLayer\) draws random numbers from torch, {DRAWS}",
    "python": rf"\(Drop\) draws random numbers from Python's random, {DRAWS}",
    "numpy": rf"\(Drop\) draws random numbers from NumPy, {DRAWS}",
    "torch generator": rf"\(Drop\) changes its attribute own {STATE}",
    "numpy generator": rf"\(Drop\) changes its attribute numbers {STATE}",
    "python generator": rf"\(Drop\) changes its attribute shared {STATE}",
    "sequence first": rf"\(TransformerEncoderLayer\) {OTHER}",
    "centred": rf"\(Centred\) {OTHER}",
    "summed": rf"\(Summed\) {OTHER}",
    "recurrent": r"\(LSTM\) fails on a sample: TypeError: a layer returns a tensor .* not Tensor, tuple\.",
}


def test_a_layer_that_mixes_formats_is_refused_where_there_are_two() -> None:
    assert shape_of("uncast").layers
    rule = r"layer 3 \(Uncast\) mixes formats where parameters are in bfloat16: .*x \+ self\.table\.to"
    with pytest.raises(ConfigError, match=rf"^model\.target=own_layers:Made: {rule}"):
        shape_of("uncast", "bf16")


@pytest.mark.parametrize("kind", REFUSED)
def test_a_layer_that_is_not_a_function_of_its_input_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.target=own_layers:Made: layer 3 {REFUSED[kind]}"):
        shape_of(kind)


def test_a_layer_that_takes_one_sample_at_a_time_is_refused_with_larger_microbatches() -> None:
    rule = (
        r"batch\.micro_size=2: of the model own_layers:Made layer 3 \(OneByOne\) fails on two samples at "
        r"once: ValueError: too many values to unpack \(expected 1.*\)\. Set batch\.micro_size=1\."
    )
    with pytest.raises(PlanError, match=rf"^{rule}$"):
        plan_of("one by one", parallel={"dp": 2})
    with pytest.raises(PlanError, match=r" or batch\.micro_size=1 batch\.num_microbatches=8, or"):
        plan_of("one by one", batch={"micro_size": None, "num_microbatches": 4}, parallel={"dp": 2})
    single = {"micro_size": 1}
    assert_equal(
        train(plan_of("one by one", batch=single, parallel={"pp": 2})),
        train(plan_of("one by one", batch=single)),
    )


def formats(rank: int, plan: Plan) -> dict[str, Any]:
    """After a step: the format of all that the layer of positions holds, its last position, and a weight that
    no half format can tell from 1."""
    trainer, steps = started(rank, plan)
    trainer.step(0, next(steps))
    (stage,) = trainer.part.modules.values()
    layer: Any = inside(getattr(stage, "module", stage)).blocks[3]
    tensors = dict(layer.named_parameters()) | dict(layer.named_buffers())
    found = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    return found | {"last": float(layer.positions[-1]), "is_one": bool((layer.scale.weight == 1).all())}


def precise(kind: str, compute: str, **parallel: Any) -> Plan:
    precision = PRECISION | {"compute": compute}
    return plan_of(kind, precision=precision, device=MIXED, parallel=parallel)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_parameters_are_cast_but_not_buffers_nor_what_is_to_stay_in_fp32(compute: str) -> None:
    for found in run_ranks(2, formats, precise("positions", compute, dp=2)):
        half = DTYPES[compute]
        assert found == {
            "positions": "float32",
            "linear.weight": str(half).removeprefix("torch."),
            "linear.bias": str(half).removeprefix("torch."),
            "scale.weight": "float32",
            "last": 511.0,
            "is_one": False,
        }


@pytest.mark.usefixtures("deepspeed_in_parent")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_leaves_buffers_as_they_are(stage: int) -> None:
    for found in run_ranks(2, formats, precise("buffer of positions", "bf16", dp=2, zero_stage=stage)):
        assert (found["positions"], found["last"]) == ("float32", 511.0)
        assert found["linear.weight"] == "bfloat16"


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"parallel": {"dp": 2, "zero_stage": 1}}, r"parallel\.zero_stage=1: DeepSpeed holds"),
        ({"architecture": {"name": "parameter_server"}}, r"precision\.compute=bf16: servers send"),
    ],
)
def test_parameters_in_fp32_are_refused_where_all_weights_have_one_format(
    layout: dict[str, Any], message: str
) -> None:
    settings: dict[str, Any] = {"precision": PRECISION, "device": MIXED, "parallel": {"dp": 2}} | layout
    rule = r"all weights in one format, the model keeps 16 in fp32 .*\. Set .*precision\.compute=fp32"
    with pytest.raises(PlanError, match=f"{message} {rule}"):
        plan_of("positions", **settings)
    plan_of("buffer of positions", **settings)


def first_step(rank: int, plan: Plan) -> None:
    trainer, steps = started(rank, plan)
    trainer.step(0, next(steps))


BUILT_IN = {"vocab_size": 20, "num_layers": 2}


def beyond(**options: Any) -> dict[str, Any]:
    return {"source": None, "target": "own_layers:Beyond", "options": options, "eval_fraction": 0.0}


@pytest.mark.parametrize(
    ("where", "token", "layout"),
    [
        ("inputs", 20, {}),
        ("inputs", 21, {"tp": 2}),
        ("inputs", -1, {"tp": 2}),
        ("targets", 20, {"pp": 2}),
        ("targets", 300, {"tp": 2}),
        ("targets", -1, {"dp": 2}),
    ],
)
def test_an_id_outside_of_the_vocabulary_is_refused(where: str, token: int, layout: dict[str, int]) -> None:
    plan = job(model=BUILT_IN, data=beyond(wrong=7, where=where, token=token), parallel=layout)
    place = f"item 7 of the data has the {where[:-1]} {token} at position 3, and ids are 0 to 19"
    fix = r"Set a larger model\.vocab_size, or correct the data"
    with pytest.raises(RankError, match=rf"model\.vocab_size=20: {place}\. {fix}"):
        run_ranks(plan.world_size, first_step, plan)


def test_targets_that_are_left_out_are_no_ids() -> None:
    run_ranks(1, first_step, job(model=BUILT_IN, data=beyond(where="targets", token=-100)))


def test_an_id_that_a_users_own_table_has_no_row_for_is_refused() -> None:
    plan = plan_of("harmless", data=beyond(wrong=9, token=16), parallel={"dp": 2})
    place = "item 9 of the data has the input 16 at position 3, and ids are 0 to 15"
    with pytest.raises(
        RankError, match=rf"model\.target=own_layers:Made: {place}\. Give the model's table more"
    ):
        run_ranks(2, first_step, plan)
