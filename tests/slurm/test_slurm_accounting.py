"""A real Slurm with accounts: jobs that give way by their quality of service, and what sacct says."""

import pytest

from launcher_plugins.executors.slurm.queue import ask_about
from tests.helpers.slurm_cluster import SAVES, TWO_BY_TWO, saving_rank
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.needs("accounting")
FORGETFUL_SQUEUE = """#!/bin/bash
echo 'slurm_load_jobs error: Invalid job id specified' >&2
exit 1
"""


def outrank(slurm):
    """An urgent job that needs every node for a moment."""
    slurm.ask("sbatch", "--qos=urgent", "--nodes=4", "--exclusive", "--wrap=true")


def test_a_job_that_gives_way_to_an_urgent_one_saves_and_goes_on(slurm_with_accounts):
    slurm = slurm_with_accounts
    run, job = slurm.submit(saving_rank(2), SAVES, "site.qos=normal", "site.account=lab")
    wait_until(lambda: len(slurm.told()) == 4)
    outrank(slurm)
    slurm.trireme("wait", "run")
    assert [words[5] == "--resume" for words in slurm.told()] == [False] * 4 + [True] * 4
    assert (run / "exit" / "job.json").read_text() == f'{{"job": "{job}", "exit_code": 0}}\n'
    states = "--format=State"
    wait_until(lambda: "COMPLETED" in slurm.ask("sacct", "-X", "-P", "-n", states, f"--jobs={job}"))
    every_start = slurm.ask("sacct", "-X", "-P", "-n", "-D", states, f"--jobs={job}")
    assert every_start.splitlines() == ["REQUEUED", "COMPLETED"]


def test_ranks_that_could_not_save_before_they_gave_way_have_not_failed(slurm_with_accounts):
    slurm = slurm_with_accounts
    run, job = slurm.submit('[ -e "$run/second" ] || exec sleep 60', SAVES)
    wait_until(lambda: len(slurm.told()) == 4)
    (run / "second").touch()
    outrank(slurm)
    slurm.trireme("wait", "run")
    assert [name for name, _ in slurm.rendezvous()] == [f"{job}.0", f"{job}.1"]
    assert not (run / "logs" / "failures").exists()


def test_the_accounts_tell_of_every_kind_of_job_what_the_controller_told(slurm_with_accounts, monkeypatch):
    slurm = slurm_with_accounts
    (slurm.folder / "het.sh").write_text("#!/bin/bash\n#SBATCH hetjob\nexit 7\n")
    once = ("sbatch", "--parsable")
    words = {
        "succeeded": ("--wrap=true",),
        "failed": ("--wrap=exit 17",),
        "killed": ("--wrap=kill -KILL $$",),
        "array": ("--array=0-2", "--wrap=exit $SLURM_ARRAY_TASK_ID"),
        "het": ("het.sh",),
        "cancelled": ("--hold", "--wrap=true"),
        "requeued": ('--wrap=[ -n "$SLURM_RESTART_COUNT" ] || scontrol requeue $SLURM_JOB_ID; sleep 1',),
    }
    jobs = {name: slurm.ask(*once, *options) for name, options in words.items()}
    slurm.ask("scancel", jobs["cancelled"])
    wait_until(lambda: not slurm.ask("squeue", "--noheader"))
    asked = [*jobs.values(), f"{jobs['array']}_1", f"{jobs['array']}_2"]
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    live = ask_about(asked).states
    (slurm.folder / "squeue").write_text(FORGETFUL_SQUEUE)
    (slurm.folder / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{slurm.folder}:{slurm.environment['PATH']}")
    wait_until(lambda: ask_about(asked).states == live)
    told = {name: (live[job].phase, live[job].exit_code) for name, job in jobs.items()}
    assert told == {
        "succeeded": ("succeeded", 0),
        "failed": ("failed", 17),
        "killed": ("failed", -9),
        "array": ("failed", 1),
        "het": ("failed", 7),
        "cancelled": ("cancelled", 0),
        "requeued": ("succeeded", 0),
    }
    assert live[f"{jobs['array']}_2"].exit_code == 2


def test_a_site_is_written_with_the_account_and_its_qualities_of_service(slurm_with_accounts):
    slurm = slurm_with_accounts
    slurm.environment["XDG_CONFIG_HOME"] = str(slurm.folder)
    slurm.trireme("site", "init", "alps", "qos=urgent")
    (site,) = slurm.folder.rglob("alps.yaml")
    assert "\naccount: lab\n" in site.read_text()
    assert "\nqos: urgent\n" in site.read_text()
    assert "accepts this job" in slurm.trireme("site", "check", "alps")


@pytest.mark.parametrize("setting", ["account", "qos"])
def test_what_the_accounts_do_not_know_is_refused_with_its_setting(slurm_with_accounts, setting):
    output = slurm_with_accounts.trireme("submit", *TWO_BY_TWO, f"site.{setting}=nobodys", code=2)
    assert f"Look at site.{setting}." in output
