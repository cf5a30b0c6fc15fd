"""`trireme submit` and the verbs about submitted runs, with a stand-in for Slurm's commands."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import launcher.cli.main as verbs
from launcher.app import lifecycle, preflight, user_model
from launcher.app.sweep import submit as sweep_submit
from launcher.base.files import read_json
from launcher.cli.main import main
from launcher.contract.inputs.record import Inputs, write_inputs
from launcher.contract.inputs.user_code import code_digests
from launcher.contract.model.shape import Measured
from launcher.report.runs import read_plan
from launcher.runs import freeze as freezing
from launcher.runs.facts import Checkout, checkouts
from launcher.runs.store import RunDirectory, saved_steps

COMMAND = """#!/bin/bash
echo "$(basename "$0") $*" >>{folder}/asked
case "$(basename "$0") $1" in
  'sbatch --test-only')
    [ ! -e {folder}/refuse ] || {{
      echo 'sbatch: error: Invalid qos specification' >&2
      exit 1
    }}
    ;;
  'sbatch --parsable') echo 7 ;;
  'squeue --noheader')
    echo '9|PENDING|0|0|Priority'
    echo "7|$(cat {folder}/state)|0|0|Priority"
    ;;
  'scancel 7') echo CANCELLED >{folder}/state ;;
esac
"""
TWO = ("cluster.devices_per_node=2", "run.dir=run", "report.baseline=none")
ANY_PLACE = TWO[::2]


class Slurm:
    """The stand-in: what it was asked, and what it answers."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("sbatch", "squeue", "scancel", "sacct"):
            path = folder / name
            path.write_text(COMMAND.format(folder=folder))
            path.chmod(0o755)
        self.set("RUNNING")

    def set(self, state):
        (self.folder / "state").write_text(f"{state}\n")

    def asked(self):
        path = self.folder / "asked"
        return [line.split()[:2] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def slurm(tmp_path, monkeypatch, stand_in_corpus):
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    # One package of a few files stands in for those of this program.
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(freezing, "own_packages", lambda: ["launcher"])
    monkeypatch.setattr(freezing, "package_folder", lambda name: package)
    return Slurm(folder)


def test_a_recipe_is_checked_submitted_once_and_told_how_to_follow(slurm, tmp_path, capsys):
    assert main(["submit", "quickstart", *TWO]) == 0
    assert slurm.asked() == [["sbatch", "--test-only"], ["sbatch", "--parsable"]]
    output = capsys.readouterr().out
    assert "submitted as job 7 on 1 node\nrun directory: run\n  trireme status run\n" in output
    assert read_json(tmp_path / "run" / "handle.json") == {"executor": "slurm", "id": "7"}
    assert read_json(tmp_path / "run" / "status.json")["phase"] == "pending"
    assert read_json(tmp_path / "run" / "job.json")["overrides"][0] == "executor=slurm"


def test_a_dry_run_prints_the_bytes_that_are_submitted_and_makes_nothing(
    slurm, tmp_path, capsys, monkeypatch
):
    with monkeypatch.context() as laptop:
        laptop.setenv("PATH", "/nonexistent")
        assert main(["submit", "quickstart", *TWO, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    main(["submit", "quickstart", *TWO])
    assert (tmp_path / "run" / "job.sh").read_text() == shown


def test_without_slurm_the_way_out_is_named_and_nothing_is_left(slurm, tmp_path, capsys, monkeypatch):
    (slurm.folder / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(slurm.folder))
    assert main(["submit", "quickstart", *TWO]) == 2
    assert "sbatch is not on this machine. Go to one with Slurm's commands, or look with --dry-run.\n" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


def test_a_refused_job_leaves_nothing_behind(slurm, tmp_path, capsys):
    (slurm.folder / "refuse").touch()
    assert main(["submit", "quickstart", *TWO]) == 2
    assert capsys.readouterr().err == (
        "Slurm rejects the job: Invalid qos specification. Look at site.qos.\n"
    )
    assert not (tmp_path / "run").exists()
    assert slurm.asked() == [["sbatch", "--test-only"]]


def fail_to_write(monkeypatch, full, holding=""):
    """As on a full disk, where this file would hold this."""
    write = RunDirectory.write

    def refuse(directory, name, text):
        if name == full and holding in text:
            raise OSError(errno.ENOSPC, "No space left on device", str(directory.path / name))
        write(directory, name, text)

    monkeypatch.setattr(RunDirectory, "write", refuse)
    monkeypatch.setattr(verbs, "_drop_output", lambda: None)


@pytest.mark.parametrize("file", [("handle.json",), ("status.json", "pending")], ids=str)
def test_a_job_that_a_full_disk_does_not_take_down_keeps_its_directory_and_is_named(
    slurm, tmp_path, capsys, monkeypatch, file
):
    fail_to_write(monkeypatch, *file)
    assert main(["submit", "quickstart", *TWO]) == 2
    assert capsys.readouterr().err == (
        "job 7 is submitted and runs in run, which could not be told so: No space left on device. Cancel job "
        "7 with the commands of its scheduler before you submit it again.\n"
    )
    assert (tmp_path / "run" / "job.sh").is_file()
    assert not (tmp_path / "run" / "lock").exists()


def test_a_full_disk_before_the_scheduler_has_the_job_leaves_nothing(slurm, tmp_path, monkeypatch):
    fail_to_write(monkeypatch, "job.sh")
    assert main(["submit", "quickstart", *TWO]) == 2
    assert slurm.asked() == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("is_array", [True, False])
def test_a_full_disk_after_the_first_job_of_a_sweep_leaves_its_directory(
    slurm, tmp_path, monkeypatch, capsys, is_array
):
    fail_to_write(monkeypatch, "handle.json")
    monkeypatch.setattr(sweep_submit, "_group", sweep_submit._group if is_array else lambda *_: None)
    assert main(["sweep", "run", "quickstart", "executor=slurm", "seed=1,2", *TWO]) == 2
    assert "is submitted and runs in run/" in capsys.readouterr().err
    assert slurm.asked().count(["sbatch", "--parsable"]) == 1
    assert len(list((tmp_path / "run").glob("*/job.sh"))) == 2


def test_a_full_disk_between_the_jobs_of_a_sweep_leaves_its_directory(slurm, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_submit, "_group", lambda *_: None)

    fail_to_write(monkeypatch, "job.sh", "afterany:7")
    assert main(["sweep", "run", "quickstart", "executor=slurm", "seed=1,2", *TWO, "--at-once=1"]) == 2
    assert len(list((tmp_path / "run").glob("*/handle.json"))) == 1


@pytest.mark.parametrize("is_full", [True, False])
def test_a_chain_whose_list_a_full_disk_does_not_take_is_cancelled(slurm, tmp_path, monkeypatch, is_full):
    write = Path.write_text

    def refuse(path, text, **words):
        if is_full and path.name == "chain":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, text, **words)

    monkeypatch.setattr(Path, "write_text", refuse)
    chain = ("executor.continuation=chain", "executor.max_starts=2", "train.checkpoint_interval=5")
    assert main(["submit", "quickstart", *TWO, *chain]) == (2 if is_full else 0)
    assert (["scancel", "7"] in slurm.asked()) is is_full
    assert (tmp_path / "run").exists() is not is_full


def test_what_slurm_could_not_start_is_refused_with_the_line_that_set_it(slurm, capsys):
    assert main(["submit", "quickstart", "cluster.nodes=3", "run.dir=run"]) == 2
    assert capsys.readouterr().err.endswith("[override cluster.nodes=3]\n")


def test_an_executor_that_starts_here_is_not_silently_run_or_replaced(slurm, capsys):
    assert main(["submit", "quickstart", "executor=torchrun", *TWO]) == 2
    assert "executor.name=torchrun: starts the ranks on this machine" in capsys.readouterr().err
    assert slurm.asked() == []


def test_settings_of_the_executor_reach_the_default_one(slurm, capsys):
    assert main(["submit", "quickstart", "executor.starter=torchrun", *TWO, "--dry-run"]) == 0
    assert "torch.distributed.run" in capsys.readouterr().out


def test_a_site_has_no_effect_on_a_local_run_and_is_refused(slurm, capsys):
    assert main(["run", "quickstart", "site=box"]) == 2
    assert "site.name=box: has no effect on a run on this machine" in capsys.readouterr().err


def test_missing_data_is_refused_before_anything_is_made(slurm, tmp_path, capsys):
    assert main(["submit", "quickstart", "data.source=no/such", *TWO]) == 2
    assert "no such file, relative to" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert slurm.asked() == []


@pytest.mark.parametrize(
    "words",
    [
        ("data.source=/in/the/image", "site.container_image=a.sqsh"),
        ("data.source=package:not_here/x", "site.python=/there/bin/python"),
    ],
)
def test_data_that_cannot_be_seen_from_here_is_left_to_the_ranks(slurm, words):
    assert main(["submit", "quickstart", *words, *TWO]) == 0


def test_an_executor_that_was_deleted_is_a_fault_like_any_other(slurm, capsys):
    assert main(["submit", "quickstart", "~executor.name", *TWO]) == 2
    assert "executor.name=(missing): this setting is required." in capsys.readouterr().err


def test_a_run_that_waits_is_not_submitted_again(slurm, capsys):
    main(["submit", "quickstart", *TWO])
    assert main(["submit", "quickstart", *TWO, "--overwrite"]) == 2
    assert "belongs to job 7, which has not ended as far as is known" in capsys.readouterr().err


# The baseline


BASED = ("cluster.devices_per_node=2", "run.dir=run", "report.baseline=auto")


def jobs(folder):
    """What each run directory below a folder notes of itself, by name; of baselines that in their place."""
    return {path.parent.name: read_json(path) for path in sorted(folder.glob("*/job.json"))}


def test_the_training_on_one_device_is_a_job_of_its_own_and_named_as_the_baseline(slurm, tmp_path, capsys):
    assert main(["submit", "quickstart", *BASED, "site.nodelist=node1"]) == 0
    assert slurm.asked() == [["sbatch", "--test-only"], ["sbatch", "--parsable"]] * 2
    ((name, base),) = jobs(tmp_path / "runs").items()
    run = read_json(tmp_path / "run" / "job.json")
    assert run["baseline"] == f"../runs/{name}"
    assert (base["world_size"], base["fingerprint"]) == (1, run["fingerprint"])
    assert read_json(tmp_path / "runs" / name / "status.json")["phase"] == "pending"
    script = (tmp_path / "runs" / name / "job.sh").read_text()
    assert "--ntasks-per-node=1\n" in script
    assert "#SBATCH --nodelist=" not in script
    output = capsys.readouterr().out
    assert (
        f"baseline: the same training on one device, submitted as job 7 in runs/{name}; it takes " in output
    )


def test_a_measurement_that_is_stopped_says_what_is_known_of_its_job(slurm, tmp_path, capsys, monkeypatch):
    interrupts = SimpleNamespace(
        sleep=lambda seconds: os.kill(os.getpid(), signal.SIGINT), monotonic=time.monotonic
    )
    monkeypatch.setattr("launcher.app.wait.time", interrupts)
    words = ("executor=slurm", "cluster.devices_per_node=2", "run.dir=run")
    assert main(["bench", "collectives", *words]) == 130
    assert ["scancel", "7"] in slurm.asked()
    assert capsys.readouterr().err == "job 7 is cancelled (SIGINT). Run directory: run\n"


def test_on_one_machine_the_baseline_waits_for_the_run_to_end(slurm, tmp_path):
    main(["submit", "quickstart", *BASED, "site=box"])
    (base,) = (tmp_path / "runs").iterdir()
    assert "#SBATCH --dependency=afterany:7\n" in (base / "job.sh").read_text()
    assert "--dependency" not in (tmp_path / "run" / "job.sh").read_text()


def test_a_baseline_that_is_on_its_way_is_not_submitted_again(slurm, tmp_path, capsys):
    main(["submit", "quickstart", *BASED])
    main(["submit", "quickstart", *BASED, "run.dir=other", "parallel.schedule=gpipe"])
    ((name, _),) = jobs(tmp_path / "runs").items()
    assert read_json(tmp_path / "other" / "job.json")["baseline"] == f"../runs/{name}"
    assert "which has not ended yet\n" in capsys.readouterr().out


def test_a_finished_baseline_is_taken(slurm, tmp_path, capsys):
    main(["submit", "quickstart", *BASED])
    (base,) = (tmp_path / "runs").iterdir()
    RunDirectory(base).write_status("succeeded")
    main(["submit", "quickstart", *BASED, "run.dir=other"])
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert f"baseline: runs/{base.name}, an earlier run of the same training" in capsys.readouterr().out


def test_without_a_baseline_nothing_else_is_submitted(slurm, tmp_path):
    main(["submit", "quickstart", *BASED, "--no-baseline"])
    assert not (tmp_path / "runs").exists()
    assert read_json(tmp_path / "run" / "job.json")["baseline"] is None


def test_a_training_that_no_device_holds_has_no_baseline_and_runs(slurm, tmp_path, capsys):
    assert main(["submit", "quickstart", *BASED, "device.memory_bytes=18000000"]) == 0
    output = capsys.readouterr().out
    assert "submitted as job 7" in output
    assert "no baseline: this training does not run on one device:\n" in output
    assert not (tmp_path / "runs").exists()


def test_a_refused_baseline_leaves_the_run_alone_and_nothing_behind(slurm, tmp_path, capsys):
    command = (slurm.folder / "sbatch").read_text()
    asked = f'[ "$(grep -c sbatch {slurm.folder}/asked)" -lt 3 ] || touch {slurm.folder}/refuse\ncase'
    (slurm.folder / "sbatch").write_text(command.replace("case", asked, 1))
    assert main(["submit", "quickstart", *BASED]) == 0
    assert "no baseline: Slurm rejects the job: Invalid qos specification." in capsys.readouterr().out
    assert list((tmp_path / "runs").iterdir()) == []
    assert read_json(tmp_path / "run" / "job.json")["baseline"] is None


def test_report_says_where_an_unfinished_baseline_stands(slurm, tmp_path, capsys):
    main(["submit", "quickstart", *BASED])
    (base,) = (tmp_path / "runs").iterdir()
    assert main(["report", "run"]) == 2
    assert capsys.readouterr().err == (
        f"run: its baseline {base.name} is pending; trireme wait run waits for it, too\n"
    )
    RunDirectory(base).write_status("failed")
    assert main(["report", "run"]) == 2
    assert f"its baseline {base.name} is failed; trireme report run --base RUN takes another\n" in (
        capsys.readouterr().err
    )


def test_wait_follows_the_baseline_too(slurm, tmp_path, capsys, monkeypatch):
    main(["submit", "quickstart", *BASED])
    (base,) = (tmp_path / "runs").iterdir()
    RunDirectory(tmp_path / "run").write_status("succeeded")
    slurm.set("FAILED")
    assert main(["wait", "run"]) == 0
    slurm.set("PENDING")
    capsys.readouterr()
    assert main(["wait", "run"]) == 0
    assert f"no speedup: its baseline {base.name} is failed" in capsys.readouterr().out


def test_initial_weights_are_looked_at_once(slurm, monkeypatch):
    looks = []

    def noted(config, **_):
        looks.append(config)
        return []

    monkeypatch.setattr(preflight, "initial_weights_faults", noted)
    assert main(["submit", "quickstart", *TWO]) == 0
    assert len(looks) == 1


# Secrets


CANARY = "canary0123456789"


@pytest.fixture
def work_tree(tmp_path, monkeypatch):
    """The current folder as a work tree with credentials in its remote and in an untracked file. Its dataset
    is not made."""
    monkeypatch.setattr(user_model, "_measure", lambda *_: Measured(model=None, num_samples=2000))
    (tmp_path / "mine.py").write_text("def build():\n    ...\n")
    (tmp_path / ".gitignore").write_text("bin\nrun\npackage\n")
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (
        ("init", "--quiet"),
        ("remote", "add", "origin", f"https://user:{CANARY}@example.org/a.git"),
        ("add", "mine.py", ".gitignore"),
        ("commit", "--quiet", "-m", "first"),
    ):
        subprocess.run(["git", "-C", tmp_path, *identity, *words], check=True)
    (tmp_path / ".env").write_text(f"TOKEN={CANARY}\n")
    (tmp_path / "mine.py").write_text("def build():\n    return None\n")


MINE = ("data=custom", "data.target=mine:build")


def found(folder, text):
    return [str(path) for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_no_secret_value_is_anywhere_in_the_run_directory(slurm, work_tree, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    monkeypatch.setenv("UNRELATED", CANARY)
    monkeypatch.setenv("PIP_INDEX_URL", f"https://user:{CANARY}@example.org/simple")
    words = ("submit", "quickstart", *MINE, *TWO, "site.secrets=[WANDB_API_KEY]")
    assert main(list(words)) == 0
    assert found(tmp_path / "run", CANARY) == []
    assert found(tmp_path / "run", "WANDB_API_KEY")
    assert CANARY not in capsys.readouterr().out
    frozen = tmp_path / "run" / "source" / "roots" / "1"
    assert sorted(path.name for path in frozen.iterdir()) == [".gitignore", "mine.py"]


def test_a_secret_in_a_changed_file_stops_the_submission_and_leaves_nothing(
    slurm, work_tree, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    (tmp_path / "mine.py").write_text(f"KEY = '{CANARY}'\n")
    assert main(["submit", "quickstart", *MINE, *TWO]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/mine.py would hold the value of WANDB_API_KEY." in error
    assert CANARY not in error
    assert not (tmp_path / "run").exists()
    assert slurm.asked() == []


def test_the_value_of_a_variable_that_site_secrets_names_is_looked_for_whoever_submits(
    slurm, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("UNRELATED", CANARY)
    slurm.set("COMPLETED")  # what is submitted all the same ends
    words = ("bench", "collectives", "executor=slurm", *TWO[:2], f"+site.env.GREETING={CANARY}")
    assert main([*words, "site.secrets=[UNRELATED]"]) == 2
    error = capsys.readouterr().err
    assert "would hold the value of UNRELATED." in error
    assert CANARY not in error
    assert ["sbatch", "--parsable"] not in slurm.asked()


def test_a_secret_in_an_override_stops_the_submission(slurm, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    for words in (("--dry-run",), ()):
        assert main(["submit", "quickstart", *TWO, f"+site.env.GREETING={CANARY}", *words]) == 2
        assert CANARY not in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_dirty_tree_is_said_and_its_patch_is_kept(slurm, work_tree, tmp_path, capsys):
    (tmp_path / "more.py").write_text("")
    main(["submit", "quickstart", *MINE, *TWO])
    output = capsys.readouterr().out
    assert f"note: {tmp_path} differs from commit " in output
    assert f"note: Copied although git does not track them: {tmp_path}/more.py.\n" in output
    patches = [path.read_text() for path in (tmp_path / "run").glob("checkout-*.patch")]
    assert any("+    return None" in patch for patch in patches)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("mine.py", "changes to tracked files"),
        ("more.py", "more.py"),
    ],
)
def test_code_that_no_commit_holds_is_refused_where_that_is_asked_for(
    slurm, work_tree, tmp_path, capsys, monkeypatch, change, found
):
    monkeypatch.setattr(lifecycle, "checkouts", lambda roots: checkouts([])[1:])  # without this program's
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", *identity, "commit", "--quiet", "-am", "second"], check=True)
    (tmp_path / ".env").unlink()
    assert main(["submit", "quickstart", *MINE, *TWO, "--require-clean", "--overwrite"]) == 0
    (tmp_path / change).write_text("'changed'\n")
    assert main(["submit", "quickstart", *MINE, *TWO, "--require-clean", "run.dir=other"]) == 2
    assert capsys.readouterr().err == (f"--require-clean: {tmp_path} has {found}. Commit or remove them.\n")
    assert not (tmp_path / "other").exists()


def test_code_that_git_could_not_compare_is_refused_or_said(slurm, tmp_path, capsys, monkeypatch):
    tree = Checkout(root="/src", commit="5a", untracked=(), patch="", uncompared=("key.bin",))
    monkeypatch.setattr(lifecycle, "checkouts", lambda roots: (tree,))
    assert main(["submit", "quickstart", *TWO, "--require-clean"]) == 2
    assert "--require-clean: /src has key.bin (not compared: see git diff)." in capsys.readouterr().err
    assert main(["submit", "quickstart", *TWO]) == 0
    assert (
        "note: /src: git could not compare, and the patch leaves out: key.bin.\n" in capsys.readouterr().out
    )


def test_a_job_whose_code_has_changed_is_resumed_when_told_to(slurm, work_tree, tmp_path, capsys):
    words = ("submit", "quickstart", *MINE, *TWO, "train.checkpoint_interval=5")
    main([*words])
    run, config = RunDirectory(tmp_path / "run"), read_plan(tmp_path / "run").config
    code = code_digests(config, read_plan(run.path).source_roots, with_installed=True)
    assert list(code) == ["mine.py"]
    write_inputs(run.path, Inputs(data={}, code=code, num_blocks=1))  # as a rank does, of the frozen code
    run.write_status("failed")
    (run.path / "checkpoints" / "step-00000005").mkdir(parents=True)
    frozen = run.path / "source" / "roots" / "1" / "mine.py"
    (tmp_path / "mine.py").write_text("def build():\n    return 3\n")
    capsys.readouterr()
    assert main([*words, "--resume"]) == 2
    error = capsys.readouterr().err
    assert "1 input changed since it was started: code mine.py (" in error
    assert "return 3" not in frozen.read_text()
    command = error.partition("go on all the same: ")[2].split()
    assert main(command[1:]) == 0
    assert "return 3" in frozen.read_text()
    assert "resume=(--resume)" in (run.path / "job.sh").read_text()


def test_a_job_that_is_refused_leaves_the_newer_checkpoints_where_they_were(slurm, tmp_path, capsys):
    words = ("submit", "quickstart", *TWO, "train.checkpoint_interval=5")
    main([*words])
    run = RunDirectory(tmp_path / "run")
    run.write_status("failed")
    for step in (5, 10, 15):
        (run.path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (slurm.folder / "refuse").touch()
    capsys.readouterr()
    assert main([*words, "--resume=5"]) == 2
    assert saved_steps(run.path) == [5, 10, 15]
    assert not list(run.path.glob("checkpoints.*"))
    told = (
        r"note: The newer checkpoints after step 10, 15 went to .*\nnote: Nothing was submitted, so they are "
    )
    assert re.match(told + r"back in their place\.\n$", capsys.readouterr().out)
    (slurm.folder / "refuse").unlink()
    assert main([*words, "--resume=5"]) == 0
    assert saved_steps(run.path) == [5]
    assert re.search(r"The newer checkpoints after step 10, 15 went to", capsys.readouterr().out)


def test_a_named_baseline_and_none_at_all_exclude_each_other(slurm, capsys):
    assert main(["submit", "quickstart", *TWO, "report.baseline=runs/a", "--no-baseline"]) == 2
    assert capsys.readouterr().err == (
        "--no-baseline and report.baseline=runs/a exclude each other: give one.\n"
    )


# Sweeps

SWEEP = ("sweep", "run", "quickstart", "executor=slurm", *TWO)


def test_a_sweep_is_one_array_of_recorded_runs_that_share_one_copy_of_the_code(slurm, tmp_path, capsys):
    assert main([*SWEEP, "seed=1,2", "--at-once=1"]) == 0
    assert slurm.asked() == [["sbatch", "--test-only"], ["sbatch", "--parsable"]]
    runs = sorted(tmp_path.glob("run/?-seed_*"))
    assert [read_json(run / "handle.json")["id"] for run in runs] == ["7_0", "7_1"]
    assert [(tmp_path / "run" / "tasks" / str(task)).resolve() for task in range(2)] == runs
    assert all(f"start={tmp_path}/run/source/lib/launcher/" in (run / "job.sh").read_text() for run in runs)
    assert "submitted as the job array 7 of 2 tasks, 1 at a time\n" in capsys.readouterr().out


def test_points_that_ask_for_different_resources_are_jobs_which_wait_for_each_other(slurm, tmp_path, capsys):
    words = ("sweep", "run", "quickstart", "executor=slurm", "cluster.devices_per_node=4", "run.dir=run")
    assert main([*words, "parallel.pp=1,2,4", "--at-once=2", "--no-baseline"]) == 0
    assert slurm.asked() == [["sbatch", "--test-only"], ["sbatch", "--parsable"]] * 3
    scripts = [path.read_text() for path in sorted(tmp_path.glob("run/?-*/job.sh"))]
    assert ["--dependency=afterany:7" in script for script in scripts] == [False, False, True]
    assert "submitted as 3 jobs, 2 at a time\n" in capsys.readouterr().out


def test_the_points_of_a_submitted_sweep_share_a_baseline_that_is_on_its_way(slurm, tmp_path, capsys):
    words = (
        "sweep",
        "run",
        "quickstart",
        "executor=slurm",
        *TWO[:2],
        "seed=1",
        "parallel.schedule=gpipe,1f1b",
    )
    assert main([*words]) == 0
    (base,) = (tmp_path / "runs").iterdir()
    named = {read_json(path)["baseline"] for path in tmp_path.glob("run/?-*/job.json")}
    assert named == {f"../../runs/{base.name}"}
    assert slurm.asked().count(["sbatch", "--parsable"]) == 2


def test_a_dry_run_of_a_sweep_prints_what_is_submitted_and_makes_nothing(slurm, tmp_path, capsys):
    assert main([*SWEEP, "seed=1,2", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    main([*SWEEP, "seed=1,2"])
    written = [tmp_path / "run" / "job-1.sh", *sorted(tmp_path.glob("run/?-*/job.sh"))]
    assert shown == "".join(f"# ---- {path}\n{path.read_text()}\n" for path in written)


def test_a_sweep_that_is_refused_leaves_nothing_behind(slurm, tmp_path, capsys):
    (slurm.folder / "refuse").touch()
    assert main([*SWEEP, "seed=1,2"]) == 2
    assert "Slurm rejects the job: Invalid qos specification. Look at site.qos." in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_secret_in_a_sweep_stops_its_submission_and_leaves_nothing(slurm, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    assert main([*SWEEP, "seed=1,2", f"+site.env.GREETING={CANARY}"]) == 2
    captured = capsys.readouterr()
    assert CANARY not in captured.err + captured.out
    assert not (tmp_path / "run").exists()
    assert slurm.asked() == []


@pytest.mark.parametrize("number", ["0", "-1", "x"])
def test_the_points_at_once_are_a_number(slurm, tmp_path, capsys, number):
    assert main([*SWEEP, "seed=1,2", f"--at-once={number}"]) == 2
    assert f"--at-once={number}: must be a whole number of at least 1." in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# The other verbs


def test_status_asks_slurm_and_shows_a_run_by_name(slurm, tmp_path, capsys):
    main(["submit", "quickstart", *ANY_PLACE])
    (run,) = (tmp_path / "runs").iterdir()
    slurm.set("PENDING")
    capsys.readouterr()
    assert main(["status", run.name]) == 0
    head, row, *_, following = capsys.readouterr().out.splitlines()
    assert following.startswith("next: it starts when its job does (waits: Priority); 150 steps left; ")
    assert following.endswith("; if it is interrupted, its job is requeued: start 2 of at most 8")
    assert head.split() == ["run", "state", "job", "step", "since"]
    assert row.split()[:3] == [run.name, "pending", "7"]
    assert row.endswith("waits: Priority")


def test_status_tells_since_when_it_is_so_not_since_when_somebody_knows(slurm, tmp_path, capsys):
    main(["submit", "quickstart", *TWO])
    for name, age_s in (("logs/starts", 7200), ("exit/job.json", 3600)):
        path = tmp_path / "run" / name
        path.write_text("7.0\n")
        os.utime(path, (time.time() - age_s,) * 2)
    told = []
    for state in ("RUNNING", "COMPLETED"):
        slurm.set(state)
        capsys.readouterr()
        main(["status", "run"])
        told.append(" ".join(capsys.readouterr().out.split()))
    assert "running 7 2 h 0 min" in told[0]
    assert "succeeded 7 1 h 0 min" in told[1]


def test_two_hundred_runs_take_one_question_and_one_screen(slurm, tmp_path, capsys, monkeypatch):
    main(["submit", "quickstart", *ANY_PLACE])
    (run,) = (tmp_path / "runs").iterdir()
    states = {"RUNNING": 120, "PENDING": 60, "COMPLETED": 20}
    jobs = [state for state, count in states.items() for _ in range(count)]
    queue = [f"{job}|{state}|0|0|Priority" for job, state in enumerate(jobs, 7)]
    (slurm.folder / "queue").write_text("\n".join(queue))
    command = (slurm.folder / "squeue").read_text()
    (slurm.folder / "squeue").write_text(
        command.replace('echo "7|$(cat', f'cat {slurm.folder}/queue; : "$(cat')
    )
    for job in range(8, 207):
        shutil.copytree(run, run.with_name(f"copy-{job:03}"), ignore=shutil.ignore_patterns("source"))
        (run.with_name(f"copy-{job:03}") / "handle.json").write_text(
            f'{{"executor": "slurm", "id": "{job}"}}'
        )
    before = len(slurm.asked())
    capsys.readouterr()
    assert main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert slurm.asked()[before:] == [["squeue", "--noheader"]]
    assert len(lines) == 1 + 20 + 10 + 10 + 2
    assert lines[-1] == ("200 runs: 120 running, 60 pending, 20 succeeded; 160 not shown, --all shows them")


def test_status_without_runs_says_where_it_looked(slurm, capsys):
    assert main(["status"]) == 0
    assert capsys.readouterr().out == "no runs in runs\n"


def test_a_misspelt_run_is_answered_with_the_nearest(slurm, capsys, tmp_path):
    main(["submit", "quickstart", *ANY_PLACE])
    (run,) = (tmp_path / "runs").iterdir()
    assert main(["status", run.name[:-1]]) == 2
    assert f"Did you mean {run.name}?" in capsys.readouterr().err


def test_cancel_takes_a_job_out_of_the_queue(slurm, capsys, tmp_path):
    main(["submit", "quickstart", *TWO])
    capsys.readouterr()
    assert main(["cancel", "run"]) == 0
    assert capsys.readouterr().out == "cancelled\n"
    assert read_json(tmp_path / "run" / "status.json")["phase"] == "cancelled"
    assert main(["cancel", "run"]) == 0
    assert capsys.readouterr().out == "it has ended already: cancelled\n"
    assert slurm.asked().count(["scancel", "7"]) == 1


def test_cancel_names_the_baseline_that_goes_on(slurm, capsys, tmp_path):
    main(["submit", "quickstart", *BASED])
    (base,) = (tmp_path / "runs").iterdir()
    (base / "handle.json").write_text('{"executor": "slurm", "id": "9"}\n')
    capsys.readouterr()
    assert main(["cancel", "run"]) == 0
    assert capsys.readouterr().out == (f"cancelled\nits baseline goes on: trireme cancel runs/{base.name}\n")


def test_logs_prints_the_jobs_output_and_that_of_its_ranks_or_of_one(slurm, capsys, tmp_path):
    main(["submit", "quickstart", *TWO])
    capsys.readouterr()
    assert main(["logs", "run"]) == 2
    assert "executor.log is not there: the run is running." in capsys.readouterr().err
    (tmp_path / "run" / "logs" / "executor.log").write_text("begun\n")
    (tmp_path / "run" / "logs" / "rank-10.log").write_text("rank ten\n")
    (tmp_path / "run" / "logs" / "rank-3.log").write_text("rank three\nis here\n")
    assert main(["logs", "run"]) == 0
    assert capsys.readouterr().out == "begun\nrank 3: rank three\nrank 3: is here\nrank 10: rank ten\n"
    assert main(["logs", "run", "--rank", "3"]) == 0
    assert capsys.readouterr().out == "rank three\nis here\n"


def test_of_many_ranks_the_first_are_printed(slurm, capsys, tmp_path):
    main(["submit", "quickstart", *TWO])
    for rank in range(20):
        (tmp_path / "run" / "logs" / f"rank-{rank}.log").write_text("here\n")
    capsys.readouterr()
    assert main(["logs", "run"]) == 0
    assert capsys.readouterr().out == "".join(f"rank {rank}: here\n" for rank in range(16))


def test_logs_of_a_rank_that_the_run_does_not_have_are_not_waited_for(slurm, capsys):
    main(["submit", "quickstart", *TWO])
    assert main(["logs", "-f", "run", "--rank", "2"]) == 2
    assert "--rank=2: the run has 2 ranks, of which 0 is the first.\n" in capsys.readouterr().err


def test_logs_that_are_followed_end_with_the_run(slurm, capsys, tmp_path):
    main(["submit", "quickstart", *TWO])
    (tmp_path / "run" / "logs" / "executor.log").write_text("begun\n")
    slurm.set("COMPLETED")
    capsys.readouterr()
    assert main(["logs", "-f", "run"]) == 0
    assert capsys.readouterr().out == "begun\n"


@pytest.mark.parametrize("rank", ["x", "-1"])
def test_a_rank_is_a_number(slurm, capsys, rank):
    main(["submit", "quickstart", *TWO])
    assert main(["logs", "run", f"--rank={rank}"]) == 2
    assert f"--rank={rank}: must be a whole number of at least 0." in capsys.readouterr().err


def test_wait_ends_with_the_guilty_rank_of_a_failed_run(slurm, capsys, tmp_path):
    main(["submit", "quickstart", *TWO])
    report = {
        "rank": 1,
        "time": 1.0,
        "error_type": "ValueError",
        "message": "no such planet",
        "traceback": "Traceback (most recent call last): ...",
    }
    (tmp_path / "run" / "exit" / "rank-1.json").write_text(json.dumps(report))
    slurm.set("FAILED")
    assert main(["wait", "run"]) == 1
    assert capsys.readouterr().err.startswith("rank 1 failed: ValueError: no such planet\n")


def test_wait_tells_that_a_run_was_cancelled(slurm, capsys):
    main(["submit", "quickstart", *TWO])
    slurm.set("CANCELLED")
    assert main(["wait", "run"]) == 1
    assert capsys.readouterr().err == "cancelled. Run directory: run\n"


@pytest.mark.parametrize("verb", ["logs", "wait", "cancel"])
def test_a_verb_about_one_run_takes_one(slurm, capsys, verb):
    assert main([verb]) == 2
    assert capsys.readouterr().err == (
        f"trireme {verb} takes one run directory, none given. trireme status lists the runs.\n"
    )
