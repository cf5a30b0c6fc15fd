"""What costs little is computed again, once for all who ask, and let go when its backward is done."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from launcher.runtime.model.selective_recompute import (
    checkpoint_without_output,
    discarding_output,
    in_backward,
)

INPUT = torch.arange(6, dtype=torch.float64).reshape(2, 3) / 5
WEIGHTS = [torch.full((4, 3), 0.25, dtype=torch.float64), torch.eye(3, dtype=torch.float64)]


class Counted:
    """tanh, counting its calls and remembering what it made."""

    def __init__(self, later: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        self.later = later
        self.made: list[weakref.ref[Tensor]] = []

    def __call__(self, x: Tensor) -> Tensor:
        out = self.later(x) if self.made else torch.tanh(x)
        self.made.append(weakref.ref(out))
        return out


def loss_of(function: Callable[[Tensor], Tensor], x: Tensor, weights: list[Tensor]) -> Tensor:
    y = checkpoint_without_output(function, x)
    with discarding_output(y):
        products = [torch.nn.functional.linear(y, weight) for weight in weights]
    return torch.stack([product.square().sum() for product in products]).sum()


def gradients(function: Callable[[Tensor], Tensor] | None) -> list[Tensor]:
    x, *weights = (tensor.clone().requires_grad_() for tensor in (INPUT, *WEIGHTS))
    if function is None:
        y = torch.tanh(x)
        loss = torch.stack([(y @ weight.T).square().sum() for weight in weights]).sum()
    else:
        loss = loss_of(function, x, weights)
    return list(torch.autograd.grad(loss, [x, *weights]))


def test_gradients_are_those_of_what_is_kept() -> None:
    for found, expected in zip(gradients(torch.tanh), gradients(None), strict=True):
        assert torch.allclose(found, expected, rtol=1e-12, atol=0)


def test_a_product_with_the_transpose_has_the_gradients_of_what_is_kept() -> None:
    found = []
    for make in (checkpoint_without_output, lambda function, x: function(x)):
        x, weight = INPUT.clone().requires_grad_(), INPUT.clone().requires_grad_()
        y = make(torch.tanh, x)
        with discarding_output(y):
            loss = (y.T @ weight).square().sum()
        found.append(torch.autograd.grad(loss, [x, weight]))
    for ours, expected in zip(*found, strict=True):
        assert torch.allclose(ours, expected, rtol=1e-12, atol=0)


def test_a_function_that_gives_something_else_the_second_time_shows_in_every_gradient() -> None:
    for found, expected in zip(gradients(Counted(torch.sin)), gradients(None), strict=True):
        assert not torch.allclose(found, expected, rtol=1e-3)


def test_it_is_computed_once_more_for_all_who_ask() -> None:
    function = Counted()
    gradients(function)
    assert len(function.made) == 2


def test_neither_result_outlives_its_use() -> None:
    function, x = Counted(), INPUT.clone().requires_grad_()
    loss = loss_of(function, x, [weight.clone().requires_grad_() for weight in WEIGHTS])
    gc.disable()  # no cycle may keep it until somebody looks for cycles
    try:
        assert [made() for made in function.made] == [None]
        loss.backward()
        assert [made() for made in function.made] == [None, None]
    finally:
        gc.enable()


def test_nothing_is_remembered_where_no_backward_will_follow() -> None:
    with torch.no_grad():
        y = checkpoint_without_output(torch.tanh, INPUT)
    assert torch.equal(in_backward(y)(), y)
    assert not hasattr(y, "again")


def test_a_tensor_that_is_not_light_is_kept_as_always() -> None:
    x = INPUT.clone().requires_grad_()
    y = torch.tanh(x)
    with discarding_output(y):
        loss = torch.nn.functional.linear(y, WEIGHTS[0]).sum()
    loss.backward()
    assert x.grad is not None
