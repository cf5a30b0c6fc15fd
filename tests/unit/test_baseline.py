import json
from dataclasses import replace

import pytest

from launcher.app.baseline import _what, find_baseline, named_baseline
from launcher.app.planning import one_device
from launcher.base.errors import ConfigError
from launcher.contract.optim.rates import learning_rate
from launcher.plan.build import build
from launcher.plan.text import plan_text
from launcher.runs.fingerprint import code_sha256, fingerprint
from launcher.runs.store import RunDirectory

FACTS = {"python": "3.11.7", "torch": "2.13.0", "cpu_model": "a", "num_cores": 2, "hostname": "here"}


def store_run(path, phase="succeeded", **job):
    path.mkdir(parents=True)
    directory = RunDirectory(path)
    directory.write("job.json", json.dumps({"fingerprint": "f", "world_size": 1} | job))
    directory.write_status(phase)
    return path


def test_the_newest_finished_run_on_one_rank_with_the_fingerprint_is_found(tmp_path):
    store_run(tmp_path / "old")
    newest = store_run(tmp_path / "new")
    store_run(tmp_path / "failed", phase="failed")
    store_run(tmp_path / "wide", world_size=2)
    store_run(tmp_path / "other", fingerprint="g")
    (tmp_path / "a file").write_text("")
    (tmp_path / "no run").mkdir()
    assert find_baseline([tmp_path], "f") == newest


def test_without_any_run_there_is_no_baseline(tmp_path):
    assert find_baseline([tmp_path / "absent"], "f") is None
    assert find_baseline([tmp_path], "f") is None


def test_a_named_baseline_must_have_finished(tmp_path):
    path = store_run(tmp_path / "half", phase="cancelled")
    with pytest.raises(
        ConfigError, match=r"report\.baseline=.*/half: .*; that run is cancelled\. Set .*=auto"
    ):
        named_baseline(str(path))
    with pytest.raises(ConfigError, match=r"report\.baseline=speed: .*; it is not a run directory"):
        named_baseline("speed")
    assert named_baseline(str(store_run(tmp_path / "whole"))) == tmp_path / "whole"


def test_the_baseline_is_the_same_batch_in_the_same_microbatches_on_one_device(make_plan):
    plan = make_plan("parallel.dp=2", "parallel.pp=2", "parallel.tp=2", "batch.micro_size=2")
    alone = build(one_device(plan))
    assert alone.world_size == 1
    assert alone.config.cluster.devices_per_node == 1
    assert (alone.batch.global_size, alone.batch.micro_size) == (16, 2)
    assert (plan.batch.num_microbatches, alone.batch.num_microbatches) == (4, 8)
    assert alone.config.report.baseline == "none"


@pytest.mark.parametrize(
    ("overrides", "num_steps", "decay_steps"),
    [
        ((), 205, 1000),
        (("report.baseline_steps=20", "report.warmup_steps=3"), 23, 1000),
        (("report.baseline_steps=995",), 1000, None),
        (("report.baseline_steps=994",), 999, 1000),
        (("optim.decay_steps=700",), 205, 700),
        (("optim.decay=constant",), 205, None),
        (("optim.warmup_steps=1000",), 205, None),
    ],
)
def test_of_a_long_training_the_baseline_is_the_first_steps_at_the_same_learning_rates(
    make_plan, overrides, num_steps, decay_steps
):
    plan = make_plan("train.num_steps=1000", "parallel.dp=2", *overrides)
    alone = build(one_device(plan))
    assert (alone.config.train.num_steps, alone.config.optim.decay_steps) == (num_steps, decay_steps)
    assert fingerprint(alone, FACTS) == fingerprint(plan, FACTS)
    for step in range(num_steps):
        mine, theirs = (learning_rate(p.config.optim, step, p.config.train.num_steps) for p in (alone, plan))
        assert mine == theirs


def test_the_plan_says_how_much_of_a_long_training_its_baseline_is(make_plan):
    line = "baseline on one device: the first 205 steps"
    assert line in plan_text(make_plan("train.num_steps=1000", "parallel.dp=2"))
    assert line not in plan_text(make_plan("train.num_steps=205", "parallel.dp=2"))
    assert line not in plan_text(make_plan("train.num_steps=1000", "parallel.dp=2", "report.baseline=none"))


def test_of_a_training_that_goes_on_with_an_optimizer_the_baseline_is_its_own_first_steps(make_plan):
    begins = ("train.init_from=r/checkpoints/step-00000300", "train.init_optimizer=true")
    plan = make_plan("train.num_steps=1000", "parallel.dp=2", *begins)
    alone = build(one_device(plan))
    assert alone.config.train.num_steps == 505
    assert fingerprint(alone, FACTS) == fingerprint(plan, FACTS)
    assert _what(alone) == "the same training on one device, its first 205 steps"
    assert "baseline on one device: the first 205 steps" in plan_text(plan)


def test_an_interleaved_plan_has_a_baseline_too(make_plan):
    alone = build(one_device(make_plan("parallel=interleaved")))
    assert (alone.schedule.name, alone.config.parallel.num_chunks) == ("1f1b", 1)


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.pp=4",),
        ("parallel.dp=2",),
        ("parallel.dp=2", "parallel.bucket_bytes=1000"),
        ("run.root=/elsewhere",),
        ("data.cache_dir=/elsewhere",),
        ("report.baseline=none",),
        ("name=other",),
    ],
)
def test_how_the_work_is_spread_and_kept_is_no_part_of_the_fingerprint(make_plan, overrides):
    assert fingerprint(make_plan(*overrides), FACTS) == fingerprint(make_plan(), FACTS)


def test_the_baseline_has_the_fingerprint_of_its_run(make_plan):
    plan = make_plan("parallel.dp=2", "parallel.tp=2")
    assert fingerprint(build(one_device(plan)), FACTS) == fingerprint(plan, FACTS)


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.num_layers=8",),
        ("batch.seq_length=64",),
        ("batch.global_size=32",),
        ("batch.micro_size=4",),
        ("optim.lr=5e-4",),
        ("train.num_steps=7",),
        ("train.num_steps=1000",),
        ("seed=1",),
        ("precision=bf16",),
        ("parallel.recompute=full",),
    ],
)
def test_another_training_has_another_fingerprint(make_plan, overrides):
    assert fingerprint(make_plan(*overrides), FACTS) != fingerprint(make_plan(), FACTS)


@pytest.mark.parametrize("changed", [{"torch": "2.14.0"}, {"num_cores": 4}, {"cpu_model": "b"}])
def test_another_environment_has_another_fingerprint(make_plan, changed):
    assert fingerprint(make_plan(), FACTS | changed) != fingerprint(make_plan(), FACTS)


def test_a_changed_model_of_the_users_own_is_other_code(make_plan, tmp_path):
    plan = make_plan()
    config = replace(plan.config, model=replace(plan.config.model, target="mine.net:build"))
    own = replace(plan, config=config, source_roots=(str(tmp_path),))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "net.py").write_text("a = 1")
    before = code_sha256(own)
    assert before != code_sha256(plan)
    (tmp_path / "unrelated.py").write_text("")
    assert code_sha256(own) == before
    (tmp_path / "mine" / "net.py").write_text("import beside")
    (tmp_path / "beside.py").write_text("")
    changed = code_sha256(own)
    assert changed != before
    (tmp_path / "beside.py").write_text("a = 2")
    assert code_sha256(own) != changed
