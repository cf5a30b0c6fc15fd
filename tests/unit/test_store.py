import json
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from launcher.config.schema import RunConfig
from launcher.errors import ConfigError, JobError
from launcher.jobs import store
from launcher.jobs.store import RunDirectory, new_directory, read_json, resumed_directory

MAKE_ONE = """
import sys
from launcher.config.schema import RunConfig
from launcher.jobs.store import new_directory
settings = RunConfig(dir=None, root=sys.argv[1], timeout_s=1.0)
sys.stdin.readline()
print(new_directory(settings, "many").path)
"""


def settings(root, directory=None):
    return RunConfig(dir=None if directory is None else str(directory), root=str(root), timeout_s=1.0)


@pytest.fixture(autouse=True)
def fixed_time(monkeypatch):
    monkeypatch.setattr(store, "_stamp", lambda: "20250102-030405")


def test_an_automatic_directory_is_named_after_recipe_and_time(tmp_path):
    directory = new_directory(settings(tmp_path / "runs"), "quickstart")
    assert directory.path == tmp_path / "runs" / "quickstart-20250102-030405"
    assert sorted(path.name for path in directory.path.iterdir()) == ["exit", "logs", "metrics"]


def test_a_second_automatic_directory_of_the_same_second_gets_a_number(tmp_path):
    paths = [new_directory(settings(tmp_path), "a").path.name for _ in range(3)]
    assert paths == ["a-20250102-030405", "a-20250102-030405-2", "a-20250102-030405-3"]


def test_thirty_two_processes_at_once_get_thirty_two_directories(tmp_path):
    command = [sys.executable, "-S", "-c", MAKE_ONE, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(32)
    ]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    paths = {process.communicate()[0].strip() for process in processes}
    assert len(paths) == 32
    assert len(list(tmp_path.iterdir())) == 32


def test_one_of_many_callers_at_once_gets_a_named_directory(tmp_path):
    def attempt(_):
        try:
            return new_directory(settings(tmp_path, tmp_path / "mine")).path
        except ConfigError:
            return None

    def new_directory(run):
        return store.new_directory(run, "x")

    with ThreadPoolExecutor(8) as pool:
        made = [path for path in pool.map(attempt, range(8)) if path]
    assert made == [tmp_path / "mine"]


def test_only_the_owner_can_read_a_run_directory(tmp_path):
    directory = new_directory(settings(tmp_path), "a")
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["../x", "a b", "a;rm -rf /", "a|b", "x\n", 'a"=0"', "ü", ".."])
def test_a_hostile_name_becomes_one_harmless_folder_under_the_root(tmp_path, name):
    path = new_directory(settings(tmp_path / "runs"), name).path
    assert path.parent == tmp_path / "runs"
    assert all(character.isascii() and (character.isalnum() or character in "._-") for character in path.name)


@pytest.mark.parametrize("name", ["a 0", 'a"=0"', "a'; echo foo", "a\\=0", "a\nb", "ü"])
def test_a_hostile_directory_that_was_asked_for_is_made_as_it_is(tmp_path, name):
    assert new_directory(settings(tmp_path, tmp_path / name), "x").path == tmp_path / name
    assert (tmp_path / name / "logs").is_dir()


def test_an_existing_directory_is_refused_with_the_ways_out(tmp_path):
    new_directory(settings(tmp_path, tmp_path / "mine"), "x")
    with pytest.raises(
        ConfigError,
        match=r"run\.dir=.*/mine: exists, and no run is written over another\. Give --resume .* --overwrite",
    ):
        new_directory(settings(tmp_path, tmp_path / "mine"), "x")


def test_overwrite_moves_the_old_run_aside_and_never_deletes(tmp_path):
    run = settings(tmp_path, tmp_path / "mine")
    for number in range(3):
        (new_directory(run, "x", overwrite=True).path / "mark").write_text(str(number))
    names = ["mine", "mine.20250102-030405", "mine.20250102-030405-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert [(tmp_path / name / "mark").read_text() for name in names] == ["2", "0", "1"]


def test_a_run_that_is_still_going_is_never_moved_aside(tmp_path):
    run = settings(tmp_path, tmp_path / "mine")
    new_directory(run, "x").write_status("running")
    with pytest.raises(JobError, match=rf"mine is in use by .* still going \(process {os.getpid()}\)"):
        new_directory(run, "x", overwrite=True)


def test_a_root_that_cannot_be_made_is_a_fault_of_its_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"run\.root=.*: cannot be made: Not a directory\. Set run\.root to"
    ):
        new_directory(settings(tmp_path / "file" / "runs"), "x")


def test_status_keeps_when_the_run_started(tmp_path):
    directory = new_directory(settings(tmp_path), "x")
    directory.write_status("running")
    started = read_json(directory.status_file)["started"]
    directory.write_status("failed", -9)
    status = read_json(directory.status_file)
    assert (status["phase"], status["exit_code"], status["started"]) == ("failed", -9, started)


def interrupted_run(tmp_path, plan):
    directory = new_directory(settings(tmp_path, tmp_path / "mine"), "x")
    directory.write("plan.json", json.dumps(plan))
    directory.write_status("cancelled", 130)
    (directory.path / "checkpoints" / "step-00000020").mkdir(parents=True)
    (directory.path / "exit" / "rank-0.json").write_text("{}")
    return directory


def test_resume_takes_the_directory_and_sets_the_last_attempt_aside(tmp_path):
    interrupted_run(tmp_path, {"config": {"seed": 0}})
    directory = resumed_directory(settings(tmp_path, tmp_path / "mine"), '{"config": {"seed": 0}}')
    assert directory == RunDirectory(tmp_path / "mine")
    assert list((directory.path / "exit").iterdir()) == []
    assert (directory.path / "exit.20250102-030405" / "rank-0.json").is_file()


def test_resume_with_other_settings_names_them(tmp_path):
    interrupted_run(tmp_path, {"config": {"seed": 0, "parallel": {"tp": 1}}})
    with pytest.raises(
        ConfigError, match=r"planned with other settings\. .* Changed: config\.parallel\.tp\."
    ):
        resumed_directory(
            settings(tmp_path, tmp_path / "mine"), '{"config": {"seed": 0, "parallel": {"tp": 2}}}'
        )


def test_resume_of_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.dir=.*/none: holds no plan\.json, so there is nothing"):
        resumed_directory(settings(tmp_path, tmp_path / "none"), "{}")


def test_resume_without_a_checkpoint_says_how_to_have_one(tmp_path):
    directory = interrupted_run(tmp_path, {})
    (directory.path / "checkpoints" / "step-00000020").rmdir()
    with pytest.raises(JobError, match=r"no checkpoint to resume from\. Set train\.checkpoint_interval"):
        resumed_directory(settings(tmp_path, tmp_path / "mine"), "{}")


def test_a_file_cut_short_reads_as_empty(tmp_path):
    (tmp_path / "x.json").write_text('{"phase": "run')
    assert read_json(tmp_path / "x.json") == {}
    assert read_json(tmp_path / "absent.json") == {}
