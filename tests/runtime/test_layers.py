"""Whole layers against torch's own functions."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from launcher.runtime.api import IGNORE_INDEX, slice_of
from launcher.runtime.model.layers import Layers
from tests.helpers.contexts import CPU, WHOLE


@pytest.fixture
def layers() -> Layers:
    return Layers(CPU, torch.float32, WHOLE)


def filled(module: nn.Module) -> nn.Module:
    for param in module.parameters():
        nn.init.normal_(param)
    return module


def test_column_gives_one_output_per_name(layers: Layers) -> None:
    module = filled(layers.column("layers.0.attention", 4, {"q": 6, "k": 2}, bias=True))
    x = torch.randn(2, 3, 4)
    q, k = module(x)
    q_weight, q_bias, k_weight, k_bias = module.parameters()
    assert torch.equal(q, functional.linear(x, q_weight, q_bias))
    assert torch.equal(k, functional.linear(x, k_weight, k_bias))


def test_parameters_are_named_after_their_output(layers: Layers) -> None:
    module = layers.column("layers.0.attention", 4, {"q": 6, "k": 2}, bias=True)
    assert [(slice_of(p).name, slice_of(p).shape) for p in module.parameters()] == [
        ("layers.0.attention.q.weight", (6, 4)),
        ("layers.0.attention.q.bias", (6,)),
        ("layers.0.attention.k.weight", (2, 4)),
        ("layers.0.attention.k.bias", (2,)),
    ]


def test_a_whole_parameter_is_not_sharded_and_begins_at_zero(layers: Layers) -> None:
    (param,) = layers.row("out", 4, 3, bias=False).parameters()
    where = slice_of(param)
    assert (where.offset, where.is_sharded, where.is_summed_over_tp) == ((0, 0), False, False)


def test_head_sums_the_cross_entropies_and_skips_ignored_targets(layers: Layers) -> None:
    head = filled(layers.head("head", 5, 4, None))
    hidden, targets = torch.randn(2, 3, 4), torch.tensor([[0, 4, 2], [1, IGNORE_INDEX, 3]])
    logits = hidden @ next(head.parameters()).T
    log_probabilities = logits.log_softmax(-1)
    known = [(b, s) for b in range(2) for s in range(3) if targets[b, s] != IGNORE_INDEX]
    expected = -sum(log_probabilities[b, s, targets[b, s]] for b, s in known)
    torch.testing.assert_close(head(hidden, targets), expected)


def test_a_tied_head_holds_the_very_same_parameter(layers: Layers) -> None:
    (weight,) = layers.embedding("embedding", 5, 4).parameters()
    (shared,) = layers.head("embedding", 5, 4, weight).parameters()
    assert shared is weight


def test_bf16_layers_give_an_fp32_loss() -> None:
    layers = Layers(CPU, torch.bfloat16, WHOLE)
    head = filled(layers.head("head", 5, 4, None))
    loss = head(torch.randn(1, 2, 4).bfloat16(), torch.tensor([[1, 2]]))
    assert loss.dtype == torch.float32


def test_positions_are_the_whole_sequence(layers: Layers) -> None:
    assert layers.positions(7) == slice(0, 7)
