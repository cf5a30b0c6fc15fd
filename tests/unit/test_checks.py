"""Strategies that are refused before anything starts: each with its value, its rule and its fix."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from launcher.base.errors import PlanError, PluginError
from launcher.contract.config import PluginChoice, PrecisionConfig
from launcher.plan import plugins
from launcher.plan.build import build
from launcher.typed.read import Source
from launcher_plugins.schedules.interleaved_1f1b import InterleavedConfig
from launcher_plugins.schedules.one_f_one_b import OneFOneB
from tests.helpers.configs import LLAMA3_8B, MIXED, launch_config

NO_IDLE = {"allow_idle_devices": False}


def refusal(config, sources=None):
    with pytest.raises(PlanError) as caught:
        build(config, sources or {})
    return [str(fault) for fault in caught.value.faults]


# The world


def test_a_world_larger_than_the_devices_is_refused_with_the_formula():
    assert refusal(launch_config(parallel={"dp": 8, "tp": 2}, cluster=NO_IDLE)) == [
        "parallel.dp=8: world = dp * tp * pp = 8 * 2 * 1 = 16 ranks, the cluster has "
        "nodes * devices_per_node = 1 * 8 = 8 devices: which is too few; "
        "dp counts whole replicas, each of tp * pp ranks. "
        "Set parallel.dp=4, or parallel.tp=1, or cluster.nodes=2."
    ]


def test_idle_devices_are_refused_unless_allowed():
    parallel = {"dp": 2, "tp": 2}
    assert refusal(launch_config(parallel=parallel, cluster=NO_IDLE)) == [
        "parallel.dp=2: world = dp * tp * pp = 2 * 2 * 1 = 4 ranks, the cluster has nodes * devices_per_node "
        "= 1 * 8 = 8 devices: 4 would stay idle. "
        "Set parallel.dp=4, or parallel.pp=2, or parallel.tp=4, or cluster.allow_idle_devices=true."
    ]
    plan = build(launch_config(parallel=parallel))
    assert "4 of 8 devices stay idle; figures per device divide by all 8." in plan.notes


def test_a_world_says_where_each_factor_was_set():
    sources = {
        "parallel.dp": Source(where="override parallel.dp=2"),
        "parallel.tp": Source(where="conf.yaml:3"),
    }
    (fault,) = refusal(launch_config(parallel={"dp": 2, "tp": 2}, cluster=NO_IDLE), sources)
    assert "= 4 ranks (dp from override parallel.dp=2, tp from conf.yaml:3)" in fault
    assert fault.endswith("[override parallel.dp=2]")


def test_a_replica_that_the_devices_cannot_hold_offers_a_smaller_split():
    (fault,) = refusal(launch_config(model={"num_layers": 12}, parallel={"tp": 4, "pp": 3}, cluster=NO_IDLE))
    assert "1 * 4 * 3 = 12 ranks" in fault
    assert "Set parallel.pp=2, or " in fault


def test_dp_auto_that_is_not_whole_is_refused():
    config = launch_config(model={"num_layers": 3}, parallel={"dp": "auto", "pp": 3}, cluster=NO_IDLE)
    assert refusal(config) == [
        "parallel.dp=auto: dp = devices / (tp * pp) = 8 / (1 * 3) is not whole: "
        "tp * pp = 3 must divide 8 (1, 2, 4, 8). Set parallel.pp=1, or cluster.nodes=3, or "
        "cluster.allow_idle_devices=true."
    ]


def test_dp_auto_below_one_is_refused():
    config = launch_config(parallel={"dp": "auto", "tp": 4, "pp": 4}, cluster=NO_IDLE)
    assert refusal(config) == [
        "parallel.dp=auto: dp = devices / (tp * pp) = 8 / (4 * 4) is below 1. "
        "Set parallel.pp=2 or 1, or parallel.tp=2, or cluster.nodes=2."
    ]


def test_one_rank_is_not_told_in_the_plural():
    (fault,) = refusal(launch_config(parallel={"dp": 1}, cluster=NO_IDLE))
    assert "= 1 * 1 * 1 = 1 rank, the cluster has" in fault


def test_a_device_that_its_cluster_is_not_built_of_is_noted():
    plan = build(launch_config(cluster={"device_name": "H100 SXM"}))
    assert plan.notes[0] == (
        "The cluster lab is built of H100 SXM devices, and the device is box: figures are those of box on "
        "the links of lab. Choose device and cluster that go together, or set cluster.device_name=null."
    )
    for name in (None, "box"):
        assert not [
            note for note in build(launch_config(cluster={"device_name": name})).notes if "built of" in note
        ]


def test_a_rank_order_names_every_axis_once():
    assert refusal(launch_config(parallel={"rank_order": "pp-dp"})) == [
        "parallel.rank_order=pp-dp: must name each of pp, dp, tp once, the outermost first. "
        "Set parallel.rank_order=pp-dp-tp."
    ]


# The model


def test_heads_must_divide_the_hidden_size():
    assert refusal(launch_config(model={"num_heads": 5})) == [
        "model.num_heads=5: must divide hidden_size = 64; 64/5 is not whole. Set model.num_heads=4 or 8."
    ]


def test_heads_of_a_width_of_their_own_need_not_divide_the_hidden_size():
    assert build(launch_config(model={"num_heads": 5, "head_dim": 4})).num_parameters > 0


def test_a_window_that_leaves_no_token_out_is_refused():
    model = {"family": "llama", "sliding_window": 32}
    given = Source(where="override model.sliding_window=32", is_given=True, layer=1)
    config = launch_config(model=model, batch={"seq_length": 32})
    (fault,) = refusal(config, {"model.sliding_window": given})
    assert "model.sliding_window=32: has no effect here: it is read where batch.seq_length is above" in fault


def test_key_heads_must_divide_the_heads():
    assert refusal(launch_config(model={"hidden_size": 256, "num_heads": 32, "num_kv_heads": 5})) == [
        "model.num_kv_heads=5: must divide num_heads = 32 (1, 2, 4, 8, 16, 32). "
        "Set model.num_kv_heads=4 or 8."
    ]


def test_rotary_heads_must_have_an_even_width():
    config = launch_config(model={"family": "llama", "hidden_size": 12, "num_heads": 4, "vocab_size": 256})
    assert refusal(config) == [
        "model.num_heads=4: hidden_size / num_heads = 3 must be even for rotary positions. "
        "Set model.num_heads=3 or 6."
    ]


def test_a_transformer_needs_its_sizes():
    assert refusal(launch_config(model={"num_layers": None, "vocab_size": None})) == [
        "model.num_layers=null: family gpt needs it. Give model.num_layers, or model.path.",
        "model.vocab_size=null: family gpt needs it. Give model.vocab_size, or model.path.",
    ]


def test_a_vocabulary_smaller_than_the_bytes_is_refused():
    assert refusal(launch_config(model={"vocab_size": 100})) == [
        "model.vocab_size=100: the bytes tokenizer gives 256 different tokens, and each needs its row. "
        "Set model.vocab_size=256."
    ]


def test_a_target_beside_a_built_in_family_is_refused():
    assert refusal(launch_config(model={"target": "mine:build"})) == [
        "model.target=mine:build: has no effect on family gpt. Set model.target=null."
    ]


NO_SIZES = dict.fromkeys(("num_layers", "hidden_size", "num_heads", "vocab_size"))


def test_a_custom_family_needs_a_target():
    assert refusal(launch_config(model={**NO_SIZES, "family": "custom"})) == [
        "model.target=null: family custom is built by a function of yours. "
        "Give model.target, as package.module:function."
    ]


def test_a_size_of_a_custom_family_has_no_effect_and_is_refused():
    custom = {**NO_SIZES, "family": "custom", "target": "mine:build", "num_heads": 4}
    assert refusal(launch_config(model=custom)) == [
        "model.num_heads=4: has no effect on a model of family custom, whose layers come from model.target. "
        "Set model.num_heads=null, or pass it as model.options.num_heads."
    ]


@pytest.mark.parametrize(("source", "target"), [(None, None), ("text.txt", "mine:data")])
def test_data_has_exactly_one_origin(source, target):
    config = launch_config()
    config = replace(config, data=replace(config.data, source=source, target=target))
    (fault,) = refusal(config)
    assert fault == (
        f"data.source={source or 'null'}: exactly one of data.source (text) and data.target "
        "(your own dataset) is needed. Set one and make the other null."
    )


# Tensor parallelism


def test_more_tensor_ranks_than_key_heads_are_refused():
    config = launch_config(
        model={"num_heads": 16, "num_kv_heads": 8}, parallel={"tp": 16}, cluster={"devices_per_node": 16}
    )
    assert refusal(config) == [
        "parallel.tp=16: must divide model.num_kv_heads = 8; 8/16 is not whole. Set parallel.tp=8 or 4."
    ]


def test_every_size_that_tp_does_not_divide_is_named_with_one_tp_that_divides_all():
    assert refusal(launch_config(parallel={"tp": 3})) == [
        "parallel.tp=3: must divide model.num_heads = 4, model.num_kv_heads = 4, model.ffn_size = 256; "
        "4/3, 4/3, 256/3 are not whole. Set parallel.tp=4 or 2."
    ]


def test_sequence_parallelism_needs_tensor_ranks():
    assert refusal(launch_config(parallel={"sequence_parallel": True})) == [
        "parallel.sequence_parallel=true: sequence parallelism splits activations over the tensor-parallel "
        "ranks and tp is 1. Set parallel.sequence_parallel=false, or parallel.tp=2."
    ]


def test_sequence_parallelism_needs_a_sequence_that_tp_divides():
    config = launch_config(batch={"seq_length": 30}, parallel={"tp": 4, "sequence_parallel": True})
    assert refusal(config) == [
        "batch.seq_length=30: sequence parallelism needs a seq_length that is a multiple of tp = 4; "
        "30/4 is not whole. Set batch.seq_length=28 or 32, or parallel.tp=2."
    ]


def test_a_vocabulary_that_tp_does_not_divide_is_padded_and_said():
    plan = build(launch_config(model={"vocab_size": 250682, "num_heads": 8}, parallel={"tp": 8}))
    assert plan.config.model.vocab_size == 250682
    assert any(
        "vocabulary of 250682 is padded to 250688, a multiple of tp = 8" in note for note in plan.notes
    )


def test_tensor_ranks_across_nodes_are_noted_with_the_cost():
    config = launch_config(parallel={"tp": 4}, cluster={"nodes": 2, "devices_per_node": 2})
    (note,) = [note for note in build(config).notes if note.startswith("Tensor-parallel")]
    assert re.match(
        r"Tensor-parallel groups of 4 cross nodes of 2 devices: their messages take \d+(\.\d+)? ms per step "
        r"and rank, \d+(\.\d+)? \w+ inside a node\.",
        note,
    )
    inside = build(launch_config(parallel={"tp": 4})).notes
    assert not [note for note in inside if note.startswith("Tensor-parallel")]


# Pipelines


def test_interleaving_refuses_too_few_microbatches_and_says_where_they_come_from():
    parallel = {"pp": 6, "num_chunks": 2, "dp": 4, "schedule": "interleaved_1f1b"}
    config = launch_config(
        model={"num_layers": 12},
        batch={"global_size": 24, "micro_size": 2},
        parallel=parallel,
        cluster={"nodes": 3},
    )
    (fault,) = refusal(config)
    assert fault.startswith(
        "batch.global_size=24: num_microbatches = global_size / (micro_size * dp) = 24 / (2 * 4) = 3; "
        "6 ranks need at least 6 microbatches; you have 3. Set batch.global_size=48, or batch.micro_size=1, "
    )


def test_interleaving_refuses_a_number_of_microbatches_that_pp_does_not_divide():
    parallel = {"pp": 4, "num_chunks": 2, "schedule": "interleaved_1f1b"}
    (fault,) = refusal(launch_config(model={"num_layers": 8}, batch={"global_size": 10}, parallel=parallel))
    assert fault.startswith("batch.global_size=10: num_microbatches = ")
    assert fault.endswith("Set batch.global_size=8 or 12, or parallel.schedule_options.uneven_groups=true.")


def test_options_of_a_schedule_reach_it():
    options = {"schedule_options": {"uneven_groups": True}}
    parallel = {"pp": 4, "num_chunks": 2, "schedule": "interleaved_1f1b", **options}
    plan = build(launch_config(model={"num_layers": 8}, batch={"global_size": 10}, parallel=parallel))
    assert plan.batch.num_microbatches == 10


def test_a_schedule_that_cannot_be_made_with_the_options_it_declares_is_refused(monkeypatch):
    monkeypatch.setattr(OneFOneB, "Config", InterleavedConfig, raising=False)
    with pytest.raises(
        PluginError, match="the schedule '1f1b' declares options, and cannot be made with them: "
    ):
        build(launch_config())


@pytest.mark.parametrize(("warmup_steps", "is_noted"), [(1, False), (2, True), (9, True)])
def test_a_learning_rate_that_never_reaches_its_peak_is_noted(warmup_steps, is_noted):
    config = launch_config()
    plan = build(replace(config, optim=replace(config.optim, warmup_steps=warmup_steps)))
    note = (
        "The learning rate grows through all 2 steps and never reaches optim.lr: "
        f"optim.warmup_steps is {warmup_steps}."
    )
    assert (note in plan.notes) is is_noted


def test_1f1b_with_few_microbatches_runs_and_notes_the_bubble():
    plan = build(launch_config(batch={"global_size": 8, "micro_size": 4}, parallel={"pp": 4}))
    assert (
        "2 microbatches cannot fill 4 pipeline ranks: the bubble is (pp - 1) / (m + pp - 1) = 3/5 = 60%; "
        "more would shrink it."
    ) in plan.notes


def test_a_bubble_that_no_microbatch_shrinks_is_not_told_to_shrink():
    parallel = {"pp": 4, "schedule": "naive"}
    plan = build(launch_config(batch={"global_size": 8, "micro_size": 4}, parallel=parallel))
    assert plan.schedule.bubble_formula == 0.75
    assert not [note for note in plan.notes if "shrink" in note or "cannot fill" in note]


def test_chunks_without_an_interleaving_schedule_are_refused():
    (fault,) = refusal(launch_config(parallel={"num_chunks": 2}))
    assert fault.startswith("parallel.num_chunks=2: ")


# Settings without effect, and plugins


def test_an_unknown_plugin_names_the_nearest():
    (fault,) = refusal(launch_config(parallel={"schedule": "1f1d"}))
    assert fault == "parallel.schedule=1f1d: no schedule of that name is installed. Did you mean 1f1b?"


def test_options_that_a_plugin_does_not_declare_are_refused():
    config = launch_config(
        parallel={"schedule_options": {"depth": 2}},
        architecture=PluginChoice(name="decentralized", options={"servers": [1]}),
    )
    assert refusal(config) == [
        "parallel.schedule_options.depth=2: 1f1b has no options. Remove parallel.schedule_options.depth.",
        "architecture.servers=[1]: not a setting here. It belongs to architecture parameter_server.",
    ]


def test_two_plugins_that_would_both_make_the_update_are_refused(monkeypatch):
    both = dict.fromkeys(("mine", "zero"), SimpleNamespace(update="module:make"))
    monkeypatch.setattr(plugins, "applying_parallels", lambda config: both)
    (fault,) = plugins.parallel_faults(launch_config())
    assert "mine and zero would each make the update of the parameters, which one can do." in str(fault)


# Precision and memory


def test_a_format_that_the_device_lacks_is_refused():
    (fault,) = refusal(launch_config(precision=MIXED, device={"peak_flops": {"fp32": 1e12, "tf32": 2e12}}))
    assert fault == (
        "precision.compute=bf16: box states no peak for it in device.peak_flops (fp32). "
        "Set precision.compute=fp32."
    )


def test_gradients_in_a_format_that_weights_do_not_make_are_refused():
    precision = PrecisionConfig(name="odd", compute="fp32", gradients="bf16", master_weights=False)
    assert refusal(launch_config(precision=precision)) == [
        "precision.gradients=bf16: weights in fp32 have gradients in fp32. Set precision.gradients=fp32."
    ]


def test_a_device_that_attains_nothing_is_refused():
    (fault,) = refusal(launch_config(device={"attainable_fraction": 0.0}))
    assert fault.startswith("device.attainable_fraction=0: must be greater than 0")


def test_model_states_that_do_not_fit_are_refused_with_the_largest_part_and_ways_out():
    (fault,) = refusal(launch_config(model=LLAMA3_8B, precision=MIXED))
    assert re.match(
        r"device\.memory_bytes=80000000000: a rank of pp_rank 0 needs 14\d GB \(weights 16\.1 GB, gradients "
        r"32\.1 GB, optimizer 96\.4 GB, activations .*\) and its device has 80\.0 GB; the largest part is "
        r"optimizer \(a smaller model needs less\)\. Set parallel\.tp=2 or 4, or parallel\.pp=2 or 4\.",
        fault,
    )


def test_activations_that_do_not_fit_are_refused_with_their_own_ways_out():
    config = launch_config(batch={"global_size": None, "micro_size": 64}, device={"memory_bytes": 20_000_000})
    (fault,) = refusal(config)
    assert fault.endswith(
        "the largest part is activations (a shorter batch.seq_length needs less). "
        "Set batch.micro_size=16, or parallel.recompute=full, or parallel.tp=4, or parallel.pp=4."
    )


def test_a_job_that_fills_its_memory_exactly_fits():
    total = build(launch_config()).memory[0].total_bytes
    assert build(launch_config(device={"memory_bytes": total}))
    assert refusal(launch_config(device={"memory_bytes": total - 1}))


def test_a_job_that_does_not_fit_is_planned_with_a_note_where_that_is_asked_for():
    total = build(launch_config()).memory[0].total_bytes
    plan = build(launch_config(device={"memory_bytes": total - 1, "memory_check": "warn"}))
    assert not plan.fits
    assert plan.notes[0].startswith(
        "Planned, but by prediction it ends out of memory: a rank of pp_rank 0 needs "
    )
    plan = build(launch_config(device={"memory_bytes": total, "memory_check": "warn"}))
    assert plan.fits
    assert not any("out of memory" in note for note in plan.notes)


# Recomputation


def test_a_list_of_recomputations_has_one_for_every_stage():
    (fault,) = refusal(launch_config(parallel={"pp": 2, "recompute": ("full", "none", "full")}))
    assert fault == (
        "parallel.recompute=[full,none,full]: needs one of none, selective and full for each of 2 stages, "
        "has 3. Set parallel.recompute=full or none."
    )


def test_layers_are_not_balanced_over_stages_that_differ():
    config = launch_config(parallel={"pp": 2, "recompute": ("full", "none"), "layers_per_stage": "auto"})
    (fault,) = refusal(config)
    assert fault == (
        "parallel.recompute=[full,none]: parallel.layers_per_stage=auto weighs layers before it knows their "
        "stages. Set parallel.layers_per_stage=even."
    )


# All at once


def test_every_fault_is_reported_at_once():
    config = launch_config(
        model={"num_layers": 16},
        batch={"global_size": 7, "micro_size": 2},
        parallel={"tp": 3, "pp": 3, "dp": 1, "zero_stage": 1},
        cluster=NO_IDLE,
    )
    paths = [fault.partition("=")[0] for fault in refusal(config)]
    assert set(paths) == {
        "parallel.zero_stage",
        "parallel.dp",
        "batch.global_size",
        "parallel.pp",
        "parallel.tp",
    }


def test_an_unknown_plugin_does_not_hide_the_other_faults():
    faults = refusal(launch_config(model={"num_layers": 5}, parallel={"schedule": "none", "pp": 2}))
    assert [fault.partition("=")[0] for fault in faults] == ["parallel.schedule", "parallel.pp"]


@pytest.mark.parametrize(("bias", "is_told"), [("qkv", True), ("none", False)])
def test_a_model_that_no_format_has_a_place_for_is_noted_before_it_is_trained(bias, is_told):
    llama = {"family": "llama", "num_kv_heads": 2, "qk_norm": True, "attention_bias": bias}
    plan = build(launch_config(model=llama))
    told = (
        f"trireme export will write none of its checkpoints: model.attention_bias={bias}, model.qk_norm=true"
    )
    assert any(note.startswith(told) for note in plan.notes) is is_told
