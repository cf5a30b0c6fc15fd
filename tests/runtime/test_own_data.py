"""A user's own dataset: the same samples under every layout, also where its items draw random numbers."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from launcher.base.errors import ConfigError, JobError
from launcher.contract.config import LaunchConfig
from launcher.contract.job import records_name
from launcher.contract.plan import Plan
from launcher.runtime.data import microbatches, own_data
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.data.own_data import OwnData, Pick
from launcher.runtime.data.reader import Reader
from launcher.runtime.process.rank import make_context
from launcher.runtime.train import loop
from launcher.runtime.train.loop import Trainer
from tests.helpers.contexts import make_config
from tests.helpers.contexts import make_context as alone
from tests.helpers.equality import CPU, NUM_STEPS, Trained, assert_equal, job, train
from tests.helpers.own_data import SEQ, SHIFT, SHORTER, Numbers, config_of, data_of, loader_of
from tests.helpers.plans import staged_plan
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.run_folders import make_folders
from tests.helpers.servers import serve_and_train, servers_job
from tests.helpers.two_levels import TWO_LEVELS
from tests.helpers.waiting import wait_until


class Drawn:
    """Rows of tokens, each drawn anew: a third of it by every library. A read lets other threads run."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = [random.randrange(256) for _ in range(3)]
        time.sleep(0.0005)
        row += np.random.randint(256, size=3).tolist()
        row += torch.randint(256, (SEQ - 5,)).tolist()
        return torch.tensor(row[:-1]), torch.tensor(row[1:])


def drawn(**sections: Any) -> Plan:
    return job(data=data_of(Drawn), **sections)


@cache
def one_device() -> Trained:
    return train(drawn())


LAYOUTS: tuple[dict[str, Any], ...] = (
    {"dp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"pp": 2},
    {"pp": 2, "num_chunks": 2, "schedule": "interleaved_1f1b"},
    {"dp": 2, "zero_stage": 1},
    {"dp": 2, "zero_stage": 2},
    {"dp": 2, "zero_stage": 3},
    {"dp": 2, "pp": 2},
)


@pytest.mark.usefixtures("deepspeed_in_parent")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_items_that_draw_give_what_one_device_computes(layout: dict[str, Any]) -> None:
    assert_equal(train(drawn(parallel=layout)), one_device())


def test_items_that_draw_give_it_with_parameter_servers(tmp_path: Path) -> None:
    assert_equal(serve_and_train(servers_job(data=data_of(Drawn)), tmp_path).trained, one_device())


def test_items_that_draw_give_it_with_sums_of_two_levels() -> None:
    assert_equal(train(drawn(parallel={"dp": 4}, **TWO_LEVELS)), one_device())


def losses_by_replica(rank: int, plan: Plan) -> tuple[int, list[float | None]]:
    ctx = make_context(plan.rank(rank), CPU)
    trainer, steps = Trainer(ctx), Loader(ctx).steps(0)
    return ctx.groups.dp.rank, [trainer.step(step, next(steps)).loss for step in range(NUM_STEPS)]


def test_items_that_draw_give_each_replica_of_gossip_the_same_in_a_pipeline() -> None:
    found = []
    for pp in (1, 2):
        plan = drawn(parallel={"dp": 2, "pp": pp}, architecture={"name": "gossip"})
        ranks = run_ranks(2 * pp, losses_by_replica, plan)
        found.append({replica: losses for replica, losses in ranks if losses[0] is not None})
    assert found[0].keys() == found[1].keys() == {0, 1}
    for replica, losses in found[0].items():
        assert losses == pytest.approx(found[1][replica], rel=2e-5)


def leave_generators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_data, "_seed_generators", lambda key: None)


def test_the_comparison_sees_items_that_each_rank_draws_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = one_device()
    leave_generators_alone(monkeypatch)
    monkeypatch.setattr(microbatches, "compared_items", lambda *given: None)
    with pytest.raises(AssertionError) as caught:
        assert_equal(train(drawn(parallel={"pp": 2})), expected)
    assert not isinstance(caught.value, RankError)


def records_of_a_run(rank: int, plan: Plan, folder: Path) -> list[dict[str, Any]]:
    loop.train(make_context(plan.rank(rank), CPU), folder, resume=False)
    lines = (folder / records_name(rank)).read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["type"] == "step"]


def test_a_run_records_the_tokens_that_its_plan_counts(tmp_path: Path) -> None:
    make_folders(tmp_path)
    plan = drawn(train={"num_steps": 2})
    (steps,) = run_ranks(1, records_of_a_run, plan, tmp_path)
    assert [step["num_tokens"] for step in steps] == [plan.batch.num_tokens] * 2 == [16 * SEQ] * 2


# One process.


@pytest.fixture
def loaders() -> Iterator[Callable[..., Loader]]:
    made = []

    def make(dataset: Callable[..., Any], **sections: Any) -> Loader:
        made.append(loader_of(dataset, **sections))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def rows(steps: Iterator[list[microbatches.Microbatch]], count: int) -> list[list[list[int]]]:
    return [batches[0].inputs.tolist() for batches in islice(steps, count)]


def test_an_epoch_draws_anew_and_a_later_start_draws_the_same(loaders: Callable[..., Loader]) -> None:
    num_steps = len(Drawn()) // 4
    loader = loaders(Drawn)
    whole = rows(loader.steps(0), 2 * num_steps)
    assert rows(loader.steps(num_steps + 3), 2) == whole[num_steps + 3 :][:2]
    first, second = (
        {tuple(row) for step in part for row in step} for part in (whole[:num_steps], whole[num_steps:])
    )
    assert len(first) == len(second) == len(Drawn())
    assert first.isdisjoint(second)
    assert rows(loaders(Drawn, seed=8).steps(0), 1) != whole[:1]


class InThisProcess(OwnData):
    """Reads as a thread would: with the generators that training draws from."""

    def __init__(self, config: LaunchConfig) -> None:
        super().__init__(config.data, seed=config.seed, seq_length=SEQ)

    def read(self, picks: Sequence[Pick], *, inputs: bool, targets: bool) -> tuple[Tensor, Tensor]:
        first, second = zip(*(self.item(*pick) for pick in picks), strict=True)
        return torch.stack(first), torch.stack(second)

    def close(self) -> None:
        return


def drawn_beside(steps: Iterator[Any]) -> tuple[list[Any], list[Any]]:
    """Some steps, and what training draws while they are read."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    read, numbers = [], []
    for _ in range(6):
        for _ in range(20):
            numbers += [random.random(), np.random.rand(), float(torch.rand(()))]
            time.sleep(0.0002)
        read += rows(steps, 1)
    return read, numbers


def test_reading_and_training_draw_undisturbed_by_each_other(
    loaders: Callable[..., Loader], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = rows(loaders(Drawn, data={"prefetch_batches": 0}).steps(0), 6)
    _, undisturbed = drawn_beside(iter(()))
    read, numbers = drawn_beside(loaders(Drawn).steps(0))
    assert read == expected
    assert numbers == undisturbed
    monkeypatch.setattr(microbatches, "Reader", InThisProcess)
    disturbed, others = drawn_beside(loaders(Drawn).steps(0))
    assert disturbed != expected
    assert others != undisturbed


def refusal(rank: int, plan: Plan, variable: str) -> str:
    """What a rank says of its dataset when it differs from that of rank 0."""
    os.environ[variable] = str(rank)
    try:
        Loader(make_context(plan.rank(rank), CPU)).close()
    except ConfigError as error:
        return str(error)
    return ""


def test_items_that_each_rank_draws_for_itself_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_generators_alone(monkeypatch)
    first, second = run_ranks(2, refusal, drawn(parallel={"pp": 2}), "none")
    assert first == ""
    assert "item 0 of rank 1 is not item 0 of rank 0 (8 of 8 compared differ)" in second


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("none", ""),
        (SHORTER, "rank 1 has 63 samples, rank 0 64. Read the same files on every rank."),
        (
            SHIFT,
            "item 32 of rank 1 is not item 32 of rank 0 (4 of 8 compared differ). Sort what comes from a set",
        ),
    ],
)
@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 2}], ids=str)
def test_ranks_with_other_samples_are_refused(layout: dict[str, Any], variable: str, message: str) -> None:
    plan = staged_plan(config_of(Numbers, "custom", parallel=layout), [1] * layout.get("pp", 1))
    first, second = run_ranks(2, refusal, plan, variable)
    assert first == ""
    assert message in second
    assert bool(message) == bool(second)


def test_a_stage_that_needs_no_data_does_not_open_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbatches, "Reader", lambda config: pytest.fail("it was opened"))
    plan = staged_plan(config_of(Numbers, "custom", parallel={"pp": 3}), [1, 1, 1])
    steps = Loader(alone(plan, 1)).steps(0)
    assert rows(steps, 1) == [[]]


@pytest.fixture
def reader() -> Iterator[Reader]:
    opened = Reader(config_of(Numbers, "custom"))
    yield opened
    opened.close()


def first_rows(reader: Reader) -> list[float]:
    return reader.read([(0, 3), (0, 4)], inputs=True, targets=False)[0][:, 0].tolist()


def test_a_signal_for_the_rank_does_not_end_its_reader(reader: Reader) -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        os.kill(reader._process, number)
    assert first_rows(reader) == [3.0, 4.0]


def test_a_reader_that_is_killed_is_told(reader: Reader) -> None:
    os.kill(reader._process, signal.SIGKILL)
    with pytest.raises(
        JobError, match=r"reads data\.target=.*:Numbers ended with status -9 \(killed: it may"
    ):
        first_rows(reader)


def hang(self: Numbers, index: int) -> None:
    time.sleep(1)


def test_a_slow_item_shows_where_it_is(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Numbers, "__getitem__", hang)
    slow = Reader(config_of(Numbers, "custom", run={"timeout_s": 1.0}))
    with pytest.raises(ConfigError, match="item 0 is a NoneType, not a pair"):
        slow.fingerprints([0])
    assert re.search(r'test_own_data\.py", line \d+ in hang', capfd.readouterr().err)


def process_of_a_killed_rank(reader_of: Connection) -> None:
    reader_of.send(Reader(config_of(Numbers, "custom"))._process)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_reader_ends_with_its_rank() -> None:
    ours, theirs = multiprocessing.Pipe()
    rank = multiprocessing.get_context("fork").Process(target=process_of_a_killed_rank, args=(theirs,))
    rank.start()
    process = ours.recv()
    rank.join()
    wait_until(lambda: not is_running(process))


def is_running(process: int) -> bool:
    """Also False for a process that has ended and that nobody has asked for."""
    try:
        return "(zombie)" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False


def test_an_item_that_is_wrong_later_ends_the_step_that_needs_it(reader: Reader) -> None:
    with pytest.raises(ConfigError, match="item 64 raised IndexError: off the end"):
        reader.read([(0, 64)], inputs=True, targets=True)


class Converted:
    """Each item is made by a program that is told to end."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        with subprocess.Popen(["sleep", "60"]) as program:
            program.terminate()
        return torch.tensor([program.returncode]), torch.tensor([index])


def test_a_program_that_an_item_starts_ends_when_it_is_told_to() -> None:
    data: dict[str, Any] = {"source": None, "target": f"{__name__}:Converted", "options": {}}
    reader = Reader(make_config(model={"family": "custom"}, data=data))
    inputs, _ = reader.read([(0, 3)], inputs=True, targets=False)
    reader.close()
    assert inputs.tolist() == [[-signal.SIGTERM]]
