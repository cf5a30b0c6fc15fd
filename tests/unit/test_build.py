"""The plan as a whole: complete, stable, and no larger for a larger world."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from launcher.base import registry
from launcher.base.errors import LauncherError, PluginError
from launcher.base.registry import PluginRecord
from launcher.contract.model.shape import LayerShape, ModelShape
from launcher.contract.plan import Plan
from launcher.contract.strategy import Schedule
from launcher.plan.build import build
from launcher.plan.checked_job import PlanInputs, needs_measuring
from launcher.plan.plugins import plugin_errors
from launcher.plan.text import plan_text
from launcher_plugins.executors.torchrun import Torchrun
from launcher_plugins.parallel.tensor.plan import TensorParallel
from launcher_plugins.schedules.gpipe import GPipe
from tests.helpers.configs import MIXED, launch_config

LAYOUTS = [
    (dp, tp, pp) for dp, tp, pp in product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4)) if dp * tp * pp in (1, 2, 4, 8)
]


@pytest.mark.parametrize(("dp", "tp", "pp"), LAYOUTS)
def test_every_layout_of_up_to_eight_ranks_is_planned(dp, tp, pp):
    plan = build(launch_config(parallel={"dp": dp, "tp": tp, "pp": pp}))
    assert plan.world_size == dp * tp * pp
    assert plan.batch.micro_size * plan.batch.num_microbatches * dp == plan.batch.global_size
    layers = [layer for stage in plan.stages for layer in stage.layers]
    assert layers == list(range(4))
    axes = {"tp": tp, "pp": pp, "dp": dp}
    modules = {"tp": "tensor.runtime.layers", "pp": "pipeline.runtime", "dp": "data.runtime"}
    used = [f"launcher_plugins.parallel.{modules[axis]}:apply" for axis, size in axes.items() if size > 1]
    assert list(plan.parallels) == used


def test_an_error_inside_a_plugin_names_the_plugin_and_its_line(monkeypatch):
    monkeypatch.setattr("launcher_plugins.schedules.gpipe.Action", None)
    message = (
        r"the schedule 'gpipe' of trireme-launcher \S+ failed in actions: AttributeError: 'NoneType' object "
        r"has no attribute 'each' \(\S+/gpipe\.py:\d+\)"
    )
    with pytest.raises(PluginError, match=message):
        build(launch_config(parallel={"pp": 2, "schedule": "gpipe"}))


class First:
    def actions(self):
        return 1 // 0


class Second(First):
    pass


def test_of_two_plugins_in_one_module_the_one_that_failed_is_named(monkeypatch):
    records = {
        name: PluginRecord(
            group="launcher.schedules", name=name, distribution="d", version="1", target=f"{__name__}:{name}"
        )
        for name in ("First", "Second")
    }
    monkeypatch.setattr(
        "launcher.base.registry.plugins", lambda group: records if group == "launcher.schedules" else {}
    )
    expected = "the schedule 'Second' of d 1 failed in actions: ZeroDivisionError"
    with pytest.raises(PluginError, match=expected), plugin_errors():
        Second().actions()


@pytest.mark.parametrize(
    ("plugin", "method", "message"),
    [
        (GPipe, "actions", "schedule 'gpipe' .* no actions; see launcher.contract.strategy.Schedule"),
        (Torchrun, "cancel", "executor 'torchrun' .* no cancel; see launcher.contract.executor.Executor"),
    ],
)
def test_a_plugin_without_a_method_of_its_kind_is_named_with_it(monkeypatch, plugin, method, message):
    monkeypatch.delattr(plugin, method)
    with pytest.raises(PluginError, match=message):
        build(launch_config(parallel={"pp": 2, "schedule": "gpipe"}))


def test_a_schedule_that_is_no_subclass_has_the_defaults_of_one(monkeypatch, tmp_path):
    code = """
from launcher.contract.actions import B, F, Action

class Short:
    def actions(self, shape, pp_rank):
        for index in range(shape.num_microbatches):
            yield Action(pp_rank, F, index)
            yield Action(pp_rank, B, index)
"""
    (tmp_path / "short_schedule.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    found = {
        "short": registry.PluginRecord(
            group="launcher.schedules",
            name="short",
            distribution="d",
            version="1",
            target="short_schedule:Short",
        )
    }
    installed = registry.plugins
    monkeypatch.setattr(
        registry, "plugins", lambda group: {**installed(group), **(found if "sched" in group else {})}
    )
    plan = build(launch_config(parallel={"pp": 2, "schedule": "short"}))
    assert plan.schedule.bubble_formula is None
    assert not plan.schedule.splits_backward
    assert isinstance(registry.load(Schedule, "short"), Schedule)


def test_a_parallel_plugin_of_no_axis_is_named(monkeypatch):
    monkeypatch.setattr(TensorParallel, "axis", "sp")
    with pytest.raises(PluginError, match="the parallel 'tensor' has axis 'sp', none of tp, pp, dp"):
        build(launch_config())


def test_an_error_of_our_own_is_no_plugins(monkeypatch):
    monkeypatch.setattr("launcher.plan.build.plan_notes", None)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        build(launch_config())


def test_a_plan_survives_its_json():
    plan = build(launch_config(parallel={"dp": 2, "tp": 2, "pp": 2}, precision=MIXED))
    assert Plan.from_json(plan.to_json()) == plan


def test_the_same_configuration_gives_the_same_bytes():
    config = launch_config(parallel={"pp": 2})
    assert build(config).to_json() == build(config).to_json()


def test_a_plan_of_another_version_is_refused():
    text = build(launch_config()).to_json().replace('"version": 1', '"version": 99', 1)
    with pytest.raises(LauncherError, match="version 99, this launcher reads 1"):
        Plan.from_json(text)


def test_dp_auto_is_what_the_devices_leave():
    plan = build(launch_config(parallel={"dp": "auto", "tp": 4}))
    assert plan.config.parallel.dp == plan.mesh.dp == 2


def test_no_size_is_left_open():
    plan = build(launch_config(batch={"global_size": None, "num_microbatches": 3}))
    batch, model = plan.config.batch, plan.config.model
    assert (batch.global_size, batch.micro_size, batch.num_microbatches) == (3, 1, 3)
    assert (model.num_kv_heads, model.ffn_size) == (4, 256)


def test_the_rank_order_places_the_ranks():
    plan = build(launch_config(parallel={"dp": 2, "tp": 2, "rank_order": "tp-pp-dp"}))
    assert plan.mesh.order == ("tp", "pp", "dp")
    assert [tuple(plan.mesh.coordinates(rank)) for rank in (0, 1, 2)] == [(0, 0, 0), (0, 1, 0), (0, 0, 1)]


def test_a_rank_gets_its_stages_and_its_actions():
    plan = build(launch_config(parallel={"pp": 2, "num_chunks": 2, "schedule": "interleaved_1f1b"}))
    rank = plan.rank(1)
    assert [stage.stage for stage in rank.stages] == [1, 3]
    assert rank.actions == plan.schedule.actions[1]


def test_every_plugin_in_use_is_recorded_and_no_other():
    plan = build(launch_config(parallel={"pp": 2}))
    assert [(record.group, record.name) for record in plan.plugins] == [
        ("launcher.schedules", "1f1b"),
        ("launcher.architectures", "decentralized"),
        ("launcher.optimizers", "adamw"),
        ("launcher.executors", "torchrun"),
        ("launcher.parallels", "pipeline"),
    ]


def test_what_the_executor_cannot_start_is_planned_and_noted():
    plan = build(launch_config(parallel={"dp": 16}, cluster={"nodes": 2}))
    (note,) = [
        note for note in plan.notes if note.startswith("Planned, but it cannot be started like this: ")
    ]
    assert note.endswith(
        "executor.name=torchrun: starts ranks on this machine only, and cluster.nodes=2. "
        "Choose an executor that reserves machines: slurm."
    )


def big(dp):
    return launch_config(
        model={"hidden_size": 1024, "num_layers": 32, "num_heads": 8},
        batch={"global_size": 128 * dp},
        parallel={"dp": dp, "tp": 8, "pp": 16},
        cluster={"nodes": 16 * dp},
    )


def test_a_plan_does_not_grow_with_the_world():
    small, large = (build(big(dp)) for dp in (2, 128))
    assert large.world_size == 16_384
    texts = [plan.to_json() for plan in (small, large)]
    assert len(texts[1]) < 5_000_000
    assert len(texts[1]) == pytest.approx(len(texts[0]), rel=0.01)


def test_a_custom_model_is_planned_from_its_measured_shape():
    shape = ModelShape(family="custom", layers=LAYERS, prologue=None, epilogue=None, num_tied_parameters=0)
    config = custom({"pp": 3, "dp": 2})
    assert needs_measuring(config, {})
    plan = build(config, inputs=PlanInputs(shape=shape), source_roots=("/models",))
    assert plan.num_parameters == 60
    assert plan.step_flops == 3 * 600 * 16
    assert [stage.input_shape for stage in plan.stages] == [(), (7,), (7,)]
    assert plan.source_roots == ("/models",)


def test_layers_without_operations_or_parameters_are_planned():
    idle = replace(LAYERS[0], forward_flops=0.0, num_parameters=0, num_replicated_parameters=0)
    plan = build(custom({"pp": 3, "dp": 2}), inputs=shaped(idle, idle, LAYERS[2]))
    assert plan.schedule.step_s > 0
    assert [row.pp_rank for row in plan.traffic if row.purpose == "gradients"] == [2]


def test_what_is_not_trained_has_neither_states_nor_messages_nor_operations_of_its_own():
    frozen = replace(
        LAYERS[0], num_frozen_parameters=20, has_backward=False, backward_flops=0.0, kept_elements=0
    )
    passing = replace(LAYERS[1], num_frozen_parameters=20, backward_flops=200.0)
    plan = build(custom({"pp": 3, "dp": 2}), inputs=shaped(frozen, passing, LAYERS[2]))
    whole = build(custom({"pp": 3, "dp": 2}), inputs=shaped(*LAYERS))
    assert (plan.num_parameters, plan.num_frozen_parameters) == (60, 40)
    assert [(part.weights_bytes, part.gradients_bytes, part.optimizer_bytes) for part in plan.memory] == [
        (80, 0, 0),
        (80, 0, 0),
        (80, 80, 160),
    ]
    assert [row.pp_rank for row in plan.traffic if row.purpose == "gradients"] == [2]
    assert [stage.is_frozen for stage in plan.stages] == [True, False, False]
    assert whole.step_flops - plan.step_flops == (400 + 200) * 16
    first, second, third = plan.schedule.backward_s
    assert first < second < third == whole.schedule.backward_s[2]
    assert "60 parameters (40 not trained)" in plan_text(plan)


def test_a_model_with_nothing_to_train_is_refused():
    idle = replace(LAYERS[0], num_parameters=0)
    with pytest.raises(
        LauncherError,
        match=r"model\.target=mine:build: there is nothing to train: no parameter of its 1 layer gets a "
        r"gradient\. Let at least one have requires_grad, behind every layer whose forward is under "
        r"no_grad\.",
    ):
        build(custom({}), inputs=shaped(idle))


def test_a_plan_says_which_layers_run_a_split_backward_whole():
    layers = (*LAYERS[:2], replace(LAYERS[2], weight_flops=100.0))
    shape = ModelShape(family="custom", layers=layers, prologue=None, epilogue=None, num_tied_parameters=0)
    plan = build(custom({"pp": 3, "schedule": "zb_h1"}), inputs=PlanInputs(shape=shape))
    assert plan.schedule.weight_s[:2] == (0.0, 0.0) != plan.schedule.weight_s[2:]
    assert (
        "zb_h1 splits the backward, which 2 of 3 layers cannot: their B computes the weight gradients, too, "
        "and their W nothing."
    ) in plan.notes
    whole = build(custom({"pp": 3}), inputs=PlanInputs(shape=shape))
    assert not any("splits the backward" in note for note in whole.notes)


def test_the_shape_of_a_model_is_needed_only_where_nothing_is_wrong_before_it_is_measured():
    assert not needs_measuring(launch_config(), {})
    assert not needs_measuring(custom({"rank_order": "pp-pp"}), {})
    assert not needs_measuring(custom({"schedule": "nonesuch"}), {})


def test_what_is_wrong_before_a_model_is_measured_has_its_way_out():
    message = (
        r"parallel\.rank_order=pp-pp: must name each of pp, dp, tp once.* Set parallel\.rank_order=pp-dp-tp"
    )
    with pytest.raises(LauncherError, match=message):
        build(custom({"rank_order": "pp-pp"}))


def test_a_custom_model_cannot_be_split():
    shape = ModelShape(family="custom", layers=LAYERS, prologue=None, epilogue=None, num_tied_parameters=0)
    with pytest.raises(
        LauncherError,
        match=r"parallel\.tp=2: the layers that model\.target builds are whole: they spread along "
        r"dp and pp alone\. Set parallel\.tp=1\.",
    ):
        build(custom({"tp": 2}), inputs=PlanInputs(shape=shape))


def test_layers_of_a_users_own_are_recomputed_whole_or_not_at_all():
    shape = ModelShape(family="custom", layers=LAYERS, prologue=None, epilogue=None, num_tied_parameters=0)
    message = r"a user's own can be recomputed whole\. Set parallel\.recompute=full or none\."
    with pytest.raises(LauncherError, match=message):
        build(custom({"recompute": "selective"}), inputs=PlanInputs(shape=shape))


LAYERS = tuple(
    LayerShape(
        name=f"layers.{place}",
        num_parameters=20,
        num_replicated_parameters=20,
        forward_flops=200.0,
        kept_elements=5,
        kept_replicated_elements=0,
        output_elements=7,
        output_shape=(7,),
    )
    for place in range(3)
)


def shaped(*layers):
    shape = ModelShape(family="custom", layers=layers, prologue=None, epilogue=None, num_tied_parameters=0)
    return PlanInputs(shape=shape)


def custom(parallel):
    sizes = dict.fromkeys(("num_layers", "hidden_size", "num_heads", "vocab_size"))
    return launch_config(model={**sizes, "family": "custom", "target": "mine:build"}, parallel=parallel)
