"""Predicted times that are brought to what a run measured of its stages."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.app.planning import make_plan, one_device
from launcher.base.errors import LauncherError, PlanError
from launcher.cli.main import main
from launcher.contract.model.shape import LayerShape, ModelShape
from launcher.contract.plan import Plan
from launcher.plan.build import build
from launcher.plan.checked_job import PlanInputs
from launcher.plan.cost.measured import MeasuredRun, fitted
from launcher.plan.layout.balance import balanced_split, layer_costs
from launcher.plan.plugins import choose
from launcher.runs.fingerprint import identity
from launcher.typed.read import plain
from tests.helpers.configs import job_shape, launch_config
from tests.helpers.fake_runs import FakeRun, write_records

MODEL = {"num_layers": 8, "hidden_size": 128, "vocab_size": 512, "tied_embeddings": False}
RUN = "runs/even"


def kind(name: str) -> tuple[LayerShape, Any]:
    layer = LayerShape(
        name="",
        num_parameters=len(name),
        num_replicated_parameters=0,
        forward_flops=0.0,
        kept_elements=0,
        kept_replicated_elements=0,
        output_elements=1,
        output_shape=(1,),
    )
    return layer, "none"


BLOCK, HEAD, LAST = kind("block"), kind("head"), kind("of the last stage")


def planned(*, measured: MeasuredRun | None = None, **parallel: Any) -> Plan:
    device = {"measured_in": RUN} if measured else {}
    config = launch_config(model=MODEL, parallel={"pp": 2} | parallel, device=device)
    return build(config, inputs=PlanInputs(measured=measured))


def measured(plan: Plan, forward: float = 1.0, backward: float = 1.0, head_s: float = 0.0) -> MeasuredRun:
    """What a run of the plan measures on a device that is slower by these factors, and whose head takes
    longer by ``head_s`` each way."""
    forward_s = [forward * seconds for seconds in plan.schedule.forward_s]
    backward_s = [backward * seconds for seconds in plan.schedule.backward_s]
    forward_s[-1] += head_s
    backward_s[-1] += head_s
    return MeasuredRun(plan=plan, forward_s=forward_s, backward_s=backward_s)


def test_stages_that_tell_layers_apart_give_each_kind_its_factor() -> None:
    found = fitted([{BLOCK: 4.0}, {BLOCK: 4.0, HEAD: 5.0}], [8.0, 8.0 + 1.5])
    assert found == {BLOCK: pytest.approx(2.0, rel=1e-3), HEAD: pytest.approx(0.3, rel=1e-3)}


def test_what_no_stage_tells_apart_keeps_its_proportion() -> None:
    assert fitted([{BLOCK: 4.0, HEAD: 2.0}], [9.0]) == {BLOCK: 1.5, HEAD: 1.5}


def test_times_that_contradict_each_other_are_met_between() -> None:
    found = fitted([{BLOCK: 1.0}, {BLOCK: 1.0}, {BLOCK: 1.0, LAST: 1.0}], [1.0, 3.0, 1.0])
    assert 1 < found[BLOCK] < 3
    assert 0 < found[LAST] < 0.1  # never negative


def test_a_kind_without_predicted_time_takes_nothing_of_what_was_measured() -> None:
    assert fitted([{BLOCK: 2.0, HEAD: 0.0}], [4.0])[BLOCK] == 2.0


def test_a_stage_without_predicted_time_says_nothing() -> None:
    assert fitted([{BLOCK: 2.0}, {HEAD: 0.0}], [4.0, 0.1])[BLOCK] == pytest.approx(2.0, rel=1e-3)
    assert fitted([{HEAD: 0.0}], [0.1]) == {HEAD: 1.0}


def test_a_plan_takes_the_times_that_were_measured() -> None:
    even = planned()
    slower = planned(measured=measured(even, forward=2.0, backward=3.0))
    assert slower.schedule.forward_s == pytest.approx([2 * s for s in even.schedule.forward_s])
    assert slower.schedule.backward_s == pytest.approx([3 * s for s in even.schedule.backward_s])
    assert slower.schedule.step_s > 2 * even.schedule.step_s


def test_a_split_backward_is_measured_whole() -> None:
    even, split = planned(), planned(schedule="zb_h1")
    slower = planned(measured=measured(even, backward=3.0), schedule="zb_h1")
    assert slower.schedule.weight_s == pytest.approx([3 * s for s in split.schedule.weight_s])
    assert slower.schedule.backward_s == pytest.approx([3 * s for s in split.schedule.backward_s])


@pytest.mark.parametrize("head_s", [0.0, 0.05])
def test_layers_are_balanced_by_what_was_measured(head_s: float) -> None:
    even, first = planned(), planned(layers_per_stage="auto")
    config = launch_config(model=MODEL, parallel={"pp": 2})
    costs = list(layer_costs(job_shape(config), choose(config).parallels))
    costs[-1] += 2 * head_s
    found = planned(measured=measured(even, head_s=head_s), layers_per_stage="auto")
    assert tuple(stage.num_layers for stage in found.stages) == balanced_split(costs, 2)
    assert (found.stages == first.stages) == (head_s == 0.0)
    assert any(note.startswith("Layers are split by measured time") for note in found.notes)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch": {"micro_size": 4, "global_size": None}}, "batch.micro_size (1 there, 4 here)"),
        ({"parallel": {"pp": 2, "recompute": "full"}}, "parallel.recompute (none there, full here)"),
        ({"device": {"measured_in": RUN, "name": "other"}}, "device.name (box there, other here)"),
    ],
)
def test_a_run_of_other_work_is_refused(changed: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"model": MODEL, "parallel": {"pp": 2}, "device": {"measured_in": RUN}}
    config = launch_config(**settings | changed)
    fault = re.escape(f"device.measured_in={RUN}: measured other work: {message}. ")
    with pytest.raises(PlanError, match=f"{fault}.*or device.measured_in=null"):
        build(config, inputs=PlanInputs(measured=measured(planned())))


def test_a_run_of_a_users_model_that_has_changed_since_is_refused() -> None:
    sizes = dict.fromkeys(("num_layers", "hidden_size", "num_heads", "vocab_size"))
    mine = {**sizes, "family": "custom", "target": "mine:build"}

    def made(num_layers: int, run: MeasuredRun | None = None) -> Plan:
        layers = (BLOCK[0],) * num_layers
        shape = ModelShape(
            family="custom", layers=layers, prologue=None, epilogue=None, num_tied_parameters=0
        )
        device = {"measured_in": RUN} if run else {}
        config = launch_config(model=mine, parallel={"pp": 2}, device=device)
        return build(config, inputs=PlanInputs(shape=shape, measured=run))

    then = measured(made(4))
    assert made(4, then).schedule.step_s > 0
    message = re.escape("measured other work: layers (4 there, 6 here), parameters (20 there, 30 here)")
    with pytest.raises(PlanError, match=message):
        made(6, then)


def test_a_run_that_cannot_be_read_is_refused() -> None:
    unreadable = LauncherError(f"{RUN} holds no plan.json")
    config = launch_config(model=MODEL, parallel={"pp": 2}, device={"measured_in": RUN})
    with pytest.raises(
        PlanError, match=f"device.measured_in={RUN}: cannot be read: {RUN} holds no plan.json"
    ):
        build(config, inputs=PlanInputs(measured=unreadable))


def test_the_baseline_and_its_likeness_depend_on_no_measured_run() -> None:
    even = planned()
    found = planned(measured=measured(even))
    assert one_device(found).device.measured_in is None
    assert identity(found, {})["device"] == identity(even, {})["device"]
    assert "measured_in" not in plain(identity(found, {}))["device"]


def test_the_command_line_plans_with_a_stored_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stand_in_corpus: None
) -> None:
    plan = make_plan("quickstart", ["parallel.pp=2", "parallel.schedule=gpipe"]).plan
    (tmp_path / "run" / "metrics").mkdir(parents=True)
    (tmp_path / "run" / "plan.json").write_text(plan.to_json())
    m = plan.batch.num_microbatches
    kinds = {rank: {"compute": 3 * m * (rank + 1)} for rank in range(2)}  # 1 and 2 ms forward
    fake = FakeRun(mesh=plan.mesh, global_size=m, kinds_ms=kinds)
    for rank in range(2):
        write_records(tmp_path / "run", rank, [plain(record) for record in fake.records(rank)])
    assert main(["plan", "quickstart", "parallel.pp=2", f"device.measured_in={tmp_path}/run"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"\n +0 +0 +0 .* 1 ms +2 ms\n +1 +1 +0 .* 2 ms +4 ms\n", output)
    told = " ".join(output.split())  # its lines break where the name of the folder ends
    assert "measured of its stages; the rest is predicted." in told
    assert "Not counted: the start of operations" not in output


def test_the_cost_of_a_layer_is_asked_by_its_kind() -> None:
    run = measured(planned(), forward=2.0)
    plan = planned(measured=replace(run, forward_s=[1.0, 1.0]))
    assert plan.schedule.forward_s == pytest.approx((1.0, 1.0), rel=1e-3)
