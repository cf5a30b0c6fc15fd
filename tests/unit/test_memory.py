"""Bytes per rank, against sums written out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.base.units import format_bytes
from launcher.contract.config import PrecisionConfig, TrainConfig
from launcher.plan.build import build
from launcher.plan.cost.memory import part_bytes, saved_activation_bytes
from tests.helpers.configs import FP32, LLAMA3_8B, MIXED, job_shape, launch_config
from tests.helpers.objects import there

S, H, HEADS, FFN, VOCAB, LAYERS = 32, 64, 4, 256, 256, 4
BF16_ALONE = PrecisionConfig(name="bf16", compute="bf16", gradients="bf16", master_weights=False)
BF16_MASTER = PrecisionConfig(name="bf16", compute="bf16", gradients="bf16", master_weights=True)


def only_rank(config):
    (memory,) = build(config).memory
    return memory


def layer_bytes(config):
    job = job_shape(config)
    return part_bytes(job, job.model.layers[0])


@pytest.mark.parametrize(
    ("precision", "weights", "gradients", "optimizer", "converted"),
    [(FP32, 4, 4, 8, 0), (MIXED, 2, 4, 12, 0), (BF16_MASTER, 2, 2, 12, 4), (BF16_ALONE, 2, 2, 4, 0)],
    ids=["fp32", "mixed", "bf16 with master", "bf16 alone"],
)
def test_model_states_take_the_bytes_of_their_formats(precision, weights, gradients, optimizer, converted):
    plan = build(launch_config(precision=precision))
    (memory,) = plan.memory
    assert memory.weights_bytes == weights * plan.num_parameters
    assert memory.gradients_bytes == gradients * plan.num_parameters
    assert memory.optimizer_bytes == optimizer * plan.num_parameters
    assert memory.other_bytes.get("converted gradients", 0) == converted * plan.num_parameters


def test_fp32_takes_16_bytes_a_parameter_and_mixed_precision_18():
    for precision, each in ((FP32, 16), (MIXED, 18)):
        job = job_shape(launch_config(precision=precision))
        assert job.unsharded_states(0).total_bytes == each * job.num_local_parameters(0)


def test_a_gpt_layer_keeps_what_its_table_says():
    split = S * (3 * H + H + 2 * FFN)  # q, k, v, attention, GELU in and out
    assert layer_bytes(launch_config()) == 4 * (split + HEADS * S + 2 * S * H + 2 * S * H)


def test_a_llama_layer_keeps_gate_activation_up_and_product_and_few_keys():
    config = launch_config(model={"family": "llama", "num_kv_heads": 2})
    split = S * (3 * H + 2 * (H // 2) + 4 * FFN)
    assert layer_bytes(config) == 4 * (split + HEADS * S + 4 * S * H)


def test_an_rms_norm_on_a_cpu_keeps_its_normalised_input_too():
    llama = {"family": "llama"}
    on_cpu = layer_bytes(launch_config(model=llama, device={"kind": "cpu"}))
    assert on_cpu - layer_bytes(launch_config(model=llama)) == 4 * 2 * S * H


def test_dropout_keeps_a_byte_for_each_element_of_two_masks():
    with_masks = layer_bytes(launch_config(model={"dropout": 0.1}, precision=MIXED))
    assert with_masks - layer_bytes(launch_config(precision=MIXED)) == 2 * S * H


def test_norms_keep_their_inputs_in_fp32_under_mixed_precision():
    split = 2 * S * (4 * H + 2 * FFN) + 4 * HEADS * S
    assert layer_bytes(launch_config(precision=MIXED)) == split + 4 * 2 * S * H + 2 * 2 * S * H


def test_activations_grow_with_the_microbatch():
    one, two = (layer_bytes(launch_config(batch={"micro_size": micro})) for micro in (1, 2))
    assert two == 2 * one


def test_tensor_parallelism_splits_the_inside_of_a_layer_only():
    inside = 4 * (S * (4 * H + 2 * FFN) + HEADS * S)
    between = 4 * 4 * S * H
    assert layer_bytes(launch_config(parallel={"tp": 4})) == inside // 4 + between


def test_sequence_parallelism_splits_the_inputs_and_the_outputs_of_the_norms():
    inside = 4 * (S * (4 * H + 2 * FFN) + HEADS * S)
    config = launch_config(parallel={"tp": 4, "sequence_parallel": True})
    assert layer_bytes(config) == inside // 4 + 4 * 4 * S * H // 4


def test_full_recomputation_keeps_the_input_of_every_layer_and_one_working_set():
    memory = only_rank(launch_config(parallel={"recompute": "full"}))
    head = 4 * (2 * S * H + S * VOCAB)
    assert memory.activations_bytes == LAYERS * 4 * S * H + head
    assert memory.other_bytes["recomputed layer"] == layer_bytes(launch_config())


def test_selective_recomputation_drops_what_comes_out_of_norms_and_activation_functions():
    config = launch_config(parallel={"recompute": "selective"})
    memory, head = only_rank(config), 4 * (2 * S * H + S * VOCAB)
    dropped = 4 * S * (2 * H + FFN)
    assert memory.activations_bytes == LAYERS * (layer_bytes(config) - dropped) + head
    assert memory.other_bytes["recomputed layer"] == dropped


def test_selective_recomputation_keeps_one_input_of_a_norm_in_the_compute_format():
    config = launch_config(precision=MIXED, parallel={"recompute": "selective"})
    job = job_shape(config)
    inside = 2 * S * (4 * H + FFN) + 4 * HEADS * S
    head = 2 * S * H + 4 * (S * H + S * VOCAB)
    assert saved_activation_bytes(job, job.stages[0]) == LAYERS * (inside + 2 * 2 * S * H) + head


def test_every_stage_recomputes_in_its_own_way():
    parallel = {"pp": 2, "recompute": ("full", "none")}
    first, last = build(launch_config(parallel=parallel)).memory
    full, none = (build(launch_config(parallel={"pp": 2, "recompute": mode})) for mode in ("full", "none"))
    assert (first, last) == (full.memory[0], none.memory[1])


def test_every_rank_holds_the_mask_of_a_window_once():
    model = {"family": "llama", "sliding_window": S - 1}
    plan = build(launch_config(model=model, parallel={"pp": 2}))
    masks = [memory.other_bytes["attention mask"] for memory in plan.memory]
    assert masks == [4 * S * S] * 2
    assert "attention mask" not in only_rank(launch_config(model=model | {"sliding_window": S})).other_bytes


def test_the_last_stage_holds_the_logits_beside_the_probabilities():
    plan = build(launch_config(parallel={"pp": 2}))
    assert "logits" not in plan.memory[0].other_bytes
    assert plan.memory[1].other_bytes["logits"] == 4 * S * VOCAB
    mixed = build(launch_config(precision=MIXED))
    assert mixed.memory[0].other_bytes["logits"] == (4 + 2) * S * VOCAB


def test_a_stage_lets_go_of_the_message_that_it_sent_but_for_the_sends_under_way():
    config = launch_config(parallel={"pp": 2})
    job = job_shape(config)
    first, last = job.stages
    layers = 2 * part_bytes(job, job.model.layers[0])
    assert saved_activation_bytes(job, first) == layers
    assert saved_activation_bytes(job, last) == layers + part_bytes(job, there(job.model.epilogue))
    assert [memory.other_bytes["sends under way"] for memory in build(config).memory] == [4 * 4 * S * H] * 2


@pytest.mark.parametrize(
    ("schedule", "num_chunks", "peaks"),
    [
        ("naive", 1, lambda p, v, m, r: 1),
        ("gpipe", 1, lambda p, v, m, r: m),
        ("1f1b", 1, lambda p, v, m, r: min(m, p - r)),
        ("zb_h1", 1, lambda p, v, m, r: min(m, p)),
        ("interleaved_1f1b", 2, lambda p, v, m, r: min(v * m, (v + 1) * p - 1 - 2 * r)),
    ],
)
@pytest.mark.parametrize("num_microbatches", [4, 8])
def test_a_schedule_holds_as_many_stage_inputs_as_its_closed_form(
    schedule, num_chunks, peaks, num_microbatches
):
    parallel = {"pp": 4, "num_chunks": num_chunks, "schedule": schedule}
    batch = {"global_size": num_microbatches}
    plan = build(launch_config(model={"num_layers": 8}, batch=batch, parallel=parallel))
    expected = [peaks(4, num_chunks, num_microbatches, rank) for rank in range(4)]
    assert [ranks.peak_microbatches for ranks in plan.memory] == expected


def test_the_peak_of_1f1b_multiplies_what_one_microbatch_keeps():
    config = launch_config(batch={"global_size": 8}, parallel={"pp": 4})
    plan, job = build(config), job_shape(config)
    expected = [(4 - stage.stage) * saved_activation_bytes(job, stage) for stage in job.stages]
    assert [ranks.activations_bytes for ranks in plan.memory] == expected


def test_zb_h1_keeps_as_much_on_every_rank_as_1f1b_on_the_first():
    config = launch_config(batch={"global_size": 8}, parallel={"pp": 4, "schedule": "zb_h1"})
    plan, job = build(config), job_shape(config)
    assert [ranks.activations_bytes for ranks in plan.memory] == [
        4 * saved_activation_bytes(job, s) for s in job.stages
    ]


def test_what_a_split_backward_recomputes_is_held_until_its_weight_gradients():
    parallel = {"pp": 2, "schedule": "zb_h1", "recompute": "full"}
    batch = {"global_size": 4}
    plan = build(launch_config(batch=batch, parallel=parallel))
    inputs = saved_activation_bytes(
        job := job_shape(launch_config(batch=batch, parallel=parallel)), job.stages[1]
    )
    whole = saved_activation_bytes(
        job := job_shape(launch_config(batch=batch, parallel={"pp": 2})), job.stages[1]
    )
    # 1F0 1B0 1F1 1B1 1W0: two microbatches have been recomputed and wait for their weight gradients.
    assert plan.memory[1].activations_bytes == 2 * whole > 2 * inputs


def test_receives_posted_ahead_take_buffers():
    plan = build(launch_config(batch={"global_size": 8}, parallel={"pp": 2}))
    message = 4 * S * H
    assert [ranks.other_bytes["receive buffers"] % message for ranks in plan.memory] == [0, 0]
    assert all(ranks.other_bytes["receive buffers"] >= message for ranks in plan.memory)
    assert "receive buffers" not in only_rank(launch_config()).other_bytes


def test_parameters_of_all_ranks_sum_to_the_model_where_nothing_is_replicated_or_tied():
    plan = build(launch_config(parallel={"pp": 4}))
    assert sum(ranks.weights_bytes for ranks in plan.memory) == 4 * plan.num_parameters


def test_tied_weights_lie_on_both_end_stages():
    tied = {"tied_embeddings": True}
    assert (
        only_rank(launch_config(model=tied)).weights_bytes
        == 4 * build(launch_config(model=tied)).num_parameters
    )
    plan = build(launch_config(model=tied, parallel={"pp": 2}))
    assert sum(ranks.weights_bytes for ranks in plan.memory) == 4 * (plan.num_parameters + VOCAB * H)


def test_llama3_8b_in_mixed_precision_needs_18_bytes_a_parameter_and_is_refused_on_80_gb():
    config = launch_config(model=LLAMA3_8B, precision=MIXED, device={"memory_bytes": 200_000_000_000})
    plan = build(config)
    memory = plan.memory[0]
    states = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
    assert states == 18 * 8_030_261_248
    assert memory.total_bytes == states + memory.activations_bytes + sum(memory.other_bytes.values())


SAVED = TrainConfig(num_steps=2, eval_interval=0, eval_batches=0, checkpoint_interval=1, keep_checkpoints=1)


@pytest.mark.parametrize(("precision", "each"), [(FP32, 12), (MIXED, 12), (BF16_ALONE, 6)], ids=str)
def test_the_copy_that_checkpoints_are_written_from_holds_what_is_updated_and_its_moments(precision, each):
    config = launch_config(precision=precision, train=SAVED, device={"kind": "cpu"})
    plan = build(config)
    (memory,) = plan.memory
    assert memory.other_bytes["checkpoint copy"] == each * plan.num_parameters
    waiting = replace(config, train=replace(SAVED, async_checkpoint=False))
    assert "checkpoint copy" not in only_rank(waiting).other_bytes


@pytest.mark.parametrize(
    ("parallel", "num_parts", "num_savers"),
    [({"dp": 4, "tp": 2}, 1, 2), ({"dp": 4, "zero_stage": 1}, 4, 4)],
    ids=["the first replica saves", "with zero every rank saves its part"],
)
def test_on_a_gpu_the_copy_is_in_the_memory_of_the_host(parallel, num_parts, num_savers):
    config = launch_config(train=SAVED, parallel=parallel)
    plan = build(config)
    size = 12 * job_shape(config).num_local_parameters(0) // num_parts
    assert "checkpoint copy" not in plan.memory[0].other_bytes
    amounts = f"{format_bytes(size)} a rank, {format_bytes(num_savers * size)} a node"
    assert any(note.endswith(f" at most {amounts} (train.async_checkpoint).") for note in plan.notes)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"num_steps": 100, "checkpoint_interval": 10, "keep_every": 50, "keep_checkpoints": 2}, 3),
        ({"num_steps": 105, "checkpoint_interval": 10, "keep_every": 50, "keep_checkpoints": 3}, 4),
        ({"num_steps": 40, "checkpoint_interval": 10, "keep_every": 20, "keep_checkpoints": 99}, 4),
    ],
)
@pytest.mark.parametrize("parallel", [{}, {"dp": 2}, {"dp": 2, "zero_stage": 1}], ids=str)
def test_a_plan_tells_the_disk_that_checkpoints_kept_for_good_take(settings, kept, parallel):
    plan = build(launch_config(train=replace(SAVED, **settings), parallel=parallel))
    (note,) = (note for note in plan.notes if "train.keep_every" in note)
    each = 12 * plan.num_parameters
    assert note.startswith(
        f"At its end the run has {kept} checkpoints of at most {format_bytes(each)}: "
        f"{format_bytes(kept * each)} on the disk, and one more while one is written"
    )
