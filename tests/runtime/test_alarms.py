"""A bad batch that is skipped, or gone back from, leaves nothing in a run; slow ranks are named."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.base.errors import JobError
from launcher.contract.alarms.events import Event, read_events
from launcher.contract.alarms.rewinds import REWINDS, Rewind, Rewinds, read_rewinds
from launcher.contract.plan import Plan
from launcher.runtime.alarms.losses import LossAlarms
from launcher.runtime.alarms.speed import ProgressWatch, SpeedAlarms
from launcher.runtime.alarms.watch import Watch
from launcher.runtime.api import StepOutcome
from launcher.runtime.data.microbatches import Loader, Microbatch
from launcher.runtime.model.blocks import Block
from launcher.runtime.process.rank import make_context
from launcher.runtime.train import loop
from launcher.runtime.train.loop import StepDone, Trainer
from launcher.runtime.train.native_update import NativeUpdate
from launcher.runtime.train.pipeline_executor import PipelineExecutor
from tests.helpers import equality
from tests.helpers.contexts import make_context as lonely_context
from tests.helpers.equality import CPU, Trained, job
from tests.helpers.objects import inside, substitute
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.run_folders import make_folders
from tests.helpers.servers import serve_and_train, servers_job

pytestmark = pytest.mark.usefixtures("deepspeed_in_parent")
ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS, BAD, INTERVAL = 8, 5, 2
"""The batch of the sixth step is the bad one, and the checkpoint before it that of step 4."""
SPIKE = {"spike_window": 3, "spike_deviations": 4.0}
LAYOUTS: tuple[dict[str, Any], ...] = ({}, {"dp": 2}, {"tp": 2}, {"pp": 2}, {"pp": 2, "schedule": "zb_h1"})
Arrange = Callable[[], Any]
"""Prepares, or breaks, each rank before it trains."""


def planned(alarms: dict[str, Any], layout: dict[str, Any], *, interval: int = INTERVAL) -> Plan:
    train = {"num_steps": NUM_STEPS, "eval_batches": 0, "eval_interval": 0, "checkpoint_interval": interval}
    quiet = {"slow_step": "ignore", "slow_rank": "ignore", "no_progress": "ignore"}
    return job(
        model={"num_layers": 2},
        optim={"decay": "constant", "lr": 1e-3},
        parallel=layout,
        train=train | {"keep_checkpoints": 9},
        alarms=quiet | SPIKE | alarms,
    )


class Bad(list[Microbatch]):
    """The microbatches of a bad batch."""


def spoil(factor: float = 100.0, batches: tuple[int, ...] = (BAD,)) -> None:
    """From now on some batches of the data have a loss, and a gradient, so many times as large."""
    microbatches, train = inside(Loader)._microbatches, PipelineExecutor.train

    def marked(loader: Loader, samples: Any, pick: Any, step: int, number: int) -> list[Microbatch]:
        made = microbatches(loader, samples, pick, step, number)
        return Bad(made) if number in batches else made

    def scaled(executor: PipelineExecutor, given: Any, update: Any, scale: Callable[[], Any]) -> Any:
        if not isinstance(given, Bad):
            return train(executor, given, update, scale)
        result = train(executor, given, update, lambda: scale() * factor)
        if result.loss_sum is not None:
            result.loss_sum.mul_(factor)
        return result

    substitute(Loader, "_microbatches", marked)
    substitute(PipelineExecutor, "train", scaled)


# Skipped


def after_steps(plan: Plan, arrange: Arrange, monkeypatch: pytest.MonkeyPatch) -> Trained:
    """Weights and moments after all steps."""
    monkeypatch.setattr(equality, "NUM_STEPS", NUM_STEPS)
    found = equality.train(plan, lambda trainer, loader: arrange())
    return replace(found, losses=[], norms=[])


def leave_out() -> None:
    """Nothing at all is done in the step of the bad batch."""
    step = Trainer.step

    def without(trainer: Trainer, number: int, microbatches: Any) -> StepDone:
        if number != BAD:
            return step(trainer, number, microbatches)
        outcome = StepOutcome(grad_norm=0.0, lr=0.0, is_skipped=True)
        return StepDone(outcome=outcome, loss=0.0, num_receives=0)

    substitute(Trainer, "step", without)


@pytest.fixture(scope="module")
def without_the_batch() -> Trained:
    """What one device has that knows of no alarms, and never sees the bad batch."""
    with pytest.MonkeyPatch.context() as patch:
        return after_steps(planned({"spike": "ignore"}, {}), leave_out, patch)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_spike_that_is_skipped_leaves_what_one_device_has_without_the_batch(
    layout: dict[str, Any], without_the_batch: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = after_steps(planned({"spike": "skip"}, layout), spoil, monkeypatch)
    equality.assert_equal(found, without_the_batch)


@pytest.mark.parametrize("layout", [{}, {"dp": 2}, {"pp": 2}], ids=str)
def test_a_batch_whose_loss_is_not_a_number_is_skipped(
    layout: dict[str, Any], without_the_batch: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned({"not_finite": "skip"}, layout)
    equality.assert_equal(after_steps(plan, lambda: spoil(torch.nan), monkeypatch), without_the_batch)


def poison_gradient() -> None:
    """The gradient of one step is not a number, though its loss is one."""
    apply = NativeUpdate.apply

    def poisoned(update: NativeUpdate, step: int) -> StepOutcome:
        if step == BAD:
            inside(update)._buckets.all()[0].flat[0] = torch.nan
        return apply(update, step)

    substitute(NativeUpdate, "apply", poisoned)


def test_a_gradient_that_is_not_a_number_is_skipped(
    without_the_batch: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned({"not_finite": "skip"}, {})
    equality.assert_equal(after_steps(plan, poison_gradient, monkeypatch), without_the_batch)


def keep_gradients() -> None:
    """A sabotage: what is skipped is added to the next step."""
    spoil()

    def kept(update: NativeUpdate, step: int) -> StepOutcome:
        inside(update)._buckets.wait()
        return StepOutcome(grad_norm=0.0, lr=0.0, is_skipped=True)

    substitute(NativeUpdate, "skip", kept)


@pytest.mark.parametrize(
    ("layout", "action", "arrange"),
    [({}, "warn", spoil), ({"pp": 2}, "skip", keep_gradients)],
    ids=["taken", "added to the next"],
)
def test_what_a_batch_leaves_that_is_not_skipped_as_a_whole_is_seen(
    layout: dict[str, Any],
    action: str,
    arrange: Arrange,
    without_the_batch: Trained,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = after_steps(planned({"spike": action}, layout), arrange, monkeypatch)
    with pytest.raises(AssertionError):
        equality.assert_equal(found, without_the_batch)


def judged(losses: list[float], window: int, deviations: float) -> list[int]:
    """The steps whose loss is a spike."""
    plan = planned({"spike": "warn", "spike_window": window, "spike_deviations": deviations}, {})
    alarms, found = LossAlarms(lonely_context(plan)), []
    for step, loss in enumerate(losses):
        found += [step] if alarms.judge(step, loss) is not None else []
        alarms.took(loss)
    return found


@pytest.mark.parametrize(("window", "deviations"), [(5, 8.0), (20, 8.0), (50, 8.0), (50, 4.0)])
def test_the_losses_of_the_quickstart_raise_no_alarm_but_a_spike_in_them_does(
    window: int, deviations: float
) -> None:
    with zipfile.ZipFile(ROOT / "tests" / "golden" / "quickstart_runs.zip") as runs:
        lines = runs.read("runs/baseline/metrics/rank-00000.jsonl").splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if record["type"] == "step"]
    assert judged(losses, window, deviations) == []
    losses[80] *= 3
    assert judged(losses, window, deviations) == [80]


def test_losses_that_do_not_vary_raise_no_alarm_by_a_rounding_error() -> None:
    assert judged([2.0, 2.0, 2.0, 2.0 + 1e-6, 2.1], 3, 8.0) == [4]


# Whole runs


def run(plan: Plan, run_dir: Path, arrange: Arrange = spoil, *, resume: bool = False) -> Path:
    """Trains to the end."""
    make_folders(run_dir)
    (run_dir / "exit").mkdir(exist_ok=True)
    run_ranks(plan.world_size, rank_of_run, plan, run_dir, arrange, resume)
    return run_dir


def rank_of_run(rank: int, plan: Plan, run_dir: Path, arrange: Arrange, resume: bool) -> None:
    arrange()
    loop.train(make_context(plan.rank(rank), CPU), run_dir, resume=resume)
    torch.distributed.barrier()


def last_saved(run_dir: Path) -> dict[str, bytes]:
    """Every file of the last checkpoint: weights, moments, and the losses that later ones are judged by."""
    folder = run_dir / "checkpoints" / f"step-{NUM_STEPS:08d}"
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def only_until(run_dir: Path, step: int, into: Path, *, keeps: tuple[str, ...] = ()) -> Path:
    """Another run directory, with the checkpoints up to a step and some files."""
    for path in sorted((run_dir / "checkpoints").iterdir()):
        if int(path.name[5:]) <= step:
            shutil.copytree(path, into / "checkpoints" / path.name)
    for name in keeps:
        shutil.copy(run_dir / name, into / name)
    return into


def alarms_of(run_dir: Path) -> list[tuple[str, int | None, str]]:
    return [(event.kind, event.step, event.done) for event in read_events(run_dir)]


def pass_over(number: int) -> Arrange:
    """From step 4 on each step takes a batch so many behind its own, by no means of the alarms."""

    def arrange() -> None:
        spoil()
        substitute(Rewinds, "batch_of", lambda self, step: step + number if step >= 4 else step)

    return arrange


@pytest.mark.parametrize(
    "layout", [{}, {"dp": 2}, {"pp": 2}, {"dp": 2, "zero_stage": 1}, {"dp": 2, "zero_stage": 3}], ids=str
)
def test_going_back_is_what_a_start_from_that_checkpoint_behind_the_bad_batch_does(
    layout: dict[str, Any], tmp_path: Path
) -> None:
    plan = planned({"spike": "rewind"}, layout)
    found = run(plan, tmp_path / "found")
    assert alarms_of(found) == [
        ("spike", 6, "back to the checkpoint after step 4, from where on 2 batches are passed over")
    ]
    assert read_rewinds(found).rewinds == (Rewind(alarm_step=5, checkpoint_step=4, num_passed=2),)
    expected = run(plan, only_until(found, 4, tmp_path / "expected"), pass_over(2), resume=True)
    assert not (expected / REWINDS).exists()
    assert last_saved(found) == last_saved(expected)
    if not layout:  # the twin: one batch fewer is passed over, the bad one of which none is left
        other = planned({"spike": "ignore"}, layout)
        wrong = run(other, only_until(found, 4, tmp_path / "wrong"), pass_over(1), resume=True)
        assert last_saved(found) != last_saved(wrong)


def test_a_later_start_passes_over_the_same_batches(tmp_path: Path) -> None:
    plan = planned({"spike": "rewind"}, {})
    found = run(plan, tmp_path / "found")
    again = run(plan, only_until(found, 6, tmp_path / "again", keeps=(REWINDS,)), resume=True)
    assert last_saved(again) == last_saved(found)
    forgot = run(plan, only_until(found, 6, tmp_path / "forgot"), resume=True)
    assert last_saved(forgot) != last_saved(found)


def forget_losses() -> None:
    """A sabotage: a start does not know the losses before it."""
    spoil()
    substitute(LossAlarms, "load", lambda alarms, read: None)


def test_a_resumed_run_skips_what_an_undisturbed_one_skips(tmp_path: Path) -> None:
    plan = planned({"spike": "skip"}, {"dp": 2})
    found = run(plan, tmp_path / "found")
    assert alarms_of(found) == [("spike", 6, "its batch is skipped: no update was made from it")]
    again = run(plan, only_until(found, 4, tmp_path / "again"), resume=True)
    assert last_saved(again) == last_saved(found)
    forgot = run(plan, only_until(found, 4, tmp_path / "forgot"), forget_losses, resume=True)
    assert last_saved(forgot) != last_saved(found)


def test_a_skipped_step_is_recorded_without_a_loss_that_is_no_number(tmp_path: Path) -> None:
    run_dir = run(planned({"not_finite": "skip"}, {}), tmp_path, lambda: spoil(torch.nan))
    lines = (run_dir / "metrics" / "rank-00000.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["type"] == "step"]
    assert [record["is_skipped"] for record in records] == [step == BAD for step in range(NUM_STEPS)]
    assert (records[BAD]["loss"], records[BAD]["grad_norm"]) == (None, None)
    (event,) = read_events(run_dir)
    assert (event.kind, event.step, event.figures) == ("not_finite", 6, {"loss": None})


@pytest.mark.parametrize(
    ("alarms", "interval", "batches", "message"),
    [
        ({"spike": "end"}, 0, (BAD,), r"the loss of step 6 is \S+, above \S+, .* \(alarms\.spike\)$"),
        ({"spike": "skip", "max_skips": 1}, 0, (5, 6), r"; 1 batch before it were skipped"),
        ({"spike": "rewind", "max_rewinds": 1}, 2, (5, 7), r"it has gone back 1 time \(alarms\.max_rewinds"),
        ({"spike": "rewind"}, 7, (BAD,), "there is no checkpoint yet to go back to"),
    ],
)
def test_a_run_that_an_alarm_ends_tells_why(
    alarms: dict[str, Any], interval: int, batches: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match=message):
        run(planned(alarms, {}, interval=interval), tmp_path, lambda: spoil(batches=batches))
    assert read_events(tmp_path)[-1].done.startswith("the run fails")


def test_a_gradient_that_is_not_finite_ends_the_run_and_is_an_event(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="the gradient of step"):
        run(planned({}, {}), tmp_path, lambda: spoil(torch.inf))
    assert alarms_of(tmp_path) == [("not_finite", 6, "the run fails")]


@pytest.mark.parametrize(
    ("mode", "told"),
    [("async", (1, socket.gethostname(), "this rank fails")), ("sync", (None, "", "the run fails"))],
)
def test_a_gradient_with_servers_that_is_not_finite_is_one_event_of_the_rank_whose_it_is(
    tmp_path: Path, mode: str, told: tuple[int | None, str, str]
) -> None:
    def spoil_own(trainer: Trainer, loader: Loader, step: int) -> None:
        if step == 0:
            Watch(trainer.ctx, trainer.losses, tmp_path)
        if step == 1 and trainer.ctx.plan.rank == 1:
            spoil(torch.nan, batches=(1,))

    quiet = {"slow_step": "ignore", "slow_rank": "ignore", "no_progress": "ignore"}
    plan = servers_job(options={"mode": mode}, alarms=quiet)
    with pytest.raises(RankError, match=r"gradient of step 2 is not finite \(nan\)"):
        serve_and_train(plan, tmp_path, spoil_own, num_steps=4)
    (event,) = read_events(tmp_path)
    assert (event.kind, event.step) == ("not_finite", 2)
    assert (event.rank, event.node, event.done) == told


def test_an_event_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    run(planned({"spike": "skip"}, {}), tmp_path)
    assert (tmp_path / "checkpoints" / f"step-{NUM_STEPS:08d}").is_dir()


# Speed


def test_a_rank_that_computes_for_longer_is_named_with_its_node_once(tmp_path: Path) -> None:
    plan = planned({"slow_rank": "warn", "slow_rank_window": 2, "slow_rank_factor": 4.0}, {"dp": 4})

    def sleep(module: torch.nn.Module, inputs: Any) -> None:
        time.sleep(0.05 * isinstance(module, Block))

    def sleep_on_rank_2() -> None:
        if torch.distributed.get_rank() == 2:
            torch.nn.modules.module.register_module_forward_pre_hook(sleep)

    run(plan, tmp_path, sleep_on_rank_2)
    (event,) = (each for each in read_events(tmp_path) if each.kind == "slow_rank")
    assert (event.rank, event.node, event.done) == (2, socket.gethostname(), "the training goes on")


def speed(alarms: dict[str, Any]) -> tuple[SpeedAlarms, list[Event]]:
    events: list[Event] = []
    return SpeedAlarms(lonely_context(planned(alarms, {})), events.append, is_first=True), events


def step_of(seconds: float, saving_s: float = 0.0) -> dict[str, Any]:
    kinds = {"compute": round(seconds * 1e9), "single_rank": round(saving_s * 1e9)}
    return {"duration_ns": sum(kinds.values()), "kinds_ns": kinds}


def test_the_first_of_slow_steps_is_told_and_a_long_save_is_none() -> None:
    watched, events = speed({"slow_step": "warn", "slow_step_window": 3, "slow_step_factor": 4.0})
    for step, times in enumerate([0.5, 0.5, 0.5, 1.9, 2.1, 2.1, 0.5, 2.6]):
        watched.after(step, step_of(times))
    watched.after(8, step_of(0.5, saving_s=60))
    assert [(event.step, event.figures["median"]) for event in events] == [(5, 0.5)]


def test_a_short_step_is_never_slow() -> None:
    watched, events = speed({"slow_step": "warn", "slow_step_window": 2})
    for step, times in enumerate([0.001, 0.001, 0.9]):
        watched.after(step, step_of(times))
    assert not events


def test_a_slow_step_can_end_the_run() -> None:
    watched, events = speed({"slow_step": "end", "slow_step_window": 2})
    message = r"step 3 took 9 s, and the median of the last 2 is 500 ms \(alarms\.slow_step\)"
    watched.after(0, step_of(0.5))
    watched.after(1, step_of(0.5))
    with pytest.raises(JobError, match=message):
        watched.after(2, step_of(9.0))
    assert events[0].done == "the run fails"


def hold(rank: int, run_dir: Path, action: str) -> None:
    """A rank that makes one step and then none, until it is told so."""
    plan = planned({"no_progress": action, "no_progress_s": 0.2}, {})
    told: list[Event] = []
    watch = ProgressWatch(lonely_context(plan), run_dir, told.append)
    watch.done(1)
    while not told:
        time.sleep(0.01)
    watch.close()
    (event,) = told
    assert (event.kind, event.step, event.done) == ("no_progress", 2, "the training goes on")


def test_a_run_without_progress_is_told(tmp_path: Path) -> None:
    hold(0, tmp_path, "warn")


def test_a_run_without_progress_can_end(tmp_path: Path) -> None:
    (tmp_path / "exit").mkdir()
    child = os.fork()
    if not child:
        hold(0, tmp_path, "end")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    record = json.loads((tmp_path / "exit" / "rank-0.json").read_text())
    assert record["message"].endswith("after step 1 (alarms.no_progress)")
