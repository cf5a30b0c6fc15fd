"""ZeRO in a plan: what is refused and why, the DeepSpeed configuration, bytes and messages by stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.base.errors import PlanError
from launcher.contract.config import PrecisionConfig
from launcher.plan.build import build
from launcher_plugins.parallel.zero import deepspeed_json as zero_json
from launcher_plugins.parallel.zero.states import split_states
from tests.helpers.configs import FP32, MIXED, launch_config

FP16 = PrecisionConfig(name="fp16", compute="fp16", gradients="fp16", master_weights=True)
CPU = {"kind": "cpu", "peak_flops": {"fp32": 1e12, "bf16": 1e12, "fp16": 1e12}}


def zero(stage=1, **sections):
    parallel = {"dp": 2, "zero_stage": stage} | sections.pop("parallel", {})
    return launch_config(parallel=parallel, **sections)


def options(**values):
    return zero(parallel={"zero_options": values})


def refusal(config):
    with pytest.raises(PlanError) as error:
        build(config)
    return [str(fault) for fault in error.value.faults]


def generated(config):
    return build(config).documents["deepspeed.json"]


# What is refused


@pytest.mark.parametrize("stage", [2, 3])
def test_a_pipeline_keeps_gradients_that_stages_2_and_3_give_away(stage):
    assert refusal(zero(stage, parallel={"pp": 2})) == [
        f"parallel.zero_stage={stage}: reduce-scatters gradients after every microbatch, and a pipeline of 2 "
        "stages (pp * num_chunks) accumulates them over all of its microbatches. "
        "Set parallel.zero_stage=1, or parallel.pp=1."
    ]


def test_stage_1_goes_with_a_pipeline_and_stage_3_without():
    assert build(zero(1, parallel={"pp": 2, "tp": 2})).update.endswith("zero.runtime.update:update")
    assert build(zero(3, parallel={"tp": 2})).update.endswith("zero.runtime.update:update")


def test_stage_3_has_no_weights_of_norms_for_selective_recomputation():
    assert refusal(zero(3, parallel={"recompute": "selective"})) == [
        "parallel.recompute=selective: ZeRO-3 frees the norm's weights before selective recomputation "
        "needs them. Set parallel.recompute=full or none, or parallel.zero_stage=2."
    ]
    assert build(zero(2, parallel={"recompute": "selective"}))


def test_chunks_of_one_rank_are_a_pipeline_too():
    (fault,) = refusal(zero(2, parallel={"num_chunks": 2, "schedule": "interleaved_1f1b"}))
    assert fault.endswith("Set parallel.zero_stage=1, or parallel.num_chunks=1 parallel.schedule=1f1b."), (
        fault
    )


def test_a_split_backward_computes_gradients_too_late_for_stage_2():
    assert refusal(zero(2, parallel={"schedule": "zb_h1"})) == [
        "parallel.zero_stage=2: reduce-scatters gradients during the backward, and zb_h1 computes them after "
        "it. Set parallel.zero_stage=1, or parallel.schedule=1f1b."
    ]


@pytest.mark.parametrize("dp", [1, "auto"])
def test_one_replica_has_nobody_to_split_with(dp):
    (fault,) = refusal(zero(parallel={"dp": dp}, cluster={"nodes": 1, "devices_per_node": 1}))
    assert fault == (
        "parallel.zero_stage=1: splits the model states over the data-parallel replicas, and there is one "
        "(parallel.dp=1). Set parallel.zero_stage=0, or parallel.dp=2 cluster.nodes=2."
    )


def test_fp16_on_a_cpu_is_refused():
    assert refusal(zero(precision=FP16, device=CPU)) == [
        "parallel.zero_stage=1: DeepSpeed has no fp16 on the CPU. "
        "Set parallel.zero_stage=0, or precision.compute=bf16 precision.gradients=fp32."
    ]


def test_weights_without_an_fp32_copy_are_refused():
    alone = replace(MIXED, gradients="bf16", master_weights=False)
    assert refusal(zero(2, precision=alone)) == [
        "precision.master_weights=false: DeepSpeed keeps fp32 weights in the optimizer "
        "(parallel.zero_stage=2). Set precision.master_weights=true, or parallel.zero_stage=0."
    ]


def test_offloading_from_cpus_to_the_cpu_is_refused():
    assert refusal(zero(parallel={"zero_offload": True}, device=CPU)) == [
        "parallel.zero_offload=true: the devices are CPUs, so the optimizer state is in the memory of the "
        "CPU already. Set parallel.zero_offload=false."
    ]


def test_settings_of_zero_without_zero_are_refused():
    values = {"zero_offload": True, "zero_options": {"steps_per_print": 1}}
    offload, option = refusal(launch_config(parallel=values))
    assert offload == (
        "parallel.zero_offload=true: has an effect only where DeepSpeed makes the update "
        "(parallel.zero_stage=1, 2 or 3). "
        "Set parallel.zero_offload=false, or parallel.zero_stage=1 parallel.dp=2."
    )
    assert option.startswith("parallel.zero_options.steps_per_print=1: has an effect only where DeepSpeed")
    assert option.endswith("Remove parallel.zero_options.steps_per_print.")


# A user's own DeepSpeed keys


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"train_batch_size": 32},
            "parallel.zero_options.train_batch_size=32: batch.global_size asks for 16. "
            "Remove parallel.zero_options.train_batch_size, or change batch.global_size.",
        ),
        (
            {"gradient_accumulation_steps": 4},
            "parallel.zero_options.gradient_accumulation_steps=4: batch.num_microbatches asks for 8. "
            "Remove parallel.zero_options.gradient_accumulation_steps, or change batch.num_microbatches.",
        ),
        (
            {"gradient_clipping": "auto"},
            "parallel.zero_options.gradient_clipping=auto: DeepSpeed would be given the word itself. Give "
            "the value, or remove the key: the launcher fills in what follows from the recipe.",
        ),
        (
            {"zero_optimization": {"stage": 3}},
            "parallel.zero_options.zero_optimization.stage=3: parallel.zero_stage asks for 1. Remove "
            "parallel.zero_options.zero_optimization.stage, or change parallel.zero_stage.",
        ),
        (
            {"bf16": {"enabled": True}},
            "parallel.zero_options.bf16.enabled=true: precision.compute asks for false. Remove "
            "parallel.zero_options.bf16.enabled, or change precision.compute.",
        ),
        (
            {"optimizer": {"type": "AdamW"}},
            "parallel.zero_options.optimizer.type=AdamW: optim decides on it. Remove "
            "parallel.zero_options.optimizer.type, or change optim.",
        ),
        (
            {"zero_optimization": {"contiguous_gradients": True}},
            "parallel.zero_options.zero_optimization.contiguous_gradients=true: the launcher runs the "
            "backward itself, which needs false. "
            "Remove parallel.zero_options.zero_optimization.contiguous_gradients.",
        ),
        (
            {"zero_optimisation": {"stage": 1}},
            "parallel.zero_options.zero_optimisation.stage=1: is no key of DeepSpeed that may be set here. "
            "Did you mean zero_optimization?",
        ),
        (
            {"tensorboard": {"enabled": True}},
            "parallel.zero_options.tensorboard.enabled=true: is not taken: the launcher runs the loop, and "
            "DeepSpeed the update of the weights. Remove parallel.zero_options.tensorboard.enabled: "
            "metrics/rank-*.jsonl in the run's folder has the loss and the times of every step.",
        ),
        (
            {"gradient_predivide_factor": 2.0},
            "parallel.zero_options.gradient_predivide_factor=2: is not taken: the launcher runs the loop, "
            "and DeepSpeed the update of the weights. Remove "
            "parallel.zero_options.gradient_predivide_factor: "
            "precision.gradients=fp32 keeps sums of gradients from overflowing.",
        ),
        (
            {"data_types": {"param_dtype": "bf16"}},
            "parallel.zero_options.data_types.param_dtype=bf16: precision decides on it. "
            "Remove parallel.zero_options.data_types.param_dtype, or change precision.",
        ),
        (
            {"log_level": "loud"},
            "parallel.zero_options.log_level=loud: must be one of debug, info, warning, error, critical. "
            "Remove parallel.zero_options.log_level.",
        ),
        (
            {"zero_optimization": True},
            "parallel.zero_options.zero_optimization=true: must be settings by name. "
            "Remove parallel.zero_options.zero_optimization.",
        ),
        (
            {"zero_optimization": {"overlap_com": True}},
            "parallel.zero_options.zero_optimization.overlap_com=true: is no key that may be set here. "
            "Did you mean overlap_comm?",
        ),
        (
            {"zero_optimization": {"overlap_comm": "yes"}},
            "parallel.zero_options.zero_optimization.overlap_comm=yes: must be true or false. "
            "Remove parallel.zero_options.zero_optimization.overlap_comm.",
        ),
        (
            {"zero_optimization": {"stage3_max_live_parameters": 10}},
            "parallel.zero_options.zero_optimization.stage3_max_live_parameters=10: has an effect at stage 3 "
            "alone, and parallel.zero_stage=1. "
            "Remove parallel.zero_options.zero_optimization.stage3_max_live_parameters.",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "cpu"}}},
            "parallel.zero_options.zero_optimization.offload_param.device=cpu: would keep states where "
            "neither the plan nor a checkpoint has them. "
            "Remove parallel.zero_options.zero_optimization.offload_param.device.",
        ),
        (
            {"zero_optimization": {"overlap_comm": True}},
            "parallel.zero_options.zero_optimization.overlap_comm=true: reduces gradients in every backward, "
            "which stage 1 does once a step. "
            "Remove parallel.zero_options.zero_optimization.overlap_comm.",
        ),
        (
            {"zero_optimization": {"round_robin_gradients": True}},
            "parallel.zero_options.zero_optimization.round_robin_gradients=true: reorders the states, which "
            "DeepSpeed's own map of them does not follow. "
            "Remove parallel.zero_options.zero_optimization.round_robin_gradients.",
        ),
        (
            {"fp16": {"hysteresis": 2}},
            "parallel.zero_options.fp16.hysteresis=2: has no effect, as precision.compute=fp32. "
            "Remove parallel.zero_options.fp16.hysteresis.",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_key_that_contradicts_the_recipe_is_refused_naming_both(given, message):
    assert refusal(options(**given)) == [message]


def test_further_keys_pass_through_and_what_agrees_is_no_fault():
    config = options(
        train_batch_size=16,
        zero_allow_untested_optimizer=True,
        log_level="info",
        wall_clock_breakdown=False,
        prescale_gradients=False,
        gradient_predivide_factor=1.0,
        tensorboard={"enabled": False},
        zero_optimization={"reduce_scatter": False, "stage": 1},
    )
    found = generated(config)
    assert found["log_level"] == "info"
    assert found["zero_optimization"]["reduce_scatter"] is False
    assert found["zero_optimization"]["stage"] == 1


@pytest.mark.parametrize("value", [0, 10, True])
def test_reports_that_nobody_would_see_are_refused(value):
    (fault,) = refusal(options(steps_per_print=value))
    assert fault.startswith(f"parallel.zero_options.steps_per_print={str(value).lower()}: is not taken"), (
        fault
    )


def test_a_loss_scale_that_deepspeed_cannot_start_with_is_refused():
    (fault,) = refusal(
        zero(
            precision=FP16,
            device={"peak_flops": CPU["peak_flops"]},
            parallel={"zero_options": {"fp16": {"loss_scale_window": 0}}},
        )
    )
    assert "fp16.loss_scale_window=0: must be a whole number of at least 1." in fault


def test_a_whole_number_written_as_a_float_becomes_an_int():
    given = {"zero_optimization": {"stage3_max_live_parameters": 5e8}}
    found = generated(zero(3, parallel={"zero_options": given}))
    assert found["zero_optimization"]["stage3_max_live_parameters"] == 500_000_000
    assert isinstance(found["zero_optimization"]["stage3_max_live_parameters"], int)


# What DeepSpeed is given


def test_the_configuration_repeats_the_recipe():
    found = generated(zero(2, batch={"global_size": 32, "micro_size": 2}))
    assert found["train_batch_size"] == 32
    assert found["train_micro_batch_size_per_gpu"] == 2
    assert found["gradient_accumulation_steps"] == 8
    assert found["gradient_clipping"] == 1.0
    assert found["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", [FP32, MIXED])
def test_no_auto_is_left_and_one_number_format_is_on(stage, precision):
    found = generated(zero(stage, precision=precision))
    assert "auto" not in [value for _, value in zero_json._leaves(found)]
    formats = [name for name in ("bf16", "fp16") if name in found]
    assert formats == ([] if precision is FP32 else ["bf16"])


@pytest.mark.parametrize("bucket_bytes", [1, 4097, 1 << 40])
def test_a_bucket_is_even_and_no_larger_than_the_model(bucket_bytes):
    plan = build(zero(2, parallel={"bucket_bytes": bucket_bytes}))
    size = plan.documents["deepspeed.json"]["zero_optimization"]["reduce_bucket_size"]
    assert size % 2 == 0
    assert 2 <= size <= plan.num_parameters + 1


def test_offload_keeps_our_optimizer():
    found = generated(zero(2, parallel={"zero_offload": True}))
    assert found["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert found["zero_force_ds_cpu_optimizer"] is False


def test_without_zero_there_is_no_configuration():
    assert build(launch_config()).documents == {}


# Bytes


@pytest.mark.parametrize(
    ("billions", "replicas", "gigabytes"),
    [
        (7.5, 1, (120, 120, 120)),
        (7.5, 4, (52.5, 41.3, 30)),
        (7.5, 16, (35.6, 21.6, 7.5)),
        (7.5, 64, (31.4, 16.6, 1.88)),
        (7.5, 256, (30.4, 15.4, 0.47)),
        (7.5, 1024, (30.1, 15.1, 0.12)),
        (128, 1, (2048, 2048, 2048)),
        (128, 4, (896, 704, 512)),
        (128, 16, (608, 368, 128)),
        (128, 64, (536, 284, 32)),
        (128, 256, (518, 263, 8)),
        (128, 1024, (513, 257, 2)),
        (1000, 1, (16000, 16000, 16000)),
        (1000, 4, (7000, 5500, 4000)),
        (1000, 16, (4750, 2875, 1000)),
        (1000, 64, (4187, 2218, 250)),
        (1000, 256, (4046, 2054, 62.5)),
        (1000, 1024, (4011, 2013, 15.6)),
    ],
)
def test_model_states_are_those_of_the_papers_table_1(billions, replicas, gigabytes):
    """Rajbhandari et al., ZeRO (2020), table 1: three model sizes, six numbers of replicas, three stages."""
    found = [
        split_states(round(billions * 1e9), FP16, replicas, stage).total_bytes / 1e9 for stage in (1, 2, 3)
    ]
    assert found == pytest.approx(gigabytes, rel=0.005, abs=0.005)


@pytest.mark.parametrize(("stage", "weights", "gradients"), [(1, 1, 1), (2, 1, 4), (3, 4, 4)])
def test_a_plan_splits_what_the_stage_splits(stage, weights, gradients):
    plan = build(zero(stage, precision=MIXED, parallel={"dp": 4}))
    (memory,) = plan.memory
    number = plan.num_parameters
    assert memory.weights_bytes == pytest.approx(2 * number / weights, abs=4)
    assert memory.gradients_bytes == pytest.approx(4 * number / gradients, abs=4)
    assert memory.optimizer_bytes == pytest.approx(12 * number / 4, abs=12)


def test_the_four_stages_stand_side_by_side_whichever_is_chosen():
    plans = [build(zero(stage, parallel={"dp": 4})) for stage in (0, 1, 2, 3)]
    (sizes,) = {tuple(plan.section("zero")["states_bytes"][0]) for plan in plans}
    number = build(zero(1)).num_parameters
    assert sizes == pytest.approx([16 * number, 11 * number, 8 * number, 5 * number], rel=1e-4)


def test_an_offloaded_optimizer_is_not_on_the_device():
    (memory,) = build(zero(parallel={"zero_offload": True})).memory
    assert memory.optimizer_bytes == 0


# Messages


def sent(config):
    """Bytes that a rank sends per step, by purpose, along dp."""
    return {row.purpose: row.sent_bytes for row in build(config).traffic if row.axis == "dp"}


def test_stages_1_and_2_send_what_plain_data_parallelism_sends():
    one_microbatch = {"global_size": 4, "micro_size": 1}
    plain = sent(launch_config(batch=one_microbatch, parallel={"dp": 4}))["gradients"]
    for stage in (1, 2):
        found = sent(zero(stage, batch=one_microbatch, parallel={"dp": 4}))
        assert found["gradients"] + found["weights"] == pytest.approx(plain, rel=1e-4)


def test_stage_3_sends_half_as_much_again():
    one_microbatch = {"global_size": 4, "micro_size": 1}
    plain = sent(launch_config(batch=one_microbatch, parallel={"dp": 4}))["gradients"]
    found = build(zero(3, batch=one_microbatch, parallel={"dp": 4})).traffic
    total = sum(row.sent_bytes for row in found if row.purpose in ("gradients", "weights"))
    assert total == pytest.approx(1.5 * plain, rel=1e-4)


def test_from_stage_2_on_gradients_leave_after_every_microbatch():
    sizes = {"global_size": 32, "micro_size": 1}  # 8 microbatches
    once, each = (sent(zero(stage, batch=sizes, parallel={"dp": 4}))["gradients"] for stage in (1, 2))
    assert each == pytest.approx(8 * once, rel=1e-3)


def test_bf16_with_fp32_gradients_sums_them_whole_at_stage_1():
    """DeepSpeed takes an optimizer of its own there, which all-reduces."""
    (row,) = [row for row in build(zero(precision=MIXED)).traffic if row.purpose == "gradients"]
    assert row.operation == "all_reduce"
