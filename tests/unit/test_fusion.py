"""Kernels of several operations in a plan: what is refused and why, what a reader sees, what they cost."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from launcher.app.preflight import input_faults
from launcher.base.errors import PlanError
from launcher.base.machine import cxx_compiler, missing_for_compile
from launcher.cli.cluster import doctor
from launcher.contract.config import FusionConfig
from launcher.contract.job import ReportConfig
from launcher.plan.build import build
from launcher.plan.checked_job import PlanInputs
from launcher.plan.cost.memory import saved_activation_bytes
from launcher.plan.text import plan_text
from launcher.runs.fingerprint import identity
from tests.helpers.configs import MIXED, job_shape, launch_config
from tests.helpers.objects import there

COMPILED: dict[str, Any] = {
    "fusion": FusionConfig(compile="block"),
    "report": ReportConfig(baseline="none", warmup_steps=1),
}
CPU = {"kind": "cpu"}


def refusal(config, **options):
    with pytest.raises(PlanError) as error:
        build(config, **options)
    return [str(fault) for fault in error.value.faults]


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            {"schedule": "zb_h1"},
            "fusion.compile=block: torch.compile cannot split a layer's backward, which zb_h1 needs. "
            "Set fusion.compile=none, or parallel.schedule=1f1b.",
        ),
        (
            {"dp": 2, "zero_stage": 3},
            "fusion.compile=block: compiles whole layers, and DeepSpeed gathers the weights at "
            "parallel.zero_stage=3 inside of them, from hooks that cannot be compiled. "
            "Set fusion.compile=none, or parallel.zero_stage=2.",
        ),
    ],
    ids=["split backward", "zero 3"],
)
def test_layers_that_cannot_be_compiled_are_refused(parallel, message):
    assert refusal(launch_config(parallel=parallel, **COMPILED)) == [message]


def test_the_step_that_compiles_must_not_be_a_measured_one():
    assert refusal(launch_config(fusion=FusionConfig(compile="block"))) == [
        "report.warmup_steps=0: counts the first step, in which layers are compiled (fusion.compile=block). "
        "Set report.warmup_steps=1, or fusion.compile=none."
    ]


def test_plain_attention_of_a_users_model_is_refused(monkeypatch):
    sizes = dict.fromkeys(("num_layers", "hidden_size", "num_heads", "vocab_size"))
    model = sizes | {"family": "custom", "target": "mine:build"}
    shape = job_shape(launch_config()).model
    config = launch_config(model=model, fusion=FusionConfig(attention="plain"))
    assert refusal(config, inputs=PlanInputs(shape=replace(shape, family="custom"))) == [
        "fusion.attention=plain: has no effect on a model of family custom, whose layers come from "
        "model.target. Set fusion.attention=fused."
    ]


def shown(config):
    lines = plan_text(build(config)).splitlines()
    start = lines.index("Fusion") + 1
    return [line.split()[:2] for line in lines[start : lines.index("", start)]]


def test_a_plan_shows_every_choice():
    plain = FusionConfig(attention="plain", optimizer="loop")
    config = launch_config(fusion=plain)
    assert shown(config) == [["optimizer", "loop"], ["attention", "plain"], ["compile", "none"]]
    assert shown(launch_config(**COMPILED)) == [
        ["optimizer", "fused"],
        ["attention", "fused"],
        ["compile", "block"],
    ]


def test_a_plan_says_what_compiling_leaves_open():
    (note,) = (note for note in build(launch_config(**COMPILED)).notes if "compiled" in note)
    assert "in the first step" in note
    assert "what a compiled one keeps, the compiler decides" in note


def test_plain_attention_keeps_a_weight_for_each_pair_of_positions():
    sizes: dict[str, Any] = {"batch": {"micro_size": 2, "seq_length": 32}, "precision": MIXED}
    fused, plain = (
        job_shape(launch_config(fusion=FusionConfig(attention=name), **sizes)) for name in ("fused", "plain")
    )
    layers, heads = len(fused.model.layers), there(fused.config.model.num_heads)
    weights, statistics = 2 * 32 * 32 * heads, 4 * 32 * heads
    expected = 2 * layers * (weights - statistics)
    assert (
        saved_activation_bytes(plain, plain.stages[0]) - saved_activation_bytes(fused, fused.stages[0])
        == expected
    )


@pytest.mark.parametrize(
    ("optimizer", "parallel", "copies"),
    [
        ("fused", {}, 0),
        ("foreach", {}, 1),
        ("foreach", {"dp": 2, "zero_stage": 1}, 0.5),
        ("loop", {"dp": 2, "zero_stage": 1}, 1),
        ("foreach", {"dp": 2, "zero_stage": 1, "zero_offload": True}, 0),
    ],
)
def test_an_optimizer_that_is_not_fused_makes_denominators(optimizer, parallel, copies):
    plan = build(launch_config(parallel=parallel, fusion=FusionConfig(optimizer=optimizer)))
    scratch = plan.memory[0].other_bytes.get("optimizer scratch", 0)
    assert scratch == pytest.approx(4 * plan.num_parameters * copies, abs=8)


def test_tensor_by_tensor_takes_twice_a_layer_at_most():
    plan = build(launch_config(fusion=FusionConfig(optimizer="loop")))
    (memory,) = plan.memory
    assert 0 < memory.other_bytes["optimizer scratch"] < 8 * plan.num_parameters


def test_a_baseline_has_the_same_kernels():
    plans = [build(launch_config(**COMPILED)), build(launch_config())]
    one, other = (identity(plan, {}) for plan in plans)
    assert one["fusion"] != other["fusion"]


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)


def test_a_run_that_compiles_is_refused_without_a_compiler(no_compiler):
    data: dict[str, Any] = {"data": replace(launch_config().data, source=None, target="json:loads")}
    plan = build(launch_config(device=CPU, **COMPILED, **data))
    (fault,) = input_faults(plan, is_here=True)
    assert str(fault) == (
        "fusion.compile=block: this machine has no C++ compiler (g++, c++ or clang++): install g++, or name "
        "one in CXX. Set fusion.compile=none."
    )
    assert input_faults(plan, is_here=False) == [], "the machine of the ranks is another"
    assert input_faults(build(launch_config(**data)), is_here=True) == [], "nothing is compiled"


def test_the_doctor_says_what_needs_the_compiler(no_compiler):
    assert doctor.compiler().status == "none"
    assert doctor.compiler().text == (
        "no C++ compiler (g++, c++ or clang++): install g++, or name one in CXX; only fusion.compile and "
        "DeepSpeed's operators need it"
    )


def test_a_compiler_that_cxx_names_goes_first_and_must_be_there(tmp_path):
    own = tmp_path / "my c++"
    own.touch(mode=0o755)
    assert cxx_compiler({"CXX": str(own)}) == str(own)
    missing = missing_for_compile({"CXX": "/nowhere/c++"}, "cpu")
    assert missing == "no C++ compiler /nowhere/c++, which CXX names: correct or unset it"


def test_python_without_its_headers_cannot_compile(tmp_path, monkeypatch):
    own = tmp_path / "g++"
    own.touch(mode=0o755)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    found = missing_for_compile({"CXX": str(own)}, "cpu")
    assert found == f"no Python.h in {tmp_path}: install Python's headers (python3-dev)"
    (tmp_path / "Python.h").touch()
    assert missing_for_compile({"CXX": str(own)}, "cpu") == ""


def test_a_gpu_needs_triton_too(tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.base.machine.find_spec", lambda name: None)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    own = tmp_path / "g++"
    own.touch(mode=0o755)
    assert "install triton" in missing_for_compile(os.environ | {"CXX": str(own)}, "cuda")
