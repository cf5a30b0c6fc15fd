import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.base.errors import ConfigError, LauncherError
from launcher.contract.job import records_name
from launcher.contract.mesh import Mesh
from launcher.report.speedup import compare, to_json
from launcher.report.tables import report_text
from tests.helpers.fake_runs import CUDA, FakeRun
from tests.helpers.objects import there

BASE = FakeRun(kinds_ms={0: {"compute": 90, "replicated": 10}})
DP2 = Mesh(pp=1, dp=2, tp=1)


def dp2(compute_ms: int = 46, **settings: object) -> FakeRun:
    """Two replicas; the second computes 6 ms less and waits that long for the first."""
    kinds = {
        0: {"compute": compute_ms, "replicated": 10, "dp": 0},
        1: {"compute": compute_ms - 6, "replicated": 10, "dp": 6},
    }
    return FakeRun(mesh=DP2, kinds_ms=kinds, **settings)  # type: ignore[arg-type]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return BASE.write(tmp_path / "base")


def notes(run: FakeRun, base: Path) -> str:
    run_dir = run.write(base.parent / "run")
    return "\n".join(compare([run_dir], base).notes)


def test_speedup_and_ledger_come_from_the_records(tmp_path, base):
    result = compare([dp2().write(tmp_path / "run")], base).results[0]
    assert result.median.speedup == pytest.approx(100 / 56)
    lost = {kind: value for kind, value in result.median.devices.items() if value}
    # In units of the run's 56 ms: 86 - 90 ms of compute, 20 - 10 replicated, 6 waited.
    assert lost == pytest.approx({"compute": -4 / 56, "replicated": 10 / 56, "peer_wait": 6 / 56})
    assert sum(lost.values()) == pytest.approx(2 * (1 - there(result.median.efficiency)))


def test_warm_up_steps_are_dropped_as_the_plan_says(tmp_path):
    run = compare([FakeRun(num_steps=7, warmup_steps=3).write(tmp_path / "run")], None).results[0].median.run
    assert [rows[0].step for rows in run.measured] == [3, 4, 5, 6]
    assert run.work.num_steps == 4


def test_warm_up_counts_from_the_start_of_a_resumed_run(tmp_path):
    run = FakeRun(num_steps=7, warmup_steps=2)
    run_dir = run.write(tmp_path / "run")
    path = run_dir / "metrics" / "rank-00000.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[0], *lines[4:]]))
    report = compare([run_dir], None)
    assert [rows[0].step for rows in report.results[0].median.run.measured] == [5, 6]
    assert report.notes[:2] == (
        "run was started 2 times: only steps since its last start are measured.",
        "run lost 4 steps with starts that failed: their time is in no number here.",
    )


def test_a_run_that_went_on_with_other_inputs_is_noted(tmp_path, base):
    run_dir = dp2().write(tmp_path / "run")
    assert not [note for note in compare([run_dir], base).notes if "inputs.json" in note]
    (run_dir / "inputs.json.20250102-030405").touch()
    assert (
        "run went on with other data or code: inputs.json.20250102-030405 and inputs.json tell which."
    ) in compare([run_dir], base).notes


def test_a_resumed_run_with_too_few_steps_to_measure_says_what_to_do(tmp_path):
    run_dir = FakeRun(num_steps=7, warmup_steps=2).write(tmp_path / "run")
    path = run_dir / "metrics" / "rank-00000.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:6], lines[0], *lines[6:]]))
    problem = (
        r"no step to measure: it was started 2 times, its last start made 2 steps, and "
        r"report\.warmup_steps=2 drops the first 2 of a start\..* run at least 3 steps in one"
    )
    with pytest.raises(LauncherError, match=problem):
        compare([run_dir], None)


def test_skipped_updates_are_told(tmp_path):
    path = FakeRun().write(tmp_path / "run") / "metrics" / "rank-00000.jsonl"
    path.write_text(path.read_text().replace('"is_skipped": false', '"is_skipped": true', 2))
    (note,) = (note for note in compare([tmp_path / "run"], None).notes if "skipped" in note)
    assert note == "run skipped the update of 2 steps: by its alarms."


def test_no_step_after_the_warm_up_is_an_error(tmp_path):
    run_dir = FakeRun(num_steps=2, warmup_steps=2).write(tmp_path / "run")
    problem = r"no step to measure: 2 steps .* report\.warmup_steps=2 .* Train at least 3 steps"
    with pytest.raises(LauncherError, match=problem):
        compare([run_dir], None)


def test_missing_last_rank_is_an_error(tmp_path):
    run_dir = dp2().write(tmp_path / "run")
    (run_dir / "metrics" / "rank-00001.jsonl").unlink()
    with pytest.raises(LauncherError, match="records of 1 trainer rank, but the plan has 2"):
        compare([run_dir], None)


def test_folder_that_is_no_run_is_an_error(tmp_path):
    with pytest.raises(
        LauncherError, match=r"holds no plan\.json\. Give a run directory, such as runs/quickstart"
    ):
        compare([tmp_path / "nowhere"], None)


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 1}', '{"version": 99}'])
def test_broken_plan_is_an_error_that_names_the_run(tmp_path, base, text):
    (base / "plan.json").write_text(text)
    with pytest.raises(LauncherError, match=r"base/plan\.json cannot be read as a plan: "):
        compare([base], None)


def test_repeats_of_one_layout_are_one_result_with_its_median_run(tmp_path, base):
    paths = [dp2(compute).write(tmp_path / f"run{compute}") for compute in (60, 40, 50)]
    (result,) = compare(paths, base).results
    assert result.speedups == pytest.approx((100 / 70, 100 / 60, 100 / 50))
    assert result.median.run.name == "run50"


def test_median_of_an_even_number_of_runs_is_a_run_that_happened(tmp_path, base):
    paths = [dp2(compute).write(tmp_path / f"run{compute}") for compute in (40, 50)]
    assert compare(paths, base).results[0].median.run.name == "run50"


def test_a_sum_in_two_levels_is_a_layout_of_its_own(tmp_path, base):
    two_levels = dp2(config={"architecture": {"options": {"reduce": "hierarchical"}}})
    runs = [dp2().write(tmp_path / "a"), two_levels.write(tmp_path / "b")]
    layouts = [result.median.run.layout for result in compare(runs, base).results]
    assert layouts == ["dp=2 tp=1 pp=1", "dp=2 tp=1 pp=1 reduce=hierarchical"]


def test_layouts_are_separate_results(tmp_path, base):
    tp2 = FakeRun(mesh=Mesh(pp=1, dp=1, tp=2), kinds_ms={0: {"compute": 60}, 1: {"compute": 60}})
    report = compare([dp2().write(tmp_path / "dp"), tp2.write(tmp_path / "tp")], base)
    assert [result.median.run.layout for result in report.results] == ["dp=2 tp=1 pp=1", "dp=1 tp=2 pp=1"]


def test_one_run_given_twice_is_no_repetition(tmp_path, base):
    with pytest.raises(LauncherError, match="is given twice: one run is no repetition of itself"):
        compare([base, tmp_path / "." / "base"], None)


def test_baseline_is_taken_from_the_run_that_names_it(tmp_path, base):
    run_dir = dp2().write(tmp_path / "run", baseline=base)
    assert compare([run_dir], None).bases[0].path == base


def test_baseline_may_be_relative_to_the_run(tmp_path, base):
    run_dir = dp2().write(tmp_path / "run", baseline="../base")
    assert compare([run_dir], None).results[0].median.speedup == pytest.approx(100 / 56)


def test_base_that_is_given_goes_before_the_named_one(tmp_path, base):
    other = FakeRun(kinds_ms={0: {"compute": 200}}).write(tmp_path / "other")
    run_dir = dp2().write(tmp_path / "run", baseline=base)
    assert compare([run_dir], other).results[0].median.speedup == pytest.approx(200 / 56)


def test_repeats_are_compared_each_with_its_own_baseline(tmp_path, base):
    slower = FakeRun(kinds_ms={0: {"compute": 112}}).write(tmp_path / "slower")
    first = dp2(46).write(tmp_path / "first", baseline=base)
    second = dp2(46).write(tmp_path / "second", baseline=slower)
    assert compare([first, second], None).results[0].speedups == pytest.approx((100 / 56, 2.0))


def test_without_a_baseline_there_is_no_speedup_and_the_reason_is_given(tmp_path):
    report = compare([dp2().write(tmp_path / "run")], None)
    assert report.results[0].median.speedup is None
    assert report.why_no_base.endswith("run names no baseline; give one with --base RUN")
    assert sum(report.results[0].median.devices.values()) == pytest.approx(2)


def test_named_baseline_that_is_gone_is_said(tmp_path):
    report = compare([dp2().write(tmp_path / "run", baseline="/nowhere/base")], None)
    assert report.why_no_base.endswith("run, /nowhere/base, is gone; give another with --base RUN")


def test_broken_job_file_is_an_error(tmp_path, base):
    (base / "job.json").write_text("{")
    with pytest.raises(LauncherError, match=r"job\.json is not JSON"):
        compare([base], None)


def test_runs_without_a_job_file_have_no_baseline(base):
    (base / "job.json").unlink()
    assert compare([base], None).bases == ()


@pytest.mark.parametrize(
    ("group", "setting", "given", "other"),
    [
        ("model", "num_layers", 8, 4),
        ("data", "source", "package:other/*.txt", r"package:corpus/\*\.txt"),
        ("precision", "compute", "bf16", "fp32"),
        ("batch", "seq_length", 32, 16),
        ("device", "name", "h100", "cpu"),
    ],
)
def test_runs_that_differ_in_what_they_compute_are_refused(tmp_path, base, group, setting, given, other):
    run_dir = dp2(config={group: {setting: given}}).write(tmp_path / "run")
    with pytest.raises(
        ConfigError, match=rf"{group}\.{setting}=.*: base has {other}, and a speedup"
    ) as caught:
        compare([run_dir], base)
    assert "Compare with one that has the same. [run]" in str(caught.value)


def test_every_difference_is_reported_at_once(tmp_path, base):
    changes = {"model": {"num_layers": 8, "num_heads": 8}, "precision": {"compute": "bf16"}}
    with pytest.raises(ConfigError) as caught:
        compare([dp2(config=changes).write(tmp_path / "run")], base)
    paths = [fault.path for fault in caught.value.faults]
    assert paths == ["model.num_heads", "model.num_layers", "precision.compute"]


def test_runs_that_differ_are_refused_without_a_base_too(tmp_path, base):
    run_dir = dp2(config={"model": {"num_layers": 8}}).write(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"model\.num_layers=8: base has 4"):
        compare([base, run_dir], None)


@pytest.mark.parametrize(
    "changes",
    [{"model": {"name": "mine"}}, {"data": {"cache_dir": "elsewhere"}}, {"executor": {"name": "slurm"}}],
)
def test_labels_and_places_do_not_hinder_a_comparison(tmp_path, base, changes):
    assert compare([dp2(config=changes).write(tmp_path / "run")], base).results[0].median.speedup


def test_serial_fraction_counts_the_optimizer_of_every_replica(tmp_path, base):
    result = compare([dp2().write(tmp_path / "run")], base).results[0]
    assert result.median.serial_fraction == pytest.approx(0.1)


def test_sharded_optimizer_is_not_serial(tmp_path, base):
    run = dp2(config={"parallel": {"zero_stage": 1}})
    assert compare([run.write(tmp_path / "run")], base).results[0].median.serial_fraction == 0


def test_karp_flatt_is_given_for_strong_scaling_only(tmp_path, base):
    strong = compare([dp2().write(tmp_path / "strong")], base).results[0]
    weak = compare([dp2(global_size=16).write(tmp_path / "weak")], base).results[0]
    assert (strong.median.scaling, weak.median.scaling) == ("strong", "weak")
    assert strong.median.karp_flatt == pytest.approx((0.56 - 0.5) / 0.5)
    assert weak.median.karp_flatt is None


def test_cores_shared_by_too_many_ranks_are_noted(base):
    text = notes(dp2(header={"num_cores": 2, "num_threads": 2}), base)
    assert "run: 2 ranks with 4 threads in all share 2 cores on node0, so ranks wait for cores" in text


def test_ranks_on_different_devices_are_noted(tmp_path, base):
    run_dir = dp2().write(tmp_path / "run")
    for rank, device in enumerate(("A100-SXM4-40GB", "A100-SXM4-80GB")):
        records = run_dir / records_name(rank)
        records.write_text(records.read_text().replace("Fake CPU", device))
    assert (
        "run has ranks on different devices (1 of A100-SXM4-40GB, 1 of A100-SXM4-80GB): the others wait for "
        "the slowest."
    ) in compare([run_dir], base).notes


def test_cores_that_bound_the_speedup_are_noted(tmp_path):
    base = FakeRun(header={"num_cores": 2, "num_threads": 2}).write(tmp_path / "base")
    text = notes(dp2(header={"num_cores": 2}), base)
    assert (
        "The base keeps 2 cores busy and run has 2 cores: S can hardly exceed 1, whatever the layout." in text
    )
    assert "num_threads differs: 1 in run, 2 in the base base." in text


def test_enough_cores_need_no_note(base):
    assert notes(dp2(), base) == ""


def test_cores_do_not_bound_an_accelerator(tmp_path):
    base = FakeRun(config=CUDA).write(tmp_path / "base")
    assert "core" not in notes(dp2(config=CUDA, header={"num_cores": 1, "num_threads": 4}), base)


def test_idle_devices_are_noted_and_counted(tmp_path):
    base = FakeRun(kinds_ms=BASE.kinds_ms, config=CUDA).write(tmp_path / "base")
    report = compare([dp2(num_devices=4, config=CUDA).write(tmp_path / "run")], base)
    assert report.notes == ("run was allocated 4 devices and trains on 2: S is divided by all of them.",)
    assert report.results[0].median.efficiency == pytest.approx(100 / 56 / 4)


def test_on_the_cpu_a_device_is_a_process_and_none_is_idle(tmp_path, base):
    report = compare([dp2(num_devices=8).write(tmp_path / "run")], base)
    assert report.results[0].median.efficiency == pytest.approx(100 / 56 / 2)


def test_base_on_several_devices_is_noted(tmp_path):
    base = dp2().write(tmp_path / "base")
    four = FakeRun(mesh=Mesh(pp=1, dp=4, tp=1), kinds_ms={rank: {"compute": 28} for rank in range(4)})
    report = compare([four.write(tmp_path / "run")], base)
    assert report.results[0].median.speedup == pytest.approx(4.0)
    assert "The base base ran on 2 devices: S counts its efficiency as 1." in report.notes


def test_inexact_architectures_are_noted(base):
    assert "run is not equal to one device by design" in notes(dp2(exact=False), base)


def test_what_replicas_with_weights_of_their_own_differ_by_is_noted(tmp_path, base):
    run_dir = dp2(exact=False).write(tmp_path / "run")
    for rank, far in enumerate((0.002, 0.0031)):
        path = run_dir / "metrics" / f"rank-{rank:05d}.jsonl"
        header, *lines = path.read_text().splitlines()
        lines = [json.dumps(json.loads(line) | {"disagreement": far}) for line in lines]
        path.write_text("\n".join([header, *lines]) + "\n")
    text = "run: the weights of its replicas differ by up to 0.0031 of their size from the average"
    assert any(note.startswith(text) for note in compare([run_dir], base).notes)


def test_other_settings_that_differ_are_noted(base):
    text = notes(dp2(config={"train": {"eval_interval": 2}, "optim": {"lr": 0.5}}), base)
    assert "beside the layout: optim.lr (0.5, base: 0.001), train.eval_interval (2, base: 0)." in text


def test_time_between_the_steps_is_noted(tmp_path, base):
    run_dir = FakeRun().write(tmp_path / "run")
    path = run_dir / "metrics" / "rank-00000.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[1:]:
        line["start_ns"] = line["start_ns"] * 5 // 4
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert compare([run_dir], base).notes == (
        "run: 20% of the wall time lies between the steps and is in no number here.",
    )


def test_torn_lines_and_incomplete_steps_are_noted(tmp_path, base):
    run_dir = dp2().write(tmp_path / "run")
    path = run_dir / "metrics" / "rank-00001.jsonl"
    path.write_text(path.read_text()[:-20])
    assert compare([run_dir], base).notes == (
        "run leaves out 1 half-written line of killed ranks.",
        "run leaves out 1 step that not every rank recorded.",
    )


def test_final_loss_is_the_last_evaluation(tmp_path):
    final = compare([FakeRun(eval_loss=2.25).write(tmp_path / "run")], None).results[0].median.run.final_loss
    assert final is not None
    assert (final.kind, final.num_steps, final.loss) == ("evaluation", 6, 2.25)


def test_final_loss_without_evaluation_is_of_the_last_step(tmp_path):
    run = FakeRun(mesh=Mesh(pp=2, dp=1, tp=1), kinds_ms={0: {"compute": 1}, 1: {"compute": 1}})
    final = compare([run.write(tmp_path / "run")], None).results[0].median.run.final_loss
    assert final is not None
    assert (final.kind, final.num_steps, final.loss) == ("training", 6, 2.5)


def test_losses_are_compared_over_the_steps_that_a_shorter_base_made(tmp_path, base):
    longer, equal = dp2(num_steps=9).write(tmp_path / "longer"), dp2().write(tmp_path / "equal")
    line = "  training loss after the 6 steps of the base: 2.5000 in longer, 2.5000 in base\n"
    assert line in report_text(compare([longer], base))
    assert "of the base: " not in report_text(compare([equal], base))
    (result,) = json.loads(to_json(compare([longer], base)))["results"]
    assert (result["base_steps"], result["losses_in_base_steps"]) == (6, [2.5, 2.5])


def test_that_a_base_is_the_first_steps_of_a_longer_training_is_no_difference(tmp_path):
    train = {"report": {"baseline_steps": 4}}
    base = replace(BASE, config=train).write(tmp_path / "base")
    longer = dp2(num_steps=9, config=train).write(tmp_path / "longer")
    differing = [note for note in compare([longer], base).notes if "Settings that differ" in note]
    assert not any("train.num_steps" in note for note in differing)
    others = dp2(num_steps=9, config={"report": {"baseline_steps": 5}}).write(tmp_path / "others")
    assert any("train.num_steps (7, base: 6)" in note for note in compare([others], base).notes)


def test_json_holds_the_numbers_of_the_table(tmp_path, base):
    data = json.loads(to_json(compare([dp2().write(tmp_path / "run")], base)))
    (result,) = data["results"]
    assert result["speedup"] == pytest.approx(100 / 56)
    assert sum(result["lost_devices"].values()) == pytest.approx(2 - result["speedup"])
    assert result["predicted"]["bubble_simulated"] == 0.25
    assert data["bases"][0]["run"] == str(base)


def test_json_without_a_base_holds_occupied_devices(base):
    (result,) = json.loads(to_json(compare([base], None)))["results"]
    assert (result["speedup"], result["base"]) == (None, None)
    assert result["devices"]["compute"] == 0.9


def test_diverged_loss_is_null_in_json(tmp_path):
    run_dir = FakeRun(eval_loss=math.nan).write(tmp_path / "run")
    (result,) = json.loads(to_json(compare([run_dir], None)))["results"]
    assert result["median"]["final_loss"]["loss"] is None


def test_a_speedup_beyond_the_devices_is_put_down_to_a_busy_machine(base):
    fast = compare([dp2(20).write(base.parent / "fast")], base)
    assert any("fast is faster than its devices can explain" in note for note in fast.notes)
    usual = compare([dp2(46).write(base.parent / "usual")], base)
    assert not any("faster than its devices" in note for note in usual.notes)
