"""Who may read the directory of a run, and that nobody else may write there."""

import grp
import os
import stat

import pytest

from launcher.app.lifecycle import share_run
from launcher.app.planning import make_plan
from launcher.base.errors import ConfigError
from launcher.base.files import share, write_whole
from launcher.cli.main import main
from launcher.contract.site import SiteConfig
from launcher.runtime.process.log import open_log
from launcher_plugins.executors.slurm.executor import Slurm
from launcher_plugins.executors.torchrun import _fresh_rendezvous
from tests.helpers.slurm_stage import REQUEST, TWO_BY_TWO

SHARED = SiteConfig(group_access="read")


@pytest.fixture(params=[0o002, 0o022, 0o077], ids=oct, autouse=True)
def mask(request):
    """The umask of the user."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.fixture
def run_dir(tmp_path):
    """A directory as it is before its job is recorded."""
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    for name in ("logs", "exit", "source"):
        (path / name).mkdir()
    (path / "source" / "code.py").write_text("")
    (path / "link").symlink_to("/etc/passwd")
    return path


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def modes(run_dir):
    """Of everything in a run directory, and of itself."""
    return {path: mode(path) for path in [run_dir, *run_dir.rglob("*")] if not path.is_symlink()}


def log_of_a_rank(run_dir):
    """Has a process write a log as a rank does."""
    if (child := os.fork()) == 0:
        open_log(run_dir / "logs" / "rank-0.log")
        os._exit(0)
    os.waitpid(child, 0)
    return run_dir / "logs" / "rank-0.log"


def test_a_group_may_read_all_that_is_and_comes_to_be_in_a_shared_run_and_write_nothing(run_dir, mask):
    share_run(run_dir, SHARED)
    log_of_a_rank(run_dir)
    (run_dir / "logs" / "torchrun").mkdir()
    (run_dir / "exit" / "job.json").write_text("{}")
    os.umask(mask)  # as of a process that looks at the run later
    write_whole(run_dir / "status.json", "{}")
    for path, bits in modes(run_dir).items():
        assert bits & 0o040, path
        assert not bits & 0o022, path
        assert bits & 0o010 or not path.is_dir(), path
    assert mode(run_dir) == 0o750
    assert (run_dir / "link").is_symlink()


def test_nothing_is_shared_unasked(run_dir):
    before = modes(run_dir)
    share_run(run_dir, SiteConfig())
    assert modes(run_dir) == before
    assert mode(run_dir) == 0o700
    assert mode(log_of_a_rank(run_dir)) == 0o600


def test_what_ranks_meet_in_is_for_nobody_else(run_dir):
    share_run(run_dir, SHARED)
    path = _fresh_rendezvous(str(run_dir))
    assert path == str(run_dir / "rendezvous")
    assert mode(run_dir / "rendezvous") == 0o600


def test_a_named_group_has_the_run_and_all_that_comes_to_be_in_it(run_dir):
    (name, number) = next(
        (item.gr_name, item.gr_gid) for item in grp.getgrall() if item.gr_gid != os.getgid()
    )
    if os.getuid() != 0:
        name, number = grp.getgrgid(os.getgroups()[-1]).gr_name, os.getgroups()[-1]
    share(run_dir, name)
    write_whole(run_dir / "exit" / "job.json", "{}")
    assert {path.stat().st_gid for path in modes(run_dir)} == {number}


def test_a_group_that_is_none_is_refused(run_dir):
    with pytest.raises(
        ConfigError, match=r"site\.group=nobodys: cannot be given .*run: there is no such group here\. Give"
    ):
        share_run(run_dir, SiteConfig(group_access="read", group="nobodys"))


def test_a_group_has_an_effect_only_where_it_may_read():
    with pytest.raises(ConfigError, match=r"site\.group"):
        make_plan("quickstart", ("site.group=users",))


def test_a_job_script_makes_what_the_group_may_read():
    shared = make_plan("quickstart", (*TWO_BY_TWO, "site.group_access=read")).plan
    assert "\numask 027\n" in Slurm().render(shared, REQUEST).text
    assert "umask 027" not in Slurm().render(make_plan("quickstart", TWO_BY_TWO).plan, REQUEST).text


def test_a_run_on_this_machine_takes_the_setting(capsys):
    assert main(["run", "quickstart", "site.group_access=read", "site.account=physics"]) == 2
    faults = capsys.readouterr().err
    assert "site.account" in faults
    assert "group_access" not in faults
