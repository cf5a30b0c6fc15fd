"""A user's own model is measured by a process of its own, and planned from what it says."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.app.planning import plan_inputs
from launcher.app.user_model import request_of, source_roots
from launcher.base.errors import PlanError
from launcher.plan.build import build
from launcher.runtime.process import measure
from tests.helpers.configs import launch_config

MODULE = """
import torch
from types import SimpleNamespace

def build(width):
    layers = [torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 2)]
    return SimpleNamespace(layers=layers, loss=torch.nn.functional.cross_entropy)

def no_layers(width):
    return []

def layers_that_mix(width):
    layers = [torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)]
    return SimpleNamespace(layers=layers, loss=torch.nn.functional.cross_entropy)

def broken(width):
    raise OSError("there are no weights")

class Linear(torch.nn.Linear):
    def split_with(self, deferral):
        self.deferral = deferral

    def forward(self, x):
        return self.deferral.linear(x, self.weight, self.bias)

def split_layers(width):
    layers = [torch.nn.Sequential(Linear(4, width), torch.nn.ReLU()), torch.nn.ReLU(), Linear(width, 2)]
    return SimpleNamespace(layers=layers, loss=torch.nn.functional.cross_entropy)

def samples(count=100):
    return [(torch.zeros(4), 0)] * count
"""


def config(target: str):
    sizes = dict.fromkeys(("num_layers", "hidden_size", "num_heads", "vocab_size"))
    model = {**sizes, "family": "custom", "target": target, "options": {"width": 3}}
    job = launch_config(model=model, parallel={"pp": 3, "dp": 2})
    return replace(job, data=replace(job.data, source=None, target="my_layers:samples"))


@pytest.fixture
def roots(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "my_layers.py").write_text(MODULE)
    return source_roots(config("my_layers:build"), [str(tmp_path)])


def test_a_users_model_is_planned_from_its_measured_layers(roots):
    job = config("my_layers:build")
    plan = build(job, inputs=plan_inputs(job, roots), source_roots=roots)
    assert plan.num_parameters == (4 * 3 + 3) + (3 * 2 + 2)
    assert [stage.input_shape for stage in plan.stages] == [(), (3,), (3,)]
    assert plan.step_flops == 2 * (2 * (4 * 3) + 3 * (3 * 2)) * 16  # nobody needs the gradient of the samples


def test_layers_that_can_put_their_weight_gradients_off_say_how_much(roots):
    shape = {}
    for name in ("build", "split_layers"):
        job = config(f"my_layers:{name}")
        measured = plan_inputs(job, roots).shape
        assert measured is not None
        shape[name] = measured
    assert [layer.weight_flops for layer in shape["build"].layers] == [0, 0, 0]
    assert [layer.weight_flops for layer in shape["split_layers"].layers] == [2 * 4 * 3, 0, 2 * 3 * 2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_layers", r"^model\.target=my_layers:no_layers: must return an object with `layers`"),
        (
            "broken",
            r"not be measured: OSError: there are no weights \(my_layers\.py, line \d+\)\.$",
        ),
        ("layers_that_mix", r"(?s)^2 faults:.*layer 0 is BatchNorm1d.*GroupNorm.*layer 1 is Dropout"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused_with_every_reason(roots, name, message):
    with pytest.raises(PlanError, match=message):
        plan_inputs(config(f"my_layers:{name}"), roots)


def test_a_dataset_that_cannot_be_read_is_refused_as_the_dataset(roots, tmp_path):
    (tmp_path / "my_data.py").write_text("def build():\n    raise OSError('the disk is gone')\n")
    job = config("my_layers:build")
    job = replace(job, data=replace(job.data, target="my_data:build"))
    message = r"data\.target=my_data:build: the dataset could not be made: OSError: the disk is gone"
    with pytest.raises(PlanError, match=message):
        plan_inputs(job, roots)


def test_all_that_a_users_code_raises_is_told(roots, tmp_path):
    (tmp_path / "my_two.py").write_text("def build(width):\n    raise OSError('first line\\nand last')\n")
    with pytest.raises(PlanError, match=r"OSError: first line\\nand last \(my_two\.py, line 2\)\.$"):
        plan_inputs(config("my_two:build"), roots)


def test_what_a_users_code_raises_is_one_fault_of_the_model(roots, monkeypatch):
    monkeypatch.syspath_prepend(roots[0])
    job = config("my_layers:broken")
    monkeypatch.setattr("sys.stdin", io.StringIO(request_of(job)))
    answer = io.StringIO()
    assert measure.main(answer) == 1
    (fault,) = json.loads(answer.getvalue())
    assert (fault["path"], fault["given"]) == ("model.target", "my_layers:broken")


def test_a_measuring_process_that_dies_is_told(roots, tmp_path):
    (tmp_path / "my_dead.py").write_text("import os\n\ndef build(width):\n    os._exit(3)\n")
    with pytest.raises(PlanError, match=r"could not be measured: the process ended with status 3\.$"):
        plan_inputs(config("my_dead:build"), roots)


def test_the_faults_of_a_dataset_and_of_a_model_are_told_together(roots):
    job = config("my_layers:layers_that_mix")
    job = replace(job, data=replace(job.data, target="my_layers:absent"))
    with pytest.raises(PlanError) as refused:
        plan_inputs(job, roots)
    assert [fault.path for fault in refused.value.faults] == ["data.target", "model.target", "model.target"]


def test_a_dataset_that_is_too_small_is_refused_by_the_plan(roots):
    job = config("my_layers:build")
    job = replace(job, data=replace(job.data, eval_fraction=0.0, options={"count": 10}))
    message = r"batch\.global_size=16: .*of my_layers:samples has 10: give more data\.$"
    with pytest.raises(PlanError, match=message):
        build(job, inputs=plan_inputs(job, roots), source_roots=roots)


def test_built_in_models_need_no_folder():
    assert source_roots(launch_config(), ["/anywhere"]) == ()
