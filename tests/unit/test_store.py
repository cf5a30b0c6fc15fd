import multiprocessing
import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from launcher.base.errors import ConfigError, JobError
from launcher.base.files import read_json
from launcher.contract.job import RunConfig
from launcher.runs import store
from launcher.runs.store import new_directory


def settings(root, directory=None):
    return RunConfig(
        dir=None if directory is None else str(directory), root=str(root), timeout_s=1.0, start_timeout_s=1.0
    )


@pytest.fixture(autouse=True)
def fixed_time(monkeypatch):
    monkeypatch.setattr(store, "_stamp", lambda: "20250102-030405")


def test_an_automatic_directory_is_named_after_recipe_and_time(tmp_path):
    directory = new_directory(settings(tmp_path / "runs"), "quickstart")
    assert directory.path == tmp_path / "runs" / "quickstart-20250102-030405"
    assert sorted(path.name for path in directory.path.iterdir()) == ["exit", "lock", "logs", "metrics"]


def test_a_second_automatic_directory_of_the_same_second_gets_a_number(tmp_path):
    paths = [new_directory(settings(tmp_path), "a").path.name for _ in range(3)]
    assert paths == ["a-20250102-030405", "a-20250102-030405-2", "a-20250102-030405-3"]


def test_thirty_two_processes_at_once_get_thirty_two_directories(tmp_path):
    fork = multiprocessing.get_context("fork")
    start, paths = fork.Barrier(32), fork.SimpleQueue()

    def make_one():
        start.wait()
        paths.put(new_directory(settings(tmp_path), "many").path)

    processes = [fork.Process(target=make_one) for _ in range(32)]
    for process in processes:
        process.start()
    made = {paths.get() for _ in processes}
    for process in processes:
        process.join()
    assert len(made) == 32
    assert set(tmp_path.iterdir()) == made


def test_one_of_many_callers_at_once_gets_a_named_directory(tmp_path):
    def attempt(_):
        try:
            return new_directory(settings(tmp_path, tmp_path / "mine"), "x").path
        except ConfigError:
            return None

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
        match=r"/mine: already exists; a run never overwrites a directory\. Give --resume .* --overwrite",
    ):
        new_directory(settings(tmp_path, tmp_path / "mine"), "x")


def test_overwrite_moves_the_old_run_aside_and_never_deletes(tmp_path):
    run = settings(tmp_path, tmp_path / "mine")
    for number in range(3):
        directory = new_directory(run, "x", overwrite=True)
        directory.write("plan.json", "{}")
        directory.write("mark", str(number))
        directory.release()
    names = ["mine", "mine.20250102-030405", "mine.20250102-030405-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert [(tmp_path / name / "mark").read_text() for name in names] == ["2", "0", "1"]


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A work tree with a home folder beside it; the current folder is inside of the tree."""
    (tmp_path / "tree" / "src").mkdir(parents=True)
    (tmp_path / "tree" / "src" / "mine.py").write_text("")
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "tree" / "src")
    return tmp_path


@pytest.mark.parametrize(
    ("directory", "why"),
    [
        (".", r"is the current folder or holds it"),
        ("../../tree", r"is the current folder or holds it"),
        ("/", r"is the current folder or holds it"),
        ("../../link", r"is the current folder or holds it"),
        ("~", r"is your home folder or holds it"),
        ("mine.py", r"is no directory"),
        ("../docs", r"holds files and is no run directory \(which has plan\.json, logs, metrics and exit\)"),
        ("../project", r"holds files and is no run directory \(which has plan\.json, logs, .*\)"),
    ],
)
def test_what_is_no_run_is_never_moved_aside(work, directory, why):
    (work / "link").symlink_to(work / "tree")
    (work / "tree" / "docs" / "deep").mkdir(parents=True)
    (work / "tree" / "docs" / "deep" / "readme").write_text("")
    (work / "tree" / "project").mkdir()
    (work / "tree" / "project" / "plan.json").write_text("")
    before = sorted(work.rglob("*"))
    message = rf"run\.dir=.*: {why}, and is not moved aside\. Give another run\.dir\.$"
    with pytest.raises(ConfigError, match=message):
        new_directory(settings(work, directory), "x", overwrite=True)
    assert sorted(work.rglob("*")) == before


def test_what_is_no_run_is_refused_without_naming_a_flag_that_would_be_refused(work):
    with pytest.raises(
        ConfigError, match=r"already exists; a run never overwrites a directory\. Give another run\.dir\.$"
    ):
        new_directory(settings(work, "."), "x")


def test_a_folder_without_a_file_is_moved_aside(work):
    (work / "tree" / "runs" / "logs").mkdir(parents=True)
    new_directory(settings(work, "../runs"), "x", overwrite=True)
    assert (work / "tree" / "runs.20250102-030405" / "logs").is_dir()


def test_a_run_that_is_still_going_is_never_moved_aside(tmp_path):
    run = settings(tmp_path, tmp_path / "mine")
    mine = new_directory(run, "x")
    with pytest.raises(
        JobError,
        match=rf"mine is in use by process {os.getpid()} on .* since .*, which has not ended\. "
        r"trireme wait .*mine follows it, trireme cancel .*mine ends it; start again after that\.",
    ):
        new_directory(run, "x", overwrite=True)
    mine.write_status("running")
    mine.release()
    with pytest.raises(
        JobError, match=rf"mine is in use by process {os.getpid()} on .* since .*, which has not"
    ):
        new_directory(run, "x", overwrite=True)


def test_a_root_that_cannot_be_made_is_a_fault_of_its_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"run\.root=.*: cannot be created: Not a directory\. Set run\.root to"
    ):
        new_directory(settings(tmp_path / "file" / "runs"), "x")


def test_status_keeps_when_the_run_started(tmp_path):
    directory = new_directory(settings(tmp_path), "x")
    directory.write_status("running")
    started = read_json(directory.status_file)["started"]
    directory.write_status("failed", exit_code=-9)
    status = read_json(directory.status_file)
    assert (status["phase"], status["exit_code"], status["started"]) == ("failed", -9, started)


def test_a_file_cut_short_reads_as_empty(tmp_path):
    (tmp_path / "x.json").write_text('{"phase": "run')
    assert read_json(tmp_path / "x.json") == {}
    assert read_json(tmp_path / "absent.json") == {}
