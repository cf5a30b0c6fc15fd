"""Predicted times, from the operations of a stage to the whole step."""

from __future__ import annotations

import pytest

from launcher.plan.build import build
from launcher.plan.cost.memory import again_bytes, part_bytes
from tests.helpers.configs import MIXED, job_shape, launch_config
from tests.helpers.objects import there

RATE = 1e12 * 0.5
"""Attainable FLOP/s of the test device."""
FREE_MEMORY = {"memory_bandwidth_bytes_per_s": 1e30}
"""A device whose operations cost their arithmetic alone."""
FREE_ARITHMETIC = {"peak_flops": {"fp32": 1e30}}
"""A device whose operations cost the bytes they move alone, at 1e12 bytes a second."""


def test_a_forward_takes_its_operations_over_the_attainable_rate():
    config = launch_config(batch={"global_size": 4, "micro_size": 2}, device=FREE_MEMORY)
    plan = build(config)
    assert plan.schedule.forward_s == pytest.approx([2 / 4 * plan.step_flops / 3 / RATE], rel=1e-9)
    assert plan.schedule.backward_s[0] == pytest.approx(2 * plan.schedule.forward_s[0])


def test_what_does_not_multiply_matrices_takes_the_bytes_it_moves():
    config = launch_config(batch={"global_size": 4, "micro_size": 2}, device=FREE_ARITHMETIC)
    schedule, job = build(config).schedule, job_shape(config)
    parts = [*job.model.layers, there(job.model.prologue), there(job.model.epilogue)]
    kept = sum(part_bytes(job, part) for part in parts)
    weights = 4 * sum(part.num_parameters for part in parts if part.forward_flops)
    gradients = 4 * sum(part.num_parameters for part in parts)
    assert schedule.forward_s == pytest.approx([(weights + 2 * kept) / 1e12])
    assert schedule.backward_s == pytest.approx([(2 * weights + 3 * kept + 2 * gradients) / 1e12])


def test_larger_microbatches_spread_the_reading_of_the_weights():
    times = [
        build(launch_config(batch={"global_size": 8, "micro_size": size}, device=FREE_ARITHMETIC)).schedule
        for size in (1, 8)
    ]
    assert times[0].forward_s[0] < times[1].forward_s[0] < 8 * times[0].forward_s[0]


def test_full_recomputation_adds_a_forward_of_the_layers_to_the_backward():
    model = job_shape(launch_config()).model
    layers_s = sum(layer.forward_flops for layer in model.layers) / RATE
    plain, again = (
        build(launch_config(parallel={"recompute": mode}, device=FREE_MEMORY)).schedule
        for mode in ("none", "full")
    )
    assert again.backward_s[0] - plain.backward_s[0] == pytest.approx(layers_s)
    assert again.forward_s == plain.forward_s


def test_selective_recomputation_writes_and_reads_once_more_what_it_does_not_keep():
    plain, again = (
        build(launch_config(parallel={"recompute": mode}, device=FREE_ARITHMETIC)).schedule
        for mode in ("none", "selective")
    )
    job = job_shape(launch_config())
    seconds = 2 * sum(again_bytes(job, layer) for layer in job.model.layers) / 1e12
    assert again.backward_s[0] - plain.backward_s[0] == pytest.approx(seconds)
    assert again.forward_s == plain.forward_s


def test_tensor_parallelism_divides_the_operations_and_adds_its_waiting():
    config = launch_config(parallel={"tp": 4}, batch={"global_size": 1}, device=FREE_MEMORY)
    plan = build(config)
    compute_s = plan.step_flops / RATE / 4
    waiting_s = sum(row.time_s for row in plan.traffic if row.purpose != "gradient norm")
    total_s = plan.schedule.forward_s[0] + plan.schedule.backward_s[0]
    assert total_s == pytest.approx(compute_s + waiting_s)


def test_the_compute_format_sets_the_peak():
    fp32 = build(launch_config(device=FREE_MEMORY)).schedule
    mixed = build(launch_config(device=FREE_MEMORY, precision=MIXED)).schedule
    assert fp32.forward_s[0] == pytest.approx(4 * mixed.forward_s[0])


def test_a_transfer_is_one_message_over_the_link_between_the_stages():
    near = build(launch_config(parallel={"pp": 2})).schedule
    far = build(launch_config(parallel={"pp": 2}, cluster={"nodes": 2, "devices_per_node": 1})).schedule
    message_bytes = 32 * 64 * 4
    assert near.transfer_s == pytest.approx(1e-6 + message_bytes / 100e9)
    assert far.transfer_s == pytest.approx(1e-5 + message_bytes / 10e9)
    assert build(launch_config()).schedule.transfer_s == 0


def test_the_step_of_one_rank_is_its_work_and_its_update():
    plan = build(launch_config(batch={"global_size": 6}))
    work_s = 6 * (plan.schedule.forward_s[0] + plan.schedule.backward_s[0])
    update_s = 2 * 16 * plan.num_parameters / 1e12
    assert plan.schedule.step_s == pytest.approx(work_s + update_s)


def test_simulated_bubble_equals_the_formula_for_equal_stages_and_free_messages():
    link = launch_config().cluster.intra_node
    free = type(link)(latency_s=0.0, bandwidth_bytes_per_s=1e30)
    ends = {"vocab_size": 256, "hidden_size": 1024, "num_layers": 64, "num_heads": 8}
    config = launch_config(
        model=ends, batch={"global_size": 12}, parallel={"pp": 4}, cluster={"intra_node": free}
    )
    schedule = build(config).schedule
    assert schedule.bubble_formula == pytest.approx(3 / 15)
    assert schedule.bubble_simulated == pytest.approx(schedule.bubble_formula, abs=0.01)


def test_a_slow_gradient_exchange_shows_beyond_the_last_backward():
    slow = type(launch_config().cluster.intra_node)(latency_s=0.0, bandwidth_bytes_per_s=1e6)
    plan = build(launch_config(batch={"global_size": 2}, parallel={"dp": 2}, cluster={"intra_node": slow}))
    (exchange,) = [row for row in plan.traffic if row.purpose == "gradients"]
    one = plan.schedule.forward_s[0] + plan.schedule.backward_s[0]
    update_s = 2 * 16 * plan.num_parameters / 1e12
    # One bucket: it starts when the last backward is over, so nothing of it is hidden.
    assert exchange.count == 1
    assert plan.schedule.step_s == pytest.approx(one + exchange.time_s + update_s)


def test_buckets_hide_in_the_last_backward():
    parallel = {"dp": 2, "bucket_bytes": 20_000}
    plan = build(launch_config(batch={"global_size": 2}, parallel=parallel))
    exchange = next(row for row in plan.traffic if row.purpose == "gradients")
    one = plan.schedule.forward_s[0] + plan.schedule.backward_s[0]
    update_s = 2 * 16 * plan.num_parameters / 1e12
    exposed_s = plan.schedule.step_s - one - update_s
    backward_s = plan.schedule.backward_s[0]
    assert exposed_s == pytest.approx(max(exchange.time_s - backward_s, exchange.time_s / exchange.count))
    assert exposed_s < exchange.time_s


def test_the_trillion_parameter_run_of_narayanan_is_predicted_within_a_tenth():
    """Table 1: 163 TFLOP/s on each of 3,072 A100, recomputation counted, which is 102.6 s a step."""
    links = launch_config().cluster
    config = launch_config(
        model={"hidden_size": 25600, "num_layers": 128, "num_heads": 160, "vocab_size": 51200},
        batch={"global_size": 3072, "micro_size": 1, "seq_length": 2048},
        parallel={"tp": 8, "pp": 64, "dp": 6, "recompute": "full"},
        precision=MIXED,
        device={
            "peak_flops": {"bf16": 312e12},
            "attainable_fraction": 0.65,
            "memory_bandwidth_bytes_per_s": 2e12,
        },
        cluster={
            "nodes": 384,
            "intra_node": type(links.intra_node)(latency_s=3e-6, bandwidth_bytes_per_s=300e9),
            "inter_node": type(links.inter_node)(latency_s=6e-6, bandwidth_bytes_per_s=25e9),
        },
    )
    assert build(config).schedule.step_s == pytest.approx(102.63, rel=0.1)


SPLIT = {"pp": 2, "schedule": "zb_h1"}


def test_a_split_backward_takes_the_weight_gradients_out_of_it():
    batch = {"global_size": 4}
    whole = build(launch_config(batch=batch, parallel={"pp": 2}, device=FREE_MEMORY)).schedule
    split = build(launch_config(batch=batch, parallel=SPLIT, device=FREE_MEMORY)).schedule
    stages = job_shape(launch_config(batch=batch, parallel=SPLIT)).stages
    layer, _, head = _parts(launch_config())
    weights = [stage.num_layers * layer.weight_flops / RATE for stage in stages]
    weights[-1] += head.weight_flops / RATE
    assert split.weight_s == pytest.approx(weights)
    assert split.forward_s == whole.forward_s
    both = [b + w for b, w in zip(split.backward_s, split.weight_s, strict=True)]
    assert both == pytest.approx(whole.backward_s)
    assert (whole.splits_backward, whole.weight_s) == (False, ())
    assert split.splits_backward


def _parts(config):
    model = job_shape(config).model
    return model.layers[0], model.prologue, model.epilogue


def test_attention_without_weights_stays_in_the_input_gradient():
    layer, embedding, head = _parts(launch_config())
    seq, hidden = launch_config().batch.seq_length, launch_config().model.hidden_size
    assert layer.forward_flops - layer.weight_flops == 4 * seq * seq * there(hidden)
    assert (embedding.weight_flops, head.weight_flops) == (0, head.forward_flops)


def test_a_split_backward_hides_the_gradient_exchange_in_the_weight_gradients_alone():
    parallel = {"dp": 2, "bucket_bytes": 20_000}
    plain, split = (
        build(launch_config(batch={"global_size": 2}, parallel={**parallel, "schedule": schedule}))
        for schedule in ("1f1b", "zb_h1")
    )
    exchange = next(row for row in plain.traffic if row.purpose == "gradients")
    exposed_s = [
        max(exchange.time_s - hidden_s, exchange.time_s / exchange.count)
        for hidden_s in (plain.schedule.backward_s[0], split.schedule.weight_s[0])
    ]
    assert split.schedule.step_s - plain.schedule.step_s == pytest.approx(exposed_s[1] - exposed_s[0])
    assert exposed_s[1] > exposed_s[0]


def test_zb_h1_takes_a_shorter_step_than_1f1b():
    steps = [
        build(launch_config(batch={"global_size": 8}, parallel={"pp": 4, "schedule": schedule})).schedule
        for schedule in ("zb_h1", "1f1b", "naive")
    ]
    assert steps[0].step_s < steps[1].step_s < steps[2].step_s
    assert steps[0].bubble_formula == pytest.approx(3 / (3 * 8 + 3))


def test_adding_up_the_weight_gradients_goes_with_them_where_the_backward_is_split():
    batch, parallel = {"global_size": 4}, {"pp": 2}
    whole = build(launch_config(batch=batch, parallel=parallel, device=FREE_ARITHMETIC)).schedule
    split = build(launch_config(batch=batch, parallel=SPLIT, device=FREE_ARITHMETIC)).schedule
    both = [b + w for b, w in zip(split.backward_s, split.weight_s, strict=True)]
    assert both == pytest.approx(whole.backward_s)
    assert min(split.weight_s) > 0
