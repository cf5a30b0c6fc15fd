"""The transformer: its parts against formulas, its stages against the whole."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from launcher.contract.config import LaunchConfig
from launcher.contract.model.sizes import Sizes
from launcher.plan.cost.shapes import model_shape
from launcher.runtime.api import slice_of
from launcher.runtime.data.microbatches import Microbatch
from launcher.runtime.model.blocks import Block, Norm, Rotary
from launcher.runtime.model.build import build_chunks
from tests.helpers.contexts import CPU, make_config, make_context
from tests.helpers.plans import staged_plan

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt", "max_position_embeddings": 9},
    "llama": {"family": "llama", "num_kv_heads": 2, "ffn_size": 24, "head_dim": 6},
}
BATCH = Microbatch(
    inputs=torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]),
    targets=torch.tensor([[2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13]]),
    samples=torch.tensor([0, 1]),
    num_targets=12,
    step=0,
)


def build(config: LaunchConfig, layers_per_stage: list[int] | None = None) -> list[nn.Module]:
    """The chunks of all pipeline ranks, in stage order."""
    plan = staged_plan(config, layers_per_stage)
    chunks: dict[int, nn.Module] = {}
    for rank in range(config.parallel.pp):
        ctx = make_context(plan, rank)
        chunks |= dict(zip((stage.stage for stage in ctx.plan.stages), build_chunks(ctx), strict=True))
    return [chunks[stage] for stage in sorted(chunks)]


def run(chunks: list[nn.Module], batch: Microbatch = BATCH) -> Tensor:
    hidden = None
    for chunk in chunks:
        hidden = chunk(hidden, batch)
    assert hidden is not None
    return hidden


def gradients(chunks: list[nn.Module]) -> dict[str, Tensor]:
    """By global name; the copies of a tied parameter summed."""
    found: dict[str, Tensor] = {}
    for param in {param: None for chunk in chunks for param in chunk.parameters()}:
        assert param.grad is not None
        name = slice_of(param).name
        found[name] = found[name] + param.grad if name in found else param.grad
    return found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_as_many_as_planned(family: str, tied: bool) -> None:
    model = FAMILIES[family] | {"tied_embeddings": tied, "num_layers": 3}
    (chunk,) = build(make_config(model=model))
    resolved = {"num_kv_heads": model.get("num_kv_heads", 4), "ffn_size": model.get("ffn_size", 64)}
    planned = model_shape(make_config(model=model | resolved).model, seq_length=6, has_fused_norm=True)
    assert sum(param.numel() for param in chunk.parameters()) == planned.num_parameters


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("pp", "num_chunks", "layers"), [(2, 1, [1, 3]), (2, 2, [2, 1, 1, 0]), (4, 1, [1] * 4)]
)
def test_stages_in_a_row_equal_the_whole(
    family: str, tied: bool, pp: int, num_chunks: int, layers: list[int]
) -> None:
    model = FAMILIES[family] | {"tied_embeddings": tied, "num_layers": 4, "dropout": 0.1}
    whole = build(make_config(model=model))
    parts = build(make_config(model=model, parallel={"pp": pp, "num_chunks": num_chunks}), layers)
    expected, found = run(whole), run(parts)
    expected.backward()
    found.backward()
    torch.testing.assert_close(found, expected)
    reference, split = gradients(whole), gradients(parts)
    assert split.keys() == reference.keys()
    for name in reference:
        torch.testing.assert_close(split[name], reference[name], msg=name)


def test_a_missing_layer_is_noticed() -> None:
    model = {"num_layers": 4}
    parts = build(make_config(model=model, parallel={"pp": 2}), [1, 2])
    whole = build(make_config(model=model))
    assert not torch.allclose(run(parts), run(whole))


def test_tied_stages_on_one_rank_share_one_parameter() -> None:
    (chunk,) = build(make_config())
    names = [slice_of(param).name for param in chunk.parameters()]
    assert names.count("embedding.weight") == 1
    assert "head.weight" not in names


def test_tied_stages_on_two_ranks_hold_equal_copies_that_know_it() -> None:
    first, last = build(make_config(parallel={"pp": 2}), [1, 1])
    one, two = (
        next(param for param in chunk.parameters() if slice_of(param).name == "embedding.weight")
        for chunk in (first, last)
    )
    assert torch.equal(one, two)
    assert (slice_of(one).is_tied, slice_of(one).is_tied_copy) == (True, False)
    assert (slice_of(two).is_tied, slice_of(two).is_tied_copy) == (True, True)


def test_every_parameter_says_which_global_tensor_it_is() -> None:
    (chunk,) = build(make_config(model={"num_layers": 1}))
    assert {slice_of(param).name for param in chunk.parameters() if param.dim() == 2} == {
        "embedding.weight",
        "positions.weight",
        *(f"layers.0.attention.{part}.weight" for part in ("q", "k", "v", "out")),
        "layers.0.mlp.up.weight",
        "layers.0.mlp.down.weight",
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_later_token_changes_no_earlier_loss(family: str) -> None:
    chunks = build(make_config(model=FAMILIES[family]))
    changed = BATCH.inputs.clone()
    changed[:, 4] = 30
    first = BATCH.targets.clone()
    first[:, 4:] = -100
    loss = run(chunks, replace(BATCH, targets=first))
    assert torch.equal(loss, run(chunks, replace(BATCH, targets=first, inputs=changed)))
    assert not torch.equal(run(chunks), run(chunks, replace(BATCH, inputs=changed)))


def test_small_initial_weights_give_a_loss_of_log_vocabulary() -> None:
    chunks = build(make_config(model={"init_std": 1e-4}))
    assert run(chunks).item() / 12 == pytest.approx(log(37), rel=1e-3)


def test_residual_outputs_begin_smaller() -> None:
    (chunk,) = build(make_config(model={"hidden_size": 64, "num_layers": 8, "init_std": 0.02}))
    deviations = {slice_of(param).name: param.std().item() for param in chunk.parameters() if param.dim() > 1}
    assert deviations["layers.3.mlp.up.weight"] == pytest.approx(0.02, rel=0.05)
    assert deviations["layers.3.mlp.down.weight"] == pytest.approx(0.005, rel=0.05)
    assert deviations["layers.3.attention.out.weight"] == pytest.approx(0.005, rel=0.05)


def test_dropout_depends_on_the_step_and_is_off_in_evaluation() -> None:
    chunks = build(make_config(model={"dropout": 0.3}))
    plain = build(make_config())
    assert not torch.equal(run(chunks), run(plain))
    assert torch.equal(run(chunks), run(chunks))
    assert not torch.equal(run(chunks), run(chunks, replace(BATCH, step=1)))
    chunks[0].eval()
    assert torch.equal(run(chunks), run(plain))


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_of_a_sample_does_not_depend_on_its_microbatch(family: str) -> None:
    chunks = build(make_config(model=FAMILIES[family] | {"dropout": 0.3}))
    rows = [
        replace(
            BATCH,
            inputs=BATCH.inputs[n : n + 1],
            targets=BATCH.targets[n : n + 1],
            samples=BATCH.samples[n : n + 1],
        )
        for n in range(2)
    ]
    torch.testing.assert_close(run(chunks, rows[0]) + run(chunks, rows[1]), run(chunks))


def kept_elements(chunks: list[nn.Module]) -> int:
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        run(chunks)
    return sum(tensor.numel() for tensor in kept.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("recompute", "share"), [("selective", 0.95), ("full", 1 / 3)])
def test_recomputation_changes_no_gradient_and_keeps_less(family: str, recompute: str, share: float) -> None:
    model = FAMILIES[family] | {"dropout": 0.2, "num_layers": 6}
    plain = build(make_config(model=model))
    again = build(make_config(model=model, parallel={"recompute": recompute}))
    losses = [run(plain), run(again)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    reference, found = gradients(plain), gradients(again)
    for name in reference:  # some are summed in another order
        assert (found[name] - reference[name]).abs().max() <= 2e-6 * reference[name].abs().max(), name
    assert kept_elements(again) < kept_elements(plain) * share


def test_recomputation_runs_every_block_twice() -> None:
    calls: list[Any] = []
    (chunk,) = build(make_config(parallel={"recompute": "full"}))
    for block in chunk.modules():
        if isinstance(block, Block):
            block.attention.register_forward_hook(lambda *arguments: calls.append(1))
    run([chunk]).backward()
    assert len(calls) == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_has_bf16_parameters_and_a_near_fp32_loss(family: str) -> None:
    exact = build(make_config(model=FAMILIES[family]))
    (chunk,) = build(make_config(model=FAMILIES[family], precision={"compute": "bf16"}))
    assert {param.dtype for param in chunk.parameters()} == {torch.bfloat16}
    loss = run([chunk])
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(run(exact).item(), rel=0.02)


def test_layer_norm_and_rms_norm_follow_their_formulas() -> None:
    x = torch.randn(3, 16)
    for family in FAMILIES:
        norm = Norm(make_context(staged_plan(make_config(model={"family": family}))), "norm", 16)
        for param in norm.parameters():
            nn.init.normal_(param)
        if norm.bias is None:
            expected = norm.weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        else:
            centred = x - x.mean(-1, keepdim=True)
            scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
            expected = norm.weight * scaled + norm.bias
        torch.testing.assert_close(norm(x), expected)


def test_rotary_scores_depend_on_the_distance_only() -> None:
    config = make_config(batch={"seq_length": 10})
    sizes = Sizes.of(config.model, 10)
    rotary = Rotary(config.model, sizes, CPU)
    q, k = torch.randn(2, 1, 1, 1, sizes.head).expand(2, 1, 1, 10, sizes.head)
    scores = (rotary(q) @ rotary(k).transpose(-1, -2))[0, 0]
    for distance in range(-9, 10):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert not torch.allclose(scores.diagonal(0)[:1], scores.diagonal(1)[:1])


def test_grouped_heads_equal_repeated_ones() -> None:
    """A model whose key and value heads are shared computes what one with equal heads computes."""
    shared = build(make_config(model=FAMILIES["llama"]))
    full = build(make_config(model=FAMILIES["llama"] | {"num_kv_heads": 4}))
    parts = {slice_of(param).name: param for param in shared[0].parameters()}
    for param in full[0].parameters():
        source = parts[slice_of(param).name].detach()
        if source.shape != param.shape:
            source = source.unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten(0, 1)
        with torch.no_grad():
            param.copy_(source)
    torch.testing.assert_close(run(full), run(shared))
