"""What is held, measured from live storages, is what the plan says: at every ZeRO stage, in both formats."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.contract.plan import Plan
from launcher.contract.records import MemoryRecord
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.measure.memory import (
    MemoryGauge,
    SavedBytes,
    limit_memory,
    live_bytes,
    peak_resident_bytes,
    resident_bytes,
)
from launcher.runtime.process.main import is_out_of_memory
from launcher.runtime.process.rank import make_context
from launcher.runtime.train.loop import Trainer, train
from tests.helpers.contexts import WHOLE
from tests.helpers.equality import CPU, job
from tests.helpers.ranks import run_ranks
from tests.helpers.run_folders import make_folders

MODEL = {"num_layers": 4, "hidden_size": 64}
"""217 thousand parameters: what is not a state is small beside them."""
BF16 = {
    "precision": {"name": "bf16", "compute": "bf16", "master_weights": True},
    "device": {"peak_flops": {"fp32": 1e9, "bf16": 1e9}},
}
MEGABYTE = 1 << 20


def measured_states(rank: int, plan: Plan) -> int:
    return after_two_steps(plan, rank).states_bytes


def after_two_steps(plan: Plan, rank: int) -> MemoryRecord:
    ctx = make_context(plan.rank(rank), CPU)
    trainer, steps = Trainer(ctx), Loader(ctx).steps(0)
    for step in range(2):
        trainer.step(step, next(steps))
    found = trainer.memory.record(2)
    assert found is not None
    return found


@pytest.mark.usefixtures("deepspeed_in_parent")
@pytest.mark.parametrize("sections", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_that_are_held_are_those_of_the_plan(stage: int, sections: dict[str, Any]) -> None:
    plan = job(model=MODEL, parallel={"dp": 2, "zero_stage": stage}, **sections)
    (planned,) = plan.memory
    predicted = planned.weights_bytes + planned.gradients_bytes + planned.optimizer_bytes
    (states,) = plan.section("zero")["states_bytes"]
    assert predicted == states[stage]
    for found in run_ranks(2, measured_states, plan):
        assert found == pytest.approx(predicted, rel=0.02)


def test_a_storage_that_several_tensors_share_counts_once() -> None:
    whole = torch.zeros(MEGABYTE)
    assert live_bytes(CPU, whole[:10], [whole.view(-1, 2)]) == 4 * MEGABYTE


def test_a_gradient_that_only_autograd_holds_counts() -> None:
    weight = torch.zeros(MEGABYTE, requires_grad=True)
    (weight * 2).sum().backward()
    assert live_bytes(CPU, {"weight": weight}) == 8 * MEGABYTE


class Holder:
    """Refers to tensors in every way that a program does."""

    def __init__(self) -> None:
        in_closure, in_default, bound = (torch.zeros(MEGABYTE) for _ in range(3))
        self.module = torch.nn.Linear(1024, 1024, bias=False)
        self.closure = lambda: in_closure
        self.default = lambda tensor=in_default: tensor
        self.partial = partial(max, bound)
        self.method = Other().method
        self.myself = self


class Other:
    __slots__ = ("tensor",)

    def __init__(self) -> None:
        self.tensor = torch.zeros(MEGABYTE)

    def method(self) -> None:
        raise NotImplementedError


ELSEWHERE = torch.zeros(MEGABYTE)


def test_what_an_object_holds_is_found_and_nothing_else() -> None:
    assert live_bytes(CPU, Holder()) == 5 * 4 * MEGABYTE
    assert ELSEWHERE.nbytes, "a global of the module that every function of it refers to"


def built_beside(count: Callable[[], object]) -> tuple[int, ...]:
    """A tuple that another thread has half built when something is counted."""
    begun, counted = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        yield 0
        begun.set()
        counted.wait(10)
        yield from range(1, 100)

    with ThreadPoolExecutor(1) as thread:
        built = thread.submit(lambda: tuple(items()))
        begun.wait(10)
        kept = count()
        counted.set()
        result = built.result()
        assert kept is not None
        return result


def test_other_threads_are_not_disturbed() -> None:
    assert built_beside(lambda: live_bytes(CPU, Holder())) == tuple(range(100))


def test_what_walks_all_objects_is_noticed() -> None:
    with pytest.raises(SystemError, match="bad argument to internal function"):
        built_beside(gc.get_objects)


def test_the_peak_is_what_was_resident_though_it_is_gone() -> None:
    def peak(rank: int) -> tuple[int, int]:
        gauge, now = MemoryGauge(CPU), resident_bytes()
        gauge.sample()
        assert gauge.record(1) is None, "one step says nothing of the optimizer"
        gauge.sample()
        size = peak_resident_bytes() - now + 512 * MEGABYTE
        torch.ones(size, dtype=torch.uint8)
        found = gauge.record(2)
        assert found is not None
        return found.peak_bytes, size

    ((found, size),) = run_ranks(1, peak)
    slack = 64 * MEGABYTE  # a forked process maps the pages of its libraries as it comes to use them
    assert size - slack < found < size + slack


def held_by_schedule(rank: int, plans: list[Plan]) -> list[tuple[int, int]]:
    return [held_bytes(plan, rank) for plan in plans]


def held_bytes(plan: Plan, rank: int) -> tuple[int, int]:
    found = after_two_steps(plan, rank)
    return found.held_peak_bytes or 0, found.held_total_bytes or 0


def test_gpipe_holds_every_microbatch_and_1f1b_those_that_are_on_their_way() -> None:
    plans = [
        job(
            batch={"global_size": 8, "micro_size": 2},
            parallel={"pp": 2, "schedule": schedule},
            report={"claims": True, "warmup_steps": 2},
            train={"num_steps": 3},
        )
        for schedule in ("gpipe", "1f1b")
    ]
    for pp_rank, (gpipe, one_f_one_b) in enumerate(run_ranks(2, held_by_schedule, plans)):
        assert 4 * gpipe[0] / gpipe[1] == pytest.approx(4, rel=0.01)
        assert 4 * one_f_one_b[0] / one_f_one_b[1] == pytest.approx(2 - pp_rank, rel=0.01)


def test_what_waits_for_its_weight_gradients_is_held_too() -> None:
    plan = job(
        batch={"global_size": 8, "micro_size": 2},
        parallel={"pp": 2, "schedule": "zb_h1"},
        report={"claims": True, "warmup_steps": 2},
        train={"num_steps": 3},
    )
    for ((held, total),) in run_ranks(2, held_by_schedule, [plan]):
        assert 4 * held / total == pytest.approx(2, rel=0.1)  # of which one has gone through its B


def ends(rank: int, limits: bool, size: int) -> str:
    if limits:
        limit_memory(CPU, 64 * MEGABYTE)
    try:
        torch.ones(size, dtype=torch.uint8)
    except RuntimeError as error:
        return "out of memory" if is_out_of_memory(error) else str(error)
    return "fits"


@pytest.mark.parametrize(
    ("limits", "size", "end"),
    [(True, 40 * MEGABYTE, "fits"), (True, 80 * MEGABYTE, "out of memory"), (False, 80 * MEGABYTE, "fits")],
)
def test_a_process_is_held_to_the_memory_of_its_device(limits: bool, size: int, end: str) -> None:
    assert run_ranks(1, ends, limits, size) == [end]


def starts_a_thread(rank: int, limits: bool) -> str:
    if limits:
        limit_memory(CPU, MEGABYTE)
    threading.stack_size(64 * MEGABYTE)
    try:
        threading.Thread(target=int).start()
    except RuntimeError as error:
        return "out of memory" if is_out_of_memory(error) else str(error)
    return "fits"


@pytest.mark.parametrize(("limits", "end"), [(True, "out of memory"), (False, "fits")])
def test_a_thread_without_room_for_its_stack_is_out_of_memory(limits: bool, end: str) -> None:
    assert run_ranks(1, starts_a_thread, limits) == [end]


def trained(rank: int, plan: Plan, folder: Path) -> str:
    try:
        train(make_context(plan.rank(rank), CPU), folder, resume=False)
    except RuntimeError as error:
        return "out of memory" if is_out_of_memory(error) else str(error)
    return "trained"


@pytest.mark.parametrize(("limits", "end"), [(True, "out of memory"), (False, "trained")])
def test_a_run_that_is_held_to_less_than_it_needs_ends_out_of_memory(
    limits: bool, end: str, tmp_path: Path
) -> None:
    make_folders(tmp_path)
    device = {"memory_bytes": 16 * MEGABYTE, "memory_check": "warn", "limits_memory": limits}
    plan = job(
        batch={"global_size": 64, "micro_size": 64, "seq_length": 256},
        train={"num_steps": 2},
        report={"warmup_steps": 1},
        device=device,
    )
    assert not plan.fits
    assert run_ranks(1, trained, plan, tmp_path) == [end]


def test_what_autograd_holds_is_not_followed_unless_it_is_asked_for() -> None:
    plan = job(parallel={"pp": 2})
    assert run_ranks(2, held_by_schedule, [plan]) == [[(0, 0)], [(0, 0)]]


def test_a_storage_is_held_once_until_its_last_use_is_gone() -> None:
    weight, x = torch.ones(4, requires_grad=True), torch.ones(4)
    with SavedBytes([weight], WHOLE) as held:
        out = (x * weight).sum() + (x * 2 * weight).sum() + (x * weight).sum()
        assert (held.now, held.total) == (32, 32)  # x, used twice, and x * 2; not the weight
        out.backward()
    assert (held.now, held.peak, held.total) == (0, 32, 32)
