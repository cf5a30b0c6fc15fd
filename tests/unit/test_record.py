import json
import os
import shutil
import subprocess
from dataclasses import replace

import pytest
import yaml

import launcher
from launcher.app.preflight import device_faults
from launcher.base.errors import JobError
from launcher.base.files import read_json
from launcher.contract.job import JobScript
from launcher.contract.plan import Plan, sha256
from launcher.runs import facts
from launcher.runs.facts import Checkout, checkouts, environment_facts
from launcher.runs.record import Origin, write_baseline, write_job
from launcher.runs.render import render, shell_text
from launcher.runs.store import RunDirectory
from tests.helpers.objects import there


def origin(**changes):
    made = Origin(recipe="quickstart", overrides=("parallel.pp=2",), facts={"python": "3"}, checkouts=())
    return replace(made, **changes)


@pytest.fixture
def directory(tmp_path):
    return RunDirectory(tmp_path)


def test_everything_that_describes_a_run_is_written(make_plan, directory):
    plan = make_plan()
    script = render(plan, directory.path)
    write_job(directory, plan, script, origin())
    text = directory.plan.read_text()
    assert Plan.from_json(text) == plan
    assert (directory.path / "plan.sha256").read_text() == f"{sha256(text)}  plan.json\n"
    job = read_json(directory.job)
    assert job["argv"] == list(script.argv)
    assert job["argv"][-1] == job["plan_sha256"] == sha256(text)
    assert (job["recipe"], job["overrides"]) == ("quickstart", ["parallel.pp=2"])
    assert (job["world_size"], job["baseline"], job["facts"]) == (2, None, {"python": "3"})
    assert read_json(directory.status_file)["phase"] == "prepared"


@pytest.mark.parametrize("where", ["patch", "override", "plan"])
def test_a_secret_in_what_describes_a_run_is_refused_before_anything_is_written(make_plan, directory, where):
    plan = make_plan("name=canary-0123456789") if where == "plan" else make_plan()
    patch = "+token = 'canary-0123456789'" if where == "patch" else ""
    tree = Checkout(root="/a", commit="5a", untracked=(), patch=patch)
    overrides = ("data.source=canary-0123456789",) if where == "override" else ()
    given = origin(checkouts=(tree,), overrides=overrides, secrets={"HF_TOKEN": b"canary-0123456789"})
    with pytest.raises(JobError, match="would hold the value of HF_TOKEN"):
        write_job(directory, plan, render(plan, directory.path), given)
    assert list(directory.path.iterdir()) == []


def test_every_yaml_reader_reads_the_settings_as_they_were(make_plan, directory):
    plan = make_plan("optim.lr=1e-5")
    write_job(directory, plan, render(plan, directory.path), origin())
    settings = yaml.safe_load((directory.path / "config.yaml").read_text())
    assert settings["optim"]["lr"] == 1e-05
    assert settings["optim"]["betas"] == list(plan.config.optim.options["betas"])
    assert settings["parallel"]["schedule"] == "1f1b"


def test_the_plan_hash_is_checked_by_sha256sum(make_plan, directory):
    plan = make_plan()
    write_job(directory, plan, render(plan, directory.path), origin())
    sha256sum = shutil.which("sha256sum")
    if sha256sum is None:
        pytest.skip("sha256sum is absent")
    assert subprocess.run([sha256sum, "-c", "plan.sha256"], cwd=directory.path, check=False).returncode == 0


def test_the_baseline_is_named_relative_to_the_run(make_plan, tmp_path):
    directory = RunDirectory(tmp_path / "a")
    directory.path.mkdir()
    plan = make_plan()
    write_job(directory, plan, render(plan, directory.path), origin())
    write_baseline(directory, tmp_path / "b")
    assert read_json(directory.job)["baseline"] == "../b"
    assert read_json(directory.job)["recipe"] == "quickstart"


def test_a_run_that_is_resumed_keeps_its_baseline(make_plan, directory):
    plan = make_plan()
    write_job(directory, plan, render(plan, directory.path), origin())
    write_baseline(directory, directory.path.parent / "b")
    write_job(directory, plan, render(plan, directory.path, resume=True), origin())
    assert read_json(directory.job)["baseline"] == "../b"


def test_the_state_of_the_sources_is_kept(make_plan, directory):
    checkout = Checkout(root="/src", commit="c0ffee", untracked=("new.py",), patch="diff\n")
    plan = make_plan()
    write_job(directory, plan, render(plan, directory.path), origin(checkouts=(checkout,)))
    assert read_json(directory.job)["checkouts"] == [
        {
            "root": "/src",
            "commit": "c0ffee",
            "patch": "checkout-0.patch",
            "untracked": ["new.py"],
            "uncompared": [],
        }
    ]
    assert (directory.path / "checkout-0.patch").read_text() == "diff\n"


def test_the_shell_text_runs_the_same_words_whatever_they_hold(tmp_path):
    argv = ("printf", "%s|", "a b", "it's", "$HOME", "; echo no", 'a"=0"', "a\nb", "ü")
    path = tmp_path / "job.sh"
    path.write_text(shell_text(JobScript(argv=argv, environment={"X": "1 $Y"}, run_dir="/r")))
    done = subprocess.run(["sh", str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "".join(f"{word}|" for word in argv[2:])


def test_a_batch_script_is_kept_as_it_is():
    script = JobScript(argv=("sbatch",), environment={}, run_dir="/r", text="#!/bin/bash\n#SBATCH -N 2\n")
    assert shell_text(script) == "#!/bin/bash\n#SBATCH -N 2\n"


def test_no_secret_of_the_environment_is_among_the_facts(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "abc123secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = environment_facts()
    assert "abc123secret" not in json.dumps(found)
    assert found["variables"]["OMP_NUM_THREADS"] == "3"
    assert found["num_cores"] >= 1


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


@pytest.fixture
def checkout_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "__file__", str(tmp_path / "package" / "__init__.py"))
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "package").mkdir()
    git(work, "init")
    monkeypatch.chdir(work)
    return work


def test_a_dirty_checkout_gives_its_commit_its_patch_and_what_the_patch_lacks(checkout_folder):
    (checkout_folder / "a.py").write_text("old\n")
    git(checkout_folder, "add", "a.py")
    git(checkout_folder, "commit", "-m", "first")
    (checkout_folder / "a.py").write_text("new\n")
    (checkout_folder / "ü b.py").write_text("")
    (found,) = checkouts()
    assert (found.root, found.untracked) == (str(checkout_folder), ("ü b.py",))
    assert len(there(found.commit)) == 40
    assert "-old\n+new\n" in found.patch


HOSTILE = """
[core]
    fsmonitor = {program}
    hooksPath = hooks
[filter "a=b"]
    clean = {program}
    process = {program}
    required = true
[diff]
    external = {program}
[diff "x"]
    textconv = {program}
[extensions]
    partialClone = origin
[remote "origin"]
    url = ext::{program} %S
    promisor = true
[protocol "ext"]
    allow = always
"""


@pytest.fixture(params=["whole", "partial"])
def hostile(request, checkout_folder, tmp_path):
    """A repository whose settings name a program for whatever git starts one for, and what that leaves;
    a partial one lacks an object, which git would fetch."""
    trace, program = tmp_path / "was-run", tmp_path / "program.sh"
    program.write_text(f"#!/bin/sh\necho $0 $* >> {trace}\n")
    program.chmod(0o755)
    for name in ("a.py", "same.py"):
        (checkout_folder / name).write_text("old\n")
    git(checkout_folder, "add", ".")
    git(checkout_folder, "commit", "-m", "first")
    if request.param == "partial":
        show = ["git", "rev-parse", "HEAD:a.py"]
        name = subprocess.run(show, check=True, capture_output=True, text=True).stdout.strip()
        (checkout_folder / ".git" / "objects" / name[:2] / name[2:]).unlink()
    (checkout_folder / "hooks").mkdir()
    (checkout_folder / "hooks" / "post-index-change").symlink_to(program)
    (checkout_folder / ".gitattributes").write_text("* filter=a=b diff=x\n")
    (checkout_folder / "a.py").write_text("new\n")
    os.utime(checkout_folder / "same.py", (1, 1))
    with (checkout_folder / ".git" / "config").open("a") as config:
        config.write(HOSTILE.format(program=program))
    return trace


def test_of_what_a_repository_tells_git_to_run_nothing_is_run(hostile):
    (found,) = checkouts()
    assert found.untracked == (".gitattributes", "hooks/post-index-change")
    assert not hostile.exists(), hostile.read_text()


@pytest.fixture
def filtered(checkout_folder):
    """A clean work tree with a filter that keeps content out of the commit; git has to look again."""
    git(checkout_folder, "config", "filter.hide.clean", "tr a-z A-Z")
    (checkout_folder / ".gitattributes").write_text("*.bin filter=hide\n")
    (checkout_folder / "key.bin").write_text("plain\n")
    (checkout_folder / "a.py").write_text("old\n")
    git(checkout_folder, "add", ".")
    git(checkout_folder, "commit", "-m", "first")
    os.utime(checkout_folder / "key.bin", (1, 1))
    return checkout_folder


@pytest.mark.parametrize("new", ["old\n", "new\n"])
def test_a_file_with_a_filter_is_named_and_never_in_the_patch(filtered, new):
    (filtered / "a.py").write_text(new)
    (found,) = checkouts()
    assert found.uncompared == ("key.bin",)
    assert "plain" not in found.patch
    assert ("+new" in found.patch) == (new == "new\n")


def test_a_file_with_a_filter_that_git_knows_as_unchanged_is_compared(filtered):
    git(filtered, "status")
    (found,) = checkouts()
    assert (found.patch, found.uncompared) == ("", ())


def test_settings_of_git_in_the_environment_stay(filtered, monkeypatch):
    for name, value in {
        "COUNT": "1",
        "KEY_0": "core.excludesFile",
        "VALUE_0": str(filtered / "none"),
    }.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    (filtered / "none").write_text("*.log\nnone\n")
    (filtered / "x.log").touch()
    assert checkouts()[0].untracked == ()


def test_the_filters_of_a_tree_are_read_once(filtered, monkeypatch):
    asked, real = [], facts._git

    def noted(folder, words, variables):
        asked.append(words[0])
        return real(folder, words, variables)

    monkeypatch.setattr(facts, "_git", noted)
    checkouts()
    assert asked.count("config") == 1
    assert len(asked) == 8, "two looks for a tree, and six at the one that there is"


def test_a_tree_that_git_cannot_compare_is_not_taken_for_clean(checkout_folder, monkeypatch):
    git(checkout_folder, "commit", "--allow-empty", "-m", "first")
    real = facts._git
    monkeypatch.setattr(facts, "_git", lambda *given: None if "diff" in given[1] else real(*given))
    assert checkouts()[0].uncompared == (".",)


def test_plain_git_runs_what_it_is_told(hostile):
    subprocess.run(["git", "diff", "HEAD"], check=False, capture_output=True)
    assert hostile.exists()


def test_a_checkout_without_a_commit_is_no_error(checkout_folder):
    (found,) = checkouts()
    assert (found.commit, found.patch) == (None, "")


def test_without_git_there_is_no_checkout(checkout_folder, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert checkouts() == ()


def on_cuda(plan):
    return replace(plan, config=replace(plan.config, device=replace(plan.config.device, kind="cuda")))


def test_cuda_ranks_without_devices_are_refused_with_the_arithmetic(make_plan, monkeypatch):
    monkeypatch.setattr("launcher.app.preflight.installed_gpus", lambda: ["H200"] * 8)
    plan = on_cuda(make_plan())
    assert device_faults(plan, {"CUDA_VISIBLE_DEVICES": "4,5"}) == []
    (fault,) = device_faults(plan, {"CUDA_VISIBLE_DEVICES": "4"})
    assert str(fault) == (
        "device.kind=cuda: the plan has 2 ranks on as many CUDA devices, and 1 can be used here "
        "(CUDA_VISIBLE_DEVICES=4). Use fewer ranks, or set device=cpu cluster=local_cpu."
    )


def test_without_any_device_fewer_ranks_are_no_way_out(make_plan, monkeypatch):
    monkeypatch.setattr("launcher.app.preflight.installed_gpus", lambda: [])
    (fault,) = device_faults(on_cuda(make_plan("parallel.pp=1", "cluster.devices_per_node=1")), {})
    assert str(fault).endswith(
        "the plan has 1 rank on as many CUDA devices, and 0 can be used here. "
        "Set device=cpu cluster=local_cpu."
    )


def test_ranks_on_the_cpu_need_no_device(make_plan, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert device_faults(make_plan(), {}) == []
