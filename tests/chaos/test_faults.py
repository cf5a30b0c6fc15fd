"""A few of the chaos suite's faults; ``python -m tests.chaos`` strikes with all of them."""

from __future__ import annotations

import random

import pytest

from tests.chaos.__main__ import moved
from tests.chaos.faults import FAULTS, INTERVAL, SABOTAGE
from tests.chaos.runs import Suite, Tried, table

QUICK = ("SIGKILL in a checkpoint: ahead of the rename", "launcher SIGKILL")
BY_NAME = {fault.name: fault for fault in FAULTS}


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return Suite(folder=tmp_path_factory.mktemp("chaos"))


@pytest.mark.parametrize("name", QUICK)
def test_a_run_that_is_struck_goes_on_and_computes_the_same(suite, name):
    tried = suite.try_fault(BY_NAME[name], "local", 0)
    assert (tried.is_equal, tried.outcome) == (True, "resumed")
    assert tried.end_s < 60


def test_a_run_that_leaves_out_one_update_is_told_apart(suite):
    tried = suite.try_fault(SABOTAGE[0], "local", 0)
    assert (tried.is_equal, tried.outcome, tried.is_right) == (False, "trained on", True)


def test_there_are_thirty_faults_and_each_has_a_name_of_its_own():
    assert len(BY_NAME) == len(FAULTS) > len(SABOTAGE) + 30


def test_the_table_counts_the_tries_of_a_fault_and_shows_what_went_wrong():
    fault = BY_NAME["scancel"]
    good = Tried(fault=fault, place="slurm", is_equal=True, end_s=2.25, outcome="resumed")
    bad = Tried(fault=fault, place="slurm", is_equal=False, end_s=None, outcome="WRONG: it ended with 1")
    _, line = table([good, bad]).splitlines()
    assert line.split(maxsplit=8) == [
        *("scancel", "slurm", "2", "1", "of", "2", "2.2", "s", "WRONG: it ended with 1"),
    ]
    assert (good.is_right, bad.is_right) == (True, False)


def test_a_seed_moves_a_fault_but_not_before_the_first_checkpoint():
    steps = {moved(BY_NAME["rank 0 SIGKILL"], random.Random(seed)).step for seed in range(1, 50)}
    assert len(steps) > 5
    assert min(steps) > INTERVAL
