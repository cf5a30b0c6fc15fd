"""A user's own list of layers: split, equal to the whole, measured, and refused where it cannot be."""

from __future__ import annotations

import importlib
import io
import json
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.app.user_model import request_of
from launcher.base.errors import ConfigError
from launcher.contract.config import LaunchConfig
from launcher.contract.model.shape import Measured
from launcher.runtime.api import slice_of
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.model.build import build_chunks
from launcher.runtime.process import measure
from launcher.typed.read import Reading, read
from tests.helpers.contexts import make_config, make_context
from tests.helpers.plans import staged_plan

pytestmark = pytest.mark.usefixtures("user_models")

CNN = {"family": "custom", "target": "digits_cnn:build", "options": {"channels": 4}}
DIGITS = {"target": "digits_cnn:Digits"}


def cnn(**sections: Any) -> LaunchConfig:
    model = CNN | sections.pop("model", {})
    return make_config(model=model, data=DIGITS, batch={"micro_size": 6, "seq_length": 1}, **sections)


def build(config: LaunchConfig, layers_per_stage: list[int]) -> list[nn.Module]:
    plan = staged_plan(config, layers_per_stage)
    ranks = range(config.parallel.pp)
    return [chunk for rank in ranks for chunk in build_chunks(make_context(plan, rank))]


def loss_and_gradients(config: LaunchConfig, layers_per_stage: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    chunks = build(config, layers_per_stage)
    whole = replace(config, parallel=replace(config.parallel, pp=1))  # its rank reads inputs and targets
    (batch,) = next(Loader(make_context(staged_plan(whole, [sum(layers_per_stage)]))).steps(0))
    hidden = None
    for chunk in chunks:
        hidden = chunk(hidden, batch)
    assert hidden is not None
    hidden.backward()
    params = [param for chunk in chunks for param in chunk.parameters()]
    return hidden.detach(), {slice_of(param).name: param.grad for param in params if param.grad is not None}


@pytest.mark.parametrize("layers", [[2, 2], [1, 3], [1, 1, 1, 1]])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_stages_of_a_users_model_equal_the_whole(layers: list[int], recompute: str) -> None:
    expected, reference = loss_and_gradients(cnn(), [4])
    found, split = loss_and_gradients(cnn(parallel={"pp": len(layers), "recompute": recompute}), layers)
    torch.testing.assert_close(found, expected)
    assert split.keys() == reference.keys()
    for name in reference:
        torch.testing.assert_close(split[name], reference[name], msg=name)


def test_initial_weights_follow_the_seed_alone() -> None:
    first, last = build(cnn(parallel={"pp": 2}), [2, 2])
    (whole,) = build(cnn(), [4])
    (other,) = build(replace(cnn(), seed=8), [4])
    split = [*first.parameters(), *last.parameters()]
    for one, two, changed in zip(split, whole.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        assert not torch.equal(one, changed)


def test_parameters_are_named_by_layer() -> None:
    _, last = build(cnn(parallel={"pp": 2}), [3, 1])
    assert [slice_of(param).name for param in last.parameters()] == ["layers.3.weight", "layers.3.bias"]
    assert [slice_of(param).shape for param in last.parameters()] == [(10, 32), (10,)]


def test_building_leaves_torchs_generator_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    build(cnn(), [4])
    assert torch.equal(torch.get_rng_state(), before)


def test_bf16_runs_and_gives_an_fp32_loss() -> None:
    loss, _ = loss_and_gradients(cnn(precision={"compute": "bf16"}), [4])
    expected, _ = loss_and_gradients(cnn(), [4])
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)


def test_the_digits_are_learnt() -> None:
    config = cnn()
    (chunk,) = build(config, [4])
    optimizer = torch.optim.AdamW(chunk.parameters(), lr=1e-2)
    losses = []
    steps = Loader(make_context(staged_plan(config, [4]))).steps(0)
    for _, (batch,) in zip(range(80), steps, strict=False):
        loss = chunk(None, batch)
        losses.append(float(loss.detach()) / 6)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert sum(losses[-20:]) / 20 < sum(losses[:10]) / 10 * 0.7


def built_by(monkeypatch: pytest.MonkeyPatch, build_model: Callable[[], Any]) -> dict[str, Any]:
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(build=build_model))
    return {"target": "mine:build", "options": {}}


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return output.sum()


REFUSED = {
    r"layer 0 \(0\) is BatchNorm2d, which mixes .*Use GroupNorm or": nn.Sequential(nn.BatchNorm2d(1)),
    r"layer 0 is Dropout\(0\.5\), which draws other numbers .*Set its probability to 0": nn.Dropout(0.5),
}


@pytest.mark.parametrize("message", REFUSED)
def test_layers_that_no_layout_could_reproduce_are_refused(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built_by(monkeypatch, lambda: SimpleNamespace(layers=[REFUSED[message]], loss=loss_of))
    with pytest.raises(ConfigError, match=rf"model\.target=mine:build: {message}"):
        build(cnn(model=model), [1])


def test_a_build_without_layers_or_loss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built_by(monkeypatch, lambda: nn.Linear(2, 2))
    with pytest.raises(
        ConfigError, match=r"must return an object with `layers`, a list or a generator, .* not Linear\. See"
    ):
        build(cnn(model=model), [1])


def test_another_number_of_layers_than_planned_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gives 4 layers here, the plan was made with 5\. Plan again"):
        build(cnn(), [5])


class OneByOne:
    """The CNN, its layers made when they are asked for, with some other use of the generator between."""

    def __init__(self) -> None:
        build_whole = importlib.import_module("digits_cnn").build

        def layers():
            torch.randn(3)
            yield from build_whole(channels=4).layers

        self.layers, self.loss = layers(), loss_of


def test_layers_made_one_by_one_have_the_weights_of_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built_by(monkeypatch, OneByOne)
    (whole,) = build(cnn(model=model), [4])
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, last = build(cnn(model=model, parallel={"pp": 2}), [1, 3])
    assert torch.equal(torch.get_rng_state(), before)
    for one, two in zip([*first.parameters(), *last.parameters()], whole.parameters(), strict=True):
        assert torch.equal(one, two)


def test_layers_of_other_stages_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[nn.Module]] = []

    def one_by_one() -> Any:
        def layers():
            for _ in range(4):
                layer = nn.Linear(2, 2)
                made.append(weakref.ref(layer))
                yield layer
                del layer

        return SimpleNamespace(layers=layers(), loss=loss_of)

    plan = staged_plan(cnn(model=built_by(monkeypatch, one_by_one), parallel={"pp": 2}), [1, 3])
    chunks = build_chunks(make_context(plan, rank=0))
    assert [layer() is not None for layer in made] == [True, False, False, False], chunks


@pytest.mark.parametrize("message", REFUSED)
def test_a_layer_that_a_generator_makes_is_judged_too(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built_by(monkeypatch, lambda: SimpleNamespace(layers=iter([REFUSED[message]]), loss=loss_of))
    with pytest.raises(ConfigError, match=message):
        build(cnn(model=model), [1])


def test_a_parameter_on_two_stages_is_refused_but_not_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = nn.Linear(2, 2)
    model = built_by(monkeypatch, lambda: SimpleNamespace(layers=[shared, nn.ReLU(), shared], loss=loss_of))
    assert len(build(cnn(model=model), [3])) == 1
    with pytest.raises(
        ConfigError, match=r"stages 0 and 1 share the parameter layers\.2\.weight\. Set parallel\.pp=1"
    ):
        build(cnn(model=model, parallel={"pp": 2}), [2, 1])


def ask(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: LaunchConfig
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(request_of(config)))
    code = measure.main(sys.stdout)
    answer = capsys.readouterr()
    return code, answer.out, answer.err


def test_the_shape_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ask(monkeypatch, capsys, cnn())
    assert code == 0
    found = read(Measured, json.loads(out), Reading())
    assert found is not None
    assert found.model is not None
    shape = found.model
    assert [layer.output_shape for layer in shape.layers] == [(4, 8, 8), (8, 4, 4), (32,), (10,)]
    assert [layer.num_parameters for layer in shape.layers] == [40, 296, 4128, 330]
    pixels = 64
    flops = [2 * pixels * 4 * 9, 2 * pixels * 8 * 4 * 9, 2 * 128 * 32, 2 * 32 * 10]
    assert [layer.forward_flops for layer in shape.layers] == flops
    assert [layer.kept_elements for layer in shape.layers] == [
        pixels + 4 * pixels,  # the image for the convolution; what the ReLU gave
        8 * pixels + 8 * 16,  # what the ReLU gave; the places of the maxima
        8 * 16 + 32,  # the maxima for the linear; what the ReLU gave
        0,  # its input is what that ReLU gave
    ]


def test_a_model_that_is_refused_says_all_that_is_wrong_as_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = ask(monkeypatch, capsys, cnn(model=built_by(monkeypatch, lambda: None)))
    (fault,) = json.loads(out)
    assert (code, err) == (1, "")
    assert (fault["path"], fault["given"]) == ("model.target", "mine:build")
    assert fault["allowed"].startswith("must return an object")


def test_every_layer_that_is_refused_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn_like(x)

    layers = [Noise(), nn.Flatten(), Noise()]
    model = built_by(monkeypatch, lambda: SimpleNamespace(layers=layers, loss=loss_of))
    code, out, _ = ask(monkeypatch, capsys, cnn(model=model))
    starts = [fault["allowed"].partition(" draws ")[0] for fault in json.loads(out)]
    assert (code, starts) == (1, ["layer 0 (Noise)", "layer 2 (Noise)"])


def test_every_kind_of_layer_that_is_refused_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = [nn.BatchNorm2d(1), nn.Dropout(0.5)]
    model = built_by(monkeypatch, lambda: SimpleNamespace(layers=layers, loss=loss_of))
    code, out, _ = ask(monkeypatch, capsys, cnn(model=model))
    assert code == 1
    assert [fault["allowed"].partition(",")[0] for fault in json.loads(out)] == [
        "layer 0 is BatchNorm2d",
        "layer 1 is Dropout(0.5)",
    ]


def test_text_gives_a_users_model_a_row_of_tokens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = built_by(monkeypatch, lambda: SimpleNamespace(layers=[nn.Embedding(256, 3)], loss=loss_of))
    config = make_config(model=CNN | model, data={"source": "text", "target": None}, batch={"seq_length": 5})
    code, out, _ = ask(monkeypatch, capsys, config)
    assert code == 0
    assert json.loads(out)["model"]["layers"][0]["output_shape"] == [5, 3]
