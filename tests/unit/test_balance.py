"""Layers over stages by their predicted time, against every split there is and on real models."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from launcher.base.errors import PlanError
from launcher.contract.model.shape import LayerShape, ModelShape
from launcher.plan.build import build
from launcher.plan.checked_job import PlanInputs
from launcher.plan.layout.balance import balanced_split, layer_costs, stage_sums
from launcher.plan.layout.partition import split_layers
from launcher.plan.plugins import choose
from tests.helpers.configs import GPT2, LLAMA3_8B, MIXED, job_shape, launch_config
from tests.helpers.objects import there


def least_possible(costs, num_stages):
    """The smallest slowest stage over every way to cut."""
    inner = combinations(range(1, len(costs)), num_stages - 1)
    splits = ([end - start for start, end in pairwise((0, *cuts, len(costs)))] for cuts in inner)
    return min(max(stage_sums(costs, counts)) for counts in splits)


@pytest.mark.parametrize("kind", ["few_sizes", "any_size", "large_ends"])
def test_no_split_has_a_faster_slowest_stage(kind):
    chance = random.Random(kind)
    for _ in range(300):
        num_layers = chance.randint(1, 9)
        costs = [
            chance.choice([0, 1, 2, 5]) if kind == "few_sizes" else chance.random() for _ in range(num_layers)
        ]
        if kind == "large_ends":
            costs[0] += 2
            costs[-1] += 5
        for num_stages in range(1, num_layers + 1):
            counts = balanced_split(costs, num_stages)
            assert len(counts) == num_stages
            assert min(counts) >= 1
            assert sum(counts) == num_layers
            assert max(stage_sums(costs, counts)) == pytest.approx(least_possible(costs, num_stages))


@pytest.mark.parametrize(("num_layers", "num_stages"), [(12, 4), (80, 16), (7, 7), (5, 1)])
def test_equal_layers_that_can_be_split_evenly_are(num_layers, num_stages):
    assert balanced_split([0.1] * num_layers, num_stages) == split_layers(num_layers, num_stages)


def test_a_layer_costs_its_forward_and_backward_and_the_ends_are_with_the_outer_ones():
    config = launch_config(model=GPT2, parallel={"pp": 2}, device={"memory_bandwidth_bytes_per_s": 1e30})
    job = job_shape(config)
    costs = layer_costs(job, choose(job.config).parallels)
    rate = 1e12 * 0.5
    assert costs[1] == pytest.approx(3 * job.model.layers[0].forward_flops / rate)
    assert costs[-1] - costs[1] == pytest.approx(3 * there(job.model.epilogue).forward_flops / rate)
    assert len(costs) == 12


def test_layer_costs_count_what_tensor_ranks_wait_for():
    parallel = {"pp": 2, "tp": 2}
    job = job_shape(launch_config(model=GPT2, parallel=parallel))
    plan = build(launch_config(model=GPT2, parallel={**parallel, "layers_per_stage": (6, 6)}))
    costs = layer_costs(job, choose(job.config).parallels)
    both = zip(plan.schedule.forward_s, plan.schedule.backward_s, strict=True)
    assert stage_sums(costs, (6, 6)) == pytest.approx([sum(times) for times in both])


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_large_vocabulary_takes_layers_from_the_last_stage(num_chunks):
    """Llama 3 8B: its head is as long as two layers, so that even stages leave the last one slowest."""
    schedule = "1f1b" if num_chunks == 1 else "interleaved_1f1b"
    plans = {
        how: build(
            launch_config(
                model=LLAMA3_8B,
                precision=MIXED,
                batch={"global_size": 64, "seq_length": 8192},
                parallel={
                    "pp": 8,
                    "num_chunks": num_chunks,
                    "schedule": schedule,
                    "recompute": "full",
                    "layers_per_stage": how,
                },
            )
        )
        for how in ("even", "auto")
    }
    even, auto = plans["even"], plans["auto"]
    assert auto.stages[-1].num_layers < even.stages[-1].num_layers
    assert auto.schedule.bubble_simulated < even.schedule.bubble_simulated - 0.01
    assert auto.schedule.step_s < even.schedule.step_s


def test_the_plan_holds_the_split_and_says_what_it_gains():
    plan = build(launch_config(model=GPT2, parallel={"pp": 4, "layers_per_stage": "auto"}))
    counts = tuple(stage.num_layers for stage in plan.stages)
    assert plan.config.parallel.layers_per_stage == counts
    (note,) = [note for note in plan.notes if note.startswith("Layers are split by predicted time")]
    slowest = max(map(sum, zip(plan.schedule.forward_s, plan.schedule.backward_s, strict=True)))
    assert f"the slowest stage takes {slowest * 1e3:.3g} ms" in note
    assert type(plan).from_json(plan.to_json()) == plan


def test_a_model_of_ones_own_is_balanced_by_its_measured_layers():
    def layer(flops):
        return LayerShape(
            name="own",
            num_parameters=1,
            num_replicated_parameters=0,
            forward_flops=flops,
            kept_elements=1,
            kept_replicated_elements=0,
            output_elements=1,
            output_shape=(1,),
        )

    layers = tuple(layer(1e9 * size) for size in (6, 1, 1, 1, 1, 2))
    shape = ModelShape(family="custom", layers=layers, prologue=None, epilogue=None, num_tied_parameters=0)
    sizes = dict.fromkeys(("num_layers", "hidden_size", "num_heads", "vocab_size"))
    config = launch_config(
        model={**sizes, "family": "custom", "target": "mine:build"},
        parallel={"pp": 2, "layers_per_stage": "auto"},
    )
    plan = build(config, inputs=PlanInputs(shape=shape))
    assert [stage.num_layers for stage in plan.stages] == [1, 5]


def test_layers_are_not_timed_on_a_device_that_has_no_peak_for_them():
    config = launch_config(
        precision=MIXED, device={"peak_flops": {"fp32": 1e12}}, parallel={"pp": 2, "layers_per_stage": "auto"}
    )
    with pytest.raises(PlanError, match=r"precision\.compute=bf16: box states no peak"):
        build(config)
