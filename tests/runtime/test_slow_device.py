"""The model of a known device computes what a linear layer does, and takes the time that it is told."""

from __future__ import annotations

import time

import torch
from torch.nn import functional

from launcher.runtime.slow_device import Points, SlowLinear, build


def test_it_computes_a_product_and_its_gradients() -> None:
    layer, hidden = SlowLinear(4, flops_per_s=1e12), torch.randn(2, 3, 4, requires_grad=True)
    expected = functional.linear(hidden, layer.weight).square().sum()
    grads = torch.autograd.grad(expected, (hidden, layer.weight))
    found = layer(hidden).square().sum()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, (hidden, layer.weight)), grads)


def test_the_backward_takes_twice_the_time_of_its_operations() -> None:
    layer, hidden = SlowLinear(4, flops_per_s=2 * 2 * 4 * 4 / 0.02), torch.randn(2, 4)
    start = time.perf_counter()
    out = layer(hidden)
    middle = time.perf_counter()
    out.sum().backward()
    assert middle - start >= 0.02
    assert time.perf_counter() - middle >= 0.04


def test_its_data_goes_through_its_layers() -> None:
    model, (point, target) = build(num_layers=2, width=8, flops_per_s=1e12), Points(width=8, rows=4)[3]
    out = point[None]
    for layer in model.layers:
        out = layer(out)
    assert model.loss(out, target[None]).shape == ()
