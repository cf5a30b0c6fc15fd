"""`trireme sweep` on this machine, with the processes of the ranks replaced by an outcome."""

import json
import os
import re
import signal
from types import SimpleNamespace

import pytest

from launcher.app import lifecycle
from launcher.app.request import Request
from launcher.app.sweep import planning
from launcher.app.sweep.run import run_sweep
from launcher.base.errors import ConfigError, LauncherError
from launcher.base.files import read_json
from launcher.cli.main import main
from launcher.contract.job import JobState
from launcher.contract.plan import Plan
from launcher.typed.read import plain
from tests.helpers.fake_runs import FakeRun, write_records

SMALL = ("batch.micro_size=1", "batch.global_size=4", "train.num_steps=8")
FAILED = JobState(phase="failed", exit_code=3, reason="ended with exit code 3", rank=1)


def record(path):
    """Writes what the ranks of a run would have measured: 100 ms of work, shared by them."""
    plan = Plan.from_json((path / "plan.json").read_text())
    kinds = {rank: {"compute": 96 // plan.world_size} for rank in range(plan.world_size)}
    fake = FakeRun(mesh=plan.mesh, num_steps=8, warmup_steps=5, global_size=4, kinds_ms=kinds)
    for rank in range(plan.world_size):
        write_records(path, rank, [plain(item) for item in fake.records(rank)])


@pytest.fixture
def sweep(tmp_path, monkeypatch, stand_in_corpus):
    """Runs sweeps in a folder; ``ends`` says how runs end by a part of their directory's name, ``reports``
    what a rank of them leaves."""
    stage = SimpleNamespace(starts=[], ends={}, reports={}, folder=tmp_path / "runs" / "mine")

    def follow(executor, script, stop, on_tick, warn):
        path = tmp_path / script.run_dir
        stage.starts.append(path.name)
        stage.argv = script.argv
        stage.num_recorded = len(list(stage.folder.glob("*/job.sh")))
        state = next((end for part, end in stage.ends.items() if part in path.name), None)
        if state is None:
            record(path)
            state = JobState(phase="succeeded", exit_code=0)
        for part, report in stage.reports.items():
            if part in path.name:
                (path / "exit" / f"rank-{report['rank']}.json").write_text(json.dumps(report))
        if state.phase == "cancelled":
            stop.receive(signal.SIGINT, None)
        return state

    def run(*words, recipe="quickstart"):
        return main(["sweep", "run", recipe, *SMALL, f"run.dir={tmp_path}/runs/mine", *words])

    monkeypatch.setattr(lifecycle, "follow", follow)
    monkeypatch.chdir(tmp_path)
    stage.run = run
    return stage


def phases(folder):
    return {path.parent.name: read_json(path)["phase"] for path in sorted(folder.glob("*/status.json"))}


def table(output):
    """The rows of the last table by their points."""
    _, *rows = output.rpartition("  point ")[2].partition("\n\n")[0].splitlines()
    return {row.split()[0]: row.split()[1:] for row in rows if "=" in row}


def test_points_run_one_after_the_other_and_the_table_sets_measured_beside_predicted(sweep, capsys):
    assert sweep.run("parallel.pp=1,2,4") == 0
    assert sweep.starts == ["0-pp_1", "1-pp_2", "2-pp_4"]
    rows = table(capsys.readouterr().out)
    assert rows["pp=1"][0] == "5.33K"  # 4 samples of 128 tokens in 96 ms
    assert rows["pp=2"][0] == "10.7K"
    assert [rows[f"pp={pp}"][2:5] for pp in (1, 2, 4)] == [
        [speedup, "100", "%"] for speedup in ("1.00", "2.00", "4.00")
    ]


def test_every_point_is_recorded_before_the_first_starts_and_its_ranks_see_no_sweep(sweep):
    sweep.run("parallel.pp=2,4", "--no-baseline")
    assert sweep.num_recorded == 2
    assert not any("parallel" in word or "," in word for word in sweep.argv)
    job = read_json(sweep.folder / "1-pp_4" / "job.json")
    assert job["overrides"][-1] == "parallel.pp=4"
    assert read_json(sweep.folder / "1-pp_4" / "plan.json")["config"]["run"]["dir"] == str(
        sweep.folder / "1-pp_4"
    )


def test_points_share_one_baseline(sweep, tmp_path):
    sweep.run("parallel.pp=2,4")
    (base, *points) = sweep.starts
    assert base.startswith("quickstart-baseline-")
    assert points == ["0-pp_2", "1-pp_4"]
    named = {read_json(sweep.folder / name / "job.json")["baseline"] for name in points}
    assert named == {f"../../{base}"}


def test_a_point_on_one_device_runs_first_and_is_the_baseline_of_the_others(sweep, capsys):
    sweep.run("parallel.pp=4,1")
    assert sweep.starts == ["1-pp_1", "0-pp_4"]
    assert read_json(sweep.folder / "0-pp_4" / "job.json")["baseline"] == "../1-pp_1"
    assert "baseline, on one device: the point pp=1\n" in capsys.readouterr().out


def test_one_that_fails_is_told_at_once_and_ends_no_other(sweep, capsys):
    sweep.ends = {"pp_1": FAILED, "schedule_gpipe": FAILED}
    assert sweep.run("parallel.pp=2,4", "parallel.schedule=gpipe,1f1b", "--no-baseline") == 1
    captured = capsys.readouterr()
    assert captured.err.count("rank 1 failed: ended with exit code 3") == 2
    assert list(phases(sweep.folder).values()) == ["failed", "succeeded"] * 2
    assert "pp=4 schedule=gpipe: rank 1 ended with exit code 3\n" in captured.out
    assert "4 points: 2 failed, 2 succeeded\n  trireme sweep retry runs/mine\n" in captured.out


def test_one_that_ends_out_of_memory_as_planned_is_a_failure_unless_it_is_to_show_that(sweep, capsys):
    full = {"rank": 1, "time": 1.0, "error_type": "out of memory", "message": "no more", "traceback": "in x"}
    forced = ("parallel.pp=2,4", "device.memory_bytes=1", "device.memory_check=warn", "--no-baseline")
    sweep.ends, sweep.reports = {"pp_4": FAILED}, {"pp_4": full}
    assert sweep.run(*forced) == 1
    assert "pp=4: rank 1: out of memory: no more\n" in capsys.readouterr().out
    assert main(["wait", str(sweep.folder)]) == 1
    assert "2 points: 1 succeeded, 1 failed\n" in capsys.readouterr().out
    sweep.folder.rename(sweep.folder.with_name("first"))
    assert sweep.run(*forced, "report.claims=true") == 0
    captured = capsys.readouterr()
    assert "rank 1: out of memory: no more\nas its plan had warned\n" in captured.out
    assert "Traceback" not in captured.err
    assert re.search(r"\n  pp=4 .* warns +out of memory on rank 1\n", captured.out)
    assert captured.out.endswith("\n2 points: 1 succeeded, 1 out of memory as planned\n")
    assert main(["wait", str(sweep.folder)]) == 0
    assert capsys.readouterr().out.startswith("2 points: 1 succeeded, 1 out of memory as planned\n")
    assert main(["sweep", "best"]) == 0
    assert "not measured" not in capsys.readouterr().out


def test_a_failed_baseline_ends_no_point_and_is_tried_once(sweep, capsys):
    sweep.ends = {"baseline": FAILED}
    assert sweep.run("parallel.pp=2,4") == 1
    assert [name.partition("-2")[0] for name in sweep.starts] == ["quickstart-baseline", "0-pp_2", "1-pp_4"]
    assert "the baseline failed" in capsys.readouterr().err


def test_retry_runs_again_only_what_has_not_succeeded_and_keeps_what_was_left(sweep, capsys):
    sweep.ends = {"pp_2": FAILED}
    sweep.run("parallel.pp=1,2,4")
    (sweep.folder / "1-pp_2" / "logs" / "rank-0.log").write_text("the first attempt\n")
    sweep.ends, sweep.starts[:] = {}, []
    assert main(["sweep", "retry", "mine"]) == 0
    assert sweep.starts == ["1-pp_2"]
    assert set(phases(sweep.folder).values()) == {"succeeded"}
    (aside,) = (sweep.folder / "1-pp_2").glob("logs.*")
    assert (aside / "rank-0.log").read_text() == "the first attempt\n"
    assert main(["sweep", "retry", "mine"]) == 0
    assert capsys.readouterr().out.endswith("runs/mine: no point has failed or is left to start\n")


def test_retry_makes_a_baseline_again_that_failed(sweep, capsys):
    sweep.ends = {"baseline": FAILED}
    sweep.run("parallel.pp=2,4")
    sweep.ends, sweep.starts[:] = {}, []
    assert main(["sweep", "retry", "mine", "--no-baseline"]) == 0
    assert sweep.starts == []
    assert main(["sweep", "retry", "mine"]) == 0
    (base,) = sweep.starts
    assert base.startswith("quickstart-baseline-")
    named = {read_json(sweep.folder / name / "job.json")["baseline"] for name in ("0-pp_2", "1-pp_4")}
    assert named == {f"../../{base}"}
    output = capsys.readouterr().out
    assert "the failed baseline of 2 points again\n" in output
    assert table(output)["pp=4"][2] == "4.00"


def test_retry_makes_no_baseline_that_nobody_wanted(sweep, capsys):
    sweep.run("parallel.pp=2,4", "--no-baseline")
    sweep.starts[:] = []
    assert main(["sweep", "retry", "mine"]) == 0
    assert sweep.starts == []


def test_the_command_that_retries_quotes_a_path_with_a_space(sweep, capsys):
    sweep.ends = {"pp_2": FAILED}
    assert main(["sweep", "run", "quickstart", *SMALL, "parallel.pp=2,4", "run.dir='my runs'"]) == 1
    assert "  trireme sweep retry 'my runs'\n" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"or go on with: trireme sweep retry 'my runs'"):
        run_sweep(Request(recipe="quickstart", overrides=(*SMALL, "parallel.pp=2,4", "run.dir='my runs'")))


def test_retry_goes_on_from_what_is_saved(sweep):
    sweep.ends = {"pp_2": FAILED}
    sweep.run("parallel.pp=2,4", "train.checkpoint_interval=2", "--no-baseline")
    (sweep.folder / "0-pp_2" / "checkpoints" / "step-00000004").mkdir(parents=True)
    sweep.ends = {}
    assert main(["sweep", "retry", "mine", "--no-baseline"]) == 0
    assert sweep.argv[-1] == "--resume"


def test_a_retry_that_accepts_changed_inputs_has_its_ranks_write_them_down_anew(sweep):
    sweep.ends = {"pp_2": FAILED}
    sweep.run("parallel.pp=2,4", "--no-baseline")
    inputs = sweep.folder / "0-pp_2" / "inputs.json"
    inputs.write_text("{}")
    main(["sweep", "retry", "mine", "--no-baseline"])
    assert inputs.is_file()
    main(["sweep", "retry", "mine", "--no-baseline", "--accept-changed-inputs"])
    assert not inputs.is_file()
    assert len(list(inputs.parent.glob("inputs.json.*"))) == 1


def test_ctrl_c_ends_the_running_point_and_says_how_to_go_on(sweep, capsys):
    sweep.ends = {"pp_2": JobState(phase="cancelled", exit_code=130, reason="SIGINT")}
    assert sweep.run("parallel.pp=1,2,4") == 130
    assert sweep.starts == ["0-pp_1", "1-pp_2"]
    captured = capsys.readouterr()
    assert captured.err == "stopped by SIGINT: all ranks have ended.\n"
    assert captured.out.endswith(
        "3 points: 1 succeeded, 1 cancelled, 1 not started\n  trireme sweep retry runs/mine\n"
    )
    for status in sweep.folder.glob("*/status.json"):  # as if that launcher had ended, as it has
        status.write_text(status.read_text().replace(f'"pid": {os.getpid()}', '"pid": 99999999'))
    sweep.ends, sweep.starts[:] = {}, []
    assert main(["sweep", "retry"]) == 0
    assert sweep.starts == ["1-pp_2", "2-pp_4"]


def test_points_that_cannot_run_are_skipped_with_their_reasons(sweep, capsys):
    assert sweep.run("parallel.pp=2,3", "--no-baseline") == 0
    output = capsys.readouterr().out
    assert "1 refused\n  1  parallel.pp=3: the model has 4 layers" in output
    assert "1 of 2 points to run = parallel.pp (2), in runs/mine\n" in output
    assert output.endswith("1 point: 1 succeeded; 1 more refused\n")
    (refused,) = json.loads((sweep.folder / "sweep.json").read_text())["refused"]
    assert refused["reasons"][0].startswith("parallel.pp=3: ")


def test_when_no_point_can_run_nothing_is_made_and_the_reasons_are_counted(sweep, capsys):
    assert sweep.run("parallel.pp=3,5", "parallel.schedule=1f1b,gpipe") == 2
    output = capsys.readouterr().out
    assert "\n4 refused\n" in output
    assert "4 refused\n  4  parallel.pp=3: the model has 4 layers" in output
    points = [f"pp={pp} schedule={schedule}" for pp in (3, 5) for schedule in ("1f1b", "gpipe")]
    assert f"\n     points: {', '.join(points)}\n" in output
    assert sweep.starts == []
    assert not sweep.folder.exists()


def test_a_point_that_is_refused_without_a_setting_at_fault_is_told_as_one_of_the_sweep(capsys, monkeypatch):
    def refuse(*_, **__):
        raise LauncherError("the plugin is broken")

    monkeypatch.setattr(planning, "make_plan", refuse)
    assert main(["sweep", "plan", "quickstart", "parallel.pp=1,2"]) == 2
    assert "  2  sweep=pp=1: the plugin is broken" in capsys.readouterr().out


def test_points_are_started_in_one_way():
    plans = [{"plan": {"config": {"executor": {"name": name}}}} for name in ("torchrun", "slurm")]
    points = [
        json.loads(json.dumps(plan), object_hook=lambda item: SimpleNamespace(**item)) for plan in plans
    ]
    with pytest.raises(
        ConfigError, match=r"executor\.name=slurm,torchrun: the points .* Choose one executor\."
    ):
        planning.starts_here(points)


def test_no_sweep_is_written_over_another(sweep, capsys):
    sweep.run("parallel.pp=1,2")
    before = sorted(path.name for path in sweep.folder.rglob("*"))
    assert sweep.run("parallel.pp=1,4") == 2
    assert capsys.readouterr().err == (
        f"run.dir={sweep.folder}: already exists; a sweep never overwrites a directory. "
        f"Give another run.dir, or go on with: trireme sweep retry {sweep.folder}\n"
    )
    assert sorted(path.name for path in sweep.folder.rglob("*")) == before


@pytest.mark.parametrize("flag", ["--at-once=2", "--require-clean", "--untracked=*.txt"])
def test_a_flag_of_schedulers_is_refused_on_this_machine(sweep, capsys, flag):
    assert sweep.run("parallel.pp=1,2", flag) == 2
    assert f"{flag.partition('=')[0]} has no effect on a sweep on this machine" in capsys.readouterr().err
    assert not sweep.folder.exists()


def test_a_dry_run_starts_nothing(sweep, capsys):
    assert sweep.run("parallel.pp=1,2", "--dry-run") == 0
    assert "2 can run" in capsys.readouterr().out
    assert sweep.starts == []
    assert not sweep.folder.exists()


def test_status_and_best_find_the_newest_sweep_of_a_recipe(sweep, capsys):
    sweep.run("parallel.pp=1,2,4")
    capsys.readouterr()
    assert main(["sweep", "status", "quickstart"]) == 0
    assert capsys.readouterr().out.startswith("runs/mine: 3 points of quickstart\n")
    assert main(["sweep", "best"]) == 0
    output = capsys.readouterr().out
    assert list(table(output)) == ["pp=4"]
    assert output.endswith(f"\n  trireme run quickstart {' '.join(SMALL)} parallel.pp=4\n")
    assert main(["plan", *output.splitlines()[-1].split()[2:]]) == 0  # it can be typed as it is


def test_status_of_all_runs_points_to_the_sweeps(sweep, capsys):
    sweep.run("parallel.pp=1,2")
    capsys.readouterr()
    assert main(["status"]) == 0
    assert capsys.readouterr().out == "1 sweep, mine: trireme sweep status\n"


def test_best_says_how_many_points_it_knows_nothing_of(sweep, capsys):
    sweep.ends = {"pp_1": FAILED}
    sweep.run("parallel.pp=1,2", "--no-baseline")
    capsys.readouterr()
    assert main(["sweep", "best"]) == 0
    assert capsys.readouterr().out.endswith("\n1 of 2 points is not measured, and may be better\n")


def test_best_by_loss_is_the_point_that_learnt_most(sweep, capsys):
    sweep.run("seed=1,2", "--no-baseline")
    records = sweep.folder / "1-seed_2" / "metrics" / "rank-00001.jsonl"  # of the last stage
    records.write_text(records.read_text().replace('"loss": 2.3', '"loss": 1.5'))
    capsys.readouterr()
    assert main(["sweep", "best", "--by=loss"]) == 0
    output = capsys.readouterr().out
    assert list(table(output)) == ["seed=2"]
    assert table(output)["seed=2"][-1] == "1.5000"
    assert main(["sweep", "best", "--by=luck"]) == 2
    assert capsys.readouterr().err == "--by=luck: known are speed and loss.\n"


def test_a_recipe_may_be_a_sweep_which_no_single_run_takes(sweep, tmp_path, capsys):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "defaults: [/base, override /data: shakespeare, _self_]\n"
        "batch: {global_size: 4, micro_size: 1, seq_length: 8}\n"
        "sweep: {parallel: {pp: '1,2', schedule: 'gpipe,1f1b'}}\n"
    )
    assert main(["sweep", "plan", str(recipe), "parallel.schedule=1f1b"]) == 0
    assert "2 points = parallel.pp (2)\n" in capsys.readouterr().out
    assert main(["plan", str(recipe)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sweep=...: the recipe is a sweep, which is several runs. Use trireme sweep")
    assert main(["plan", str(recipe), "~sweep"]) == 0


# What the plan says


def test_pairs_that_do_not_fit_the_devices_are_refused_and_the_others_planned(capsys):
    fit = ("cluster.allow_idle_devices=false", "parallel.dp=auto", "model.num_heads=8", "model.num_layers=8")
    assert main(["sweep", "plan", "quickstart", *fit, "parallel.tp=1,2,4,8", "parallel.pp=1,2,4,8"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("quickstart: 16 points = parallel.tp (4) x parallel.pp (4)\n")
    assert "\n10 can run" in output
    pairs = ", ".join(f"tp={tp} pp={pp}" for tp, pp in [(2, 8), (4, 4), (4, 8), (8, 2), (8, 4), (8, 8)])
    assert output.endswith(
        "6 refused\n"
        "  6  parallel.dp=auto: dp = devices / (tp * pp) = 8 / (2 * 8) is below 1.\n"
        f"     points: {pairs}\n"
    )


def test_reasons_are_counted_by_rule_whatever_their_numbers_are(capsys):
    assert main(["sweep", "plan", "quickstart", "parallel.pp=4,8", "parallel.dp=4,8"]) == 2
    output = capsys.readouterr().out
    assert "4 refused (a point may break several rules)\n  4  parallel.dp=4: world = dp * tp * pp" in output
    assert "\n  2  parallel.pp=8: the model has 4 layers and 1 chunk per rank" in output
    assert output.endswith("     points: pp=8 dp=4, pp=8 dp=8\n")


def test_each_point_has_its_own_nodes(capsys):
    words = ("site=box", "cluster.devices_per_node=2", "cluster.nodes=1,2", "parallel.dp=1,2")
    assert main(["sweep", "plan", "quickstart", *words]) == 0
    output = capsys.readouterr().out
    assert [line.split()[2:4] for line in output.splitlines() if "  nodes=" in line and " ms" in line] == [
        ["1", "2"],
        ["2", "4"],
    ]
    assert "cluster.nodes=2: 2 ranks fill 1 node of 2 devices.\n     points: nodes=2 dp=1\n" in output


def test_every_point_of_the_examples_in_the_help_can_run(capsys):
    assert main(["sweep", "--help"]) == 0
    lines = capsys.readouterr().out.replace("\\\n", "").splitlines()
    examples = [
        line.split()[3:] for line in lines if line.startswith(("  trireme sweep plan", "  trireme sweep run"))
    ]
    assert len(examples) == 3
    for words in examples:
        assert main(["sweep", "plan", *words]) == 0
        assert "refused" not in capsys.readouterr().out


def test_a_misspelt_action_is_answered_with_the_nearest(capsys):
    assert main(["sweep", "statsu"]) == 2
    assert capsys.readouterr().err == (
        "sweep statsu: known are plan, run, status, retry, best. Did you mean status?\n"
    )
    assert main(["sweep", "status", "a", "b"]) == 2
    assert capsys.readouterr().err == "sweep status takes one sweep, given a b.\n"


def test_a_verb_about_a_run_is_told_a_point_of_the_sweep_that_it_was_given(sweep, capsys):
    sweep.run("parallel.pp=1,2", "--no-baseline")
    capsys.readouterr()
    assert main(["logs", "mine"]) == 2
    assert capsys.readouterr().err == (
        "mine is a sweep, and each of its points is a run: give one of them, such as runs/mine/0-pp_1. "
        "trireme sweep status shows them all.\n"
    )


@pytest.mark.parametrize(("file", "code"), [("/metrics/run.prom", 2), ("run.prom", 0)])
def test_points_write_their_figures_into_files_of_their_own(capsys, stand_in_corpus, file, code):
    words = ["sweep", "plan", "quickstart", "parallel.pp=1,2", f"run.prometheus={file}"]
    assert main(words) == code
    rule = (
        "run.prometheus=/metrics/run.prom: would be written by 2 points of the sweep. "
        "Give a relative path, which is one in each run directory."
    )
    assert (rule in " ".join(capsys.readouterr().err.split())) is (code == 2)
