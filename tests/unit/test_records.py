import json

from launcher.contract.records import (
    COLLECTIVE_KINDS,
    OTHER,
    PIPELINE,
    RANK_KINDS,
    REPORT_KINDS,
    VERSION,
    Header,
    StepRecord,
)
from launcher.metrics.problems import step_problem
from launcher.typed.read import Reading, plain, read
from tests.helpers.fake_runs import FakeRun
from tests.helpers.objects import inside


def test_header_survives_being_written_and_read():
    header = FakeRun().records(0)[0]
    assert read(Header, json.loads(json.dumps(plain(header))), Reading()) == header


def test_step_survives_being_written_and_read():
    step = FakeRun(kinds_ms={0: {"compute": 5, "tp": 2}}).records(0)[1]
    text = json.dumps(plain(step))
    assert json.dumps(plain(StepRecord(**json.loads(text)))) == text


def test_header_carries_the_version_of_the_format():
    assert plain(FakeRun().records(0)[0])["version"] == VERSION


def test_every_kind_that_a_rank_tells_is_reported_or_split():
    assert set(RANK_KINDS) - set(REPORT_KINDS) == {PIPELINE, *COLLECTIVE_KINDS}


def test_kinds_of_the_report_are_distinct():
    assert len(set(REPORT_KINDS)) == len(REPORT_KINDS)


def test_a_consistent_step_has_no_problem():
    assert step_problem(inside(FakeRun(kinds_ms={0: {"compute": 5, "tp": 2, OTHER: 1}}).records(0)[1])) == ""
