"""Which layers each stage holds, and which splits are refused."""

from __future__ import annotations

import pytest

from launcher.contract.actions import PipelineShape
from launcher.plan.cost.shapes import model_shape, resolve_model
from launcher.plan.layout.partition import layer_faults, make_stages, split_layers
from launcher.typed.read import Source
from tests.helpers.configs import launch_config


def shape(num_layers):
    model = resolve_model(launch_config(model={"num_layers": num_layers}).model)
    return model_shape(model, seq_length=32, has_fused_norm=True)


def text(num_layers, pp, num_chunks=1, layers_per_stage="even"):
    pipeline = PipelineShape(num_pp_ranks=pp, num_chunks=num_chunks)
    return [str(fault) for fault in layer_faults(num_layers, pipeline, layers_per_stage)]


@pytest.mark.parametrize("num_layers", [1, 7, 30, 80])
@pytest.mark.parametrize("num_stages", [1, 3, 7])
def test_a_split_holds_every_layer_and_differs_by_at_most_one(num_layers, num_stages):
    counts = split_layers(num_layers, num_stages)
    assert sum(counts) == num_layers
    assert max(counts) - min(counts) <= 1


def test_layers_that_pp_does_not_divide_are_refused_with_what_would_fit():
    assert text(16, pp=3) == [
        "parallel.pp=3: the model has 16 layers and 1 chunk per rank, so pp must divide 16 (1, 2, 4, 8, 16). "
        "Set parallel.pp=4 or 2 or 1 or 8, or parallel.layers_per_stage=auto, or parallel.num_chunks=1."
    ]


def test_interleaving_proposes_another_pp_or_another_number_of_chunks():
    (fault,) = text(80, pp=16, num_chunks=2)
    rule, ways = fault.split(" Set ")
    assert rule.startswith("parallel.pp=16: the model has 80 layers and 2 chunks per rank, so pp * 2 = 32 ")
    assert ways == (
        "parallel.pp=20 or 10 or 8 or 5, or parallel.layers_per_stage=auto, or parallel.num_chunks=1 or 5."
    )


def test_chunks_that_no_pp_divides_are_refused():
    (fault,) = text(40, pp=2, num_chunks=12)
    assert "pp * 12 = 24 must divide 40." in fault
    assert "parallel.num_chunks=10 or 5 or 20 or 4" in fault


@pytest.mark.parametrize("how", ["even", "auto"])
def test_more_stages_than_layers_leave_only_fewer_stages(how):
    (fault,) = layer_faults(2, PipelineShape(num_pp_ranks=4), how)
    assert {"parallel.pp": 2} in fault.ways
    assert not any("parallel.layers_per_stage" in way for way in fault.ways)


def test_a_split_by_time_needs_a_layer_for_every_stage():
    assert text(8, pp=3, layers_per_stage="auto") == []
    (fault,) = text(5, pp=3, num_chunks=2, layers_per_stage="auto")
    assert fault.startswith(
        "parallel.pp=3: the model has 5 layers, and each of pp * num_chunks = 3 * 2 = 6 stages needs one."
    )


def test_a_list_that_does_not_sum_to_the_layers_is_refused():
    (fault,) = text(20, pp=1, layers_per_stage=(1,))
    assert fault.startswith(
        "parallel.layers_per_stage=[1]: the stages hold 1 layer, the model has 20. "
        "Set parallel.layers_per_stage=even"
    )
    assert "the stages hold 2 + 3 = 5 layers, the model has 20" in text(20, pp=2, layers_per_stage=(2, 3))[0]


def test_an_empty_list_says_so_in_words():
    length, total = text(4, pp=2, layers_per_stage=())
    assert "needs one number for each of pp * num_chunks = 2 * 1 = 2 stages, has 0" in length
    assert "the stages hold 0 layers, the model has 4" in total


def test_a_stage_of_less_than_no_layer_is_refused_alike():
    (fault,) = text(4, pp=2, layers_per_stage=(5, -1))
    assert "stage 1 would hold no layer" in fault


def test_an_empty_stage_is_refused():
    (fault,) = text(8, pp=3, layers_per_stage=(4, 0, 4))
    assert fault.startswith(
        "parallel.layers_per_stage=[4,0,4]: stage 1 would hold no layer. Set parallel.layers_per_stage=auto"
    )


def test_a_list_of_the_wrong_length_is_refused():
    (fault,) = text(8, pp=2, num_chunks=2, layers_per_stage=(4, 4))
    assert "one number for each of pp * num_chunks = 2 * 2 = 4 stages, has 2" in fault
    assert "Set parallel.layers_per_stage=even, or parallel.pp=1, or parallel.num_chunks=1" in fault


def test_a_split_is_told_as_one_of_the_setting_that_was_typed():
    pipeline = PipelineShape(num_pp_ranks=3)
    sources = {"model.num_layers": Source(where="override model.num_layers=16")}
    (fault,) = layer_faults(16, pipeline, "even", sources)
    assert (fault.path, fault.given) == ("model.num_layers", 16)
    assert layer_faults(16, pipeline, "even")[0].path == "parallel.pp"


def test_stages_cover_the_layers_in_order_with_the_ends_on_the_first_and_the_last():
    pipeline = PipelineShape(num_pp_ranks=2, num_chunks=2)
    stages = make_stages(shape(7), pipeline, (1, 3, 2, 1))
    assert [index for stage in stages for index in stage.layers] == list(range(7))
    assert [(stage.pp_rank, stage.chunk) for stage in stages] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [stage.has_prologue for stage in stages] == [True, False, False, False]
    assert [stage.has_epilogue for stage in stages] == [False, False, False, True]
    assert [stage.input_shape for stage in stages] == [(), (32, 64), (32, 64), (32, 64)]
