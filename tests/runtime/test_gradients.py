"""Gradients accumulate in flat buckets, and each bucket is exchanged once, while the backward runs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from launcher.runtime.train.gradient_buckets import GradientBuckets


class Recorder:
    """Counts exchanges, and notes how many gradients were still missing when each began."""

    def __init__(self) -> None:
        self.started: list[Tensor] = []
        self.num_waited = 0

    def __call__(self, bucket: Tensor) -> Recorder:
        self.started.append(bucket.clone())
        return self

    def wait(self) -> None:
        self.num_waited += 1


def weight_of(layer: nn.Module) -> nn.Parameter:
    (weight,) = layer.parameters()
    return weight


def two_layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).to(dtype)


def buckets_of(
    chunk: nn.Module, recorder: Recorder | None, *, bucket_bytes: int = 64, dtype: torch.dtype = torch.float32
) -> GradientBuckets:
    buckets = GradientBuckets(dtype=dtype, bucket_bytes=bucket_bytes, exchange=recorder)
    buckets.add_chunk(chunk)
    return buckets


def test_microbatches_add_up_to_the_gradient_of_their_sum() -> None:
    chunk, x = two_layers(), torch.ones(3, 4)
    expected = torch.autograd.grad(chunk(x).sum() * 2, list(chunk.parameters()))
    buckets = buckets_of(chunk, None)
    for last in (False, True):
        buckets.backward(chunk(x).sum(), None, chunk=0, last=last)
    for param, gradient in zip(chunk.parameters(), expected, strict=True):
        torch.testing.assert_close(buckets.view(param), gradient)


def test_only_the_last_backward_exchanges_and_each_bucket_once() -> None:
    chunk, recorder = two_layers(), Recorder()
    buckets = buckets_of(chunk, recorder)
    buckets.backward(chunk(torch.ones(1, 4)).sum(), None, chunk=0, last=False)
    assert recorder.started == []
    buckets.backward(chunk(torch.ones(1, 4)).sum(), None, chunk=0, last=True)
    assert len(recorder.started) == 2
    buckets.wait()
    assert recorder.num_waited == 2


def test_the_last_layers_bucket_starts_before_the_first_layer_has_its_gradient() -> None:
    chunk, recorder, first_gradient = two_layers(), Recorder(), []
    buckets = buckets_of(chunk, recorder)
    weight_of(chunk[0]).register_hook(lambda _: first_gradient.append(len(recorder.started)))
    buckets.backward(chunk(torch.ones(1, 4)).sum(), None, chunk=0, last=True)
    assert first_gradient == [1]
    torch.testing.assert_close(recorder.started[0].view(4, 4), buckets.view(weight_of(chunk[1])))


def test_buckets_are_exchanged_in_one_order_whatever_order_they_fill_in() -> None:
    chunk, recorder = two_layers(), Recorder()
    buckets = buckets_of(chunk, recorder)
    first, second = chunk
    x = torch.ones(1, 4)
    buckets.backward(first(second(x)).sum(), None, chunk=0, last=True)  # the other way through
    assert len(recorder.started) == 2
    torch.testing.assert_close(recorder.started[0].view(4, 4), buckets.view(weight_of(second)))


def test_a_stage_without_parameters_has_nothing_to_compute() -> None:
    buckets = buckets_of(nn.Flatten(), Recorder())
    buckets.backward(None, torch.ones(1, 4), chunk=0, last=True)
    buckets.wait()


def test_a_parameter_without_a_gradient_does_not_hold_back_its_bucket() -> None:
    chunk, recorder = two_layers(), Recorder()
    buckets = buckets_of(chunk, recorder, bucket_bytes=1 << 20)
    buckets.backward(chunk[0](torch.ones(1, 4)).sum(), None, chunk=0, last=True)
    assert len(recorder.started) == 1


def test_a_parameter_of_two_chunks_is_exchanged_with_the_first() -> None:
    shared, recorder = nn.Linear(4, 4, bias=False), Recorder()
    buckets = GradientBuckets(dtype=torch.float32, bucket_bytes=64, exchange=recorder)
    for chunk in (nn.Sequential(shared), nn.Sequential(shared)):
        buckets.add_chunk(chunk)
    buckets.backward(shared(torch.ones(1, 4)).sum(), None, chunk=1, last=True)
    assert recorder.started == []
    buckets.backward(shared(torch.ones(1, 4)).sum(), None, chunk=0, last=True)
    torch.testing.assert_close(recorder.started[0].view(4, 4), torch.full((4, 4), 2.0))


def test_gradients_of_bf16_weights_accumulate_in_fp32() -> None:
    chunk = two_layers(torch.bfloat16)
    buckets = buckets_of(chunk, None, dtype=torch.float32)
    small, big = torch.full((1, 4), 2.0**-9, dtype=torch.bfloat16), torch.ones(1, 4, dtype=torch.bfloat16)
    for x in (big, small):
        buckets.backward(chunk[1](x).sum(), None, chunk=0, last=False)
    assert buckets.view(weight_of(chunk[1]))[0, 0] == 1 + 2.0**-9  # bf16 would have rounded it away
    assert chunk[1].weight.grad is None


def test_clearing_sets_the_gradients_to_zero_in_place() -> None:
    chunk = two_layers()
    buckets = buckets_of(chunk, None)
    buckets.backward(chunk(torch.ones(1, 4)).sum(), None, chunk=0, last=True)
    buckets.clear()
    assert not buckets.view(weight_of(chunk[0])).any()
    gradient = weight_of(chunk[0]).grad
    assert gradient is not None
    assert gradient.data_ptr() == buckets.view(weight_of(chunk[0])).data_ptr()
