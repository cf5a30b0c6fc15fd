"""Runs on a real Slurm that are cut short, and go on."""

import json
import re
import shutil
from datetime import datetime, timedelta
from functools import partial

import pytest

from tests.helpers.slurm_cluster import REPOSITORY, SAVES, TWO_BY_TWO, job_of, saving_rank
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.needs("slurm")


def test_a_job_goes_on_after_its_time_limit_and_after_a_preemption(slurm):
    """The first start is told ahead of its time limit, the second is preempted, the third finishes."""
    # Slurm looks at limits every 30 s, and tells a job as much ahead of its lead: from 10 s after the start
    # on. Told while its script still starts, a job would not hear it.
    limit = ("site.time_limit=00:01:00", "executor.save_lead_s=20")
    run, job = slurm.submit(saving_rank(3), SAVES, *limit)
    wait_until(lambda: len(slurm.told()) == 8)
    (run / "exit" / "rank-0.json").write_text("{}")
    slurm.ask("scontrol", "requeue", job)
    slurm.trireme("wait", "run")
    assert [name for name, _ in slurm.rendezvous()] == [f"{job}.{restart}" for restart in range(3)]
    assert len({address for _, address in slurm.rendezvous()}) == 3
    assert (run / "logs" / "requeues").read_text() == f"{job}.0\n", "what is not the run's own does not count"
    assert [words[5] == "--resume" for words in slurm.told()] == [False] * 4 + [True] * 8
    assert sorted(path.name for path in (run / "exit").iterdir()) == ["finished", "job.json", "start.json"]
    told = slurm.trireme("status", "run").splitlines()
    starts = [line.split() for line in told if f" {job} " in line and line[0].isdecimal()]
    assert [words[0] for words in starts] == ["1", "2", "3"]
    assert "stopped by a signal, saved after step " in " ".join(starts[0])
    assert starts[2][-1] == "finished"
    assert "next: nothing: it is finished" in told
    log = (run / "logs" / "executor.log").read_text()
    assert log.count(f"trireme: requeues job {job} ") == 1
    assert log.count(f"trireme: leaves job {job} to Slurm") == 1


def test_a_job_whose_node_crashes_goes_on_on_other_nodes(slurm):
    run, job = slurm.submit('[ -e "$run/second" ] || exec sleep 60', SAVES)
    wait_until(lambda: len(slurm.told()) == 4)
    (run / "second").touch()
    (run / "checkpoints" / "step-00000020").mkdir(parents=True)
    (run / "checkpoints" / "step-00000040.unfinished").mkdir()
    lost = next(words[3] for words in slurm.told() if words[0] == "3")
    slurm.run_cluster("crash", lost)
    try:
        slurm.trireme("wait", "run")
    finally:
        slurm.run_cluster("revive", lost)
    second = slurm.told()[4:]
    assert lost not in {words[3] for words in second}
    assert [words[5] for words in second] == ["--resume"] * 4
    assert [name for name, _ in slurm.rendezvous()] == [f"{job}.0", f"{job}.1"]


def has_told(slurm, num_ranks):
    return len(slurm.told()) == num_ranks


def test_a_chain_of_jobs_goes_on_and_cancels_those_that_are_not_needed(slurm):
    chain = ("executor.continuation=chain", "executor.max_starts=6")
    _, jobs = slurm.submit(saving_rank(3), SAVES, *chain)
    first, second, third, *rest = jobs.split(",")
    for number, job in enumerate((first, second), 1):
        wait_until(partial(has_told, slurm, 4 * number))
        slurm.ask("scancel", "--batch", "--signal=USR1", job)
    slurm.trireme("wait", "run")
    assert [name for name, _ in slurm.rendezvous()] == [f"{first}.0", f"{second}.0", f"{third}.0"]
    states = slurm.ask("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={','.join(rest)}")
    assert states.split() == ["CANCELLED"] * 3
    assert "succeeded" in slurm.trireme("status", "run")


def test_a_job_that_waits_for_one_to_fail_never_starts_once_that_has_succeeded(slurm):
    """Of which the jobs of a chain make use: also the one that Slurm is handed after the end of the run."""
    wait = ("--dependency=afternotok:{}", "--kill-on-invalid-dep=yes", "--parsable", "--output=/dev/null")
    first = slurm.ask("sbatch", "--parsable", "--wait", "--output=/dev/null", "--wrap=true")
    failed = slurm.ask("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=false")

    def after(job, name):
        words = [word.format(job) for word in wait]
        return slurm.ask("sbatch", *words, f"--wrap=touch '{slurm.folder}/{name}'")

    late, next_one = after(first, "late"), after(failed, "next")
    slurm.ask("scontrol", "release", failed)
    wait_until((slurm.folder / "next").exists)
    ask = ("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={late}")
    wait_until(lambda: slurm.ask(*ask) == "CANCELLED")
    assert not (slurm.folder / "late").exists()
    assert next_one != late


def test_a_run_that_is_told_to_end_in_its_last_save_is_finished_and_not_started_again(slurm):
    last = '[ "$RANK" = 0 ] && mkdir -p "$run/checkpoints/step-00000010"; sleep 2; exit 138'
    run, job = slurm.submit(last, SAVES.replace("1000", "10"), "train.num_steps=10")
    wait_until(lambda: len(slurm.told()) == 4)
    slurm.ask("scancel", "--batch", "--signal=USR1", job)
    slurm.trireme("wait", "run")
    assert (run / "exit" / "job.json").read_text() == f'{{"job": "{job}", "exit_code": 0}}\n'
    slurm.ask("scontrol", "requeue", job)
    log = run / "logs" / "executor.log"
    wait_until(lambda: f"the run is finished, so job {job} has nothing to start\n" in log.read_text())
    assert (run / "logs" / "starts").read_text() == f"{job}.0\n"


SMALL = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_heads=2",
    "batch.seq_length=16",
    "batch.global_size=4",
    "batch.micro_size=1",
    "train.num_steps=400",
    "train.eval_batches=0",
    "report.warmup_steps=1",
)


def steps(run, rank):
    """The step records of a rank, in their order."""
    path = run / "metrics" / f"rank-{rank:05}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if record["type"] == "step"]


@pytest.fixture
def tree(slurm):
    """A copy of the tree, which the launcher is run from."""
    tree = slurm.folder / "tree"
    for name in ("launcher", "conf", "recipes", "slurm"):
        shutil.copytree(REPOSITORY / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(REPOSITORY / "plugins", tree, dirs_exist_ok=True)
    slurm.environment |= {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
    return tree


def test_a_queued_run_trains_although_its_tree_is_broken_and_gives_way_to_an_urgent_job(slurm, tree):
    """The one test with real ranks: two nodes of two, which torchrun starts twice, and their baseline."""
    text = slurm.folder / "text.txt"
    text.write_text("In the beginning there was a little text, and it was repeated. " * 200)
    (slurm.folder / "random.py").write_text("raise SystemExit('a file of the current folder was imported')\n")
    data = (f"data.source={text}", f"data.cache_dir={slurm.folder}/cache", "report.baseline_steps=400")
    # The baseline runs at the same time: nothing is measured here. All steps are compared.
    hold = ("+site.options.hold=true", "site.is_one_machine=false", "executor.starter=torchrun", SAVES)
    rank = tree / "launcher" / "runtime" / "process" / "rank.py"
    rank.write_text(rank.read_text() + "\nprint('the tree as it was')\n")
    slurm.trireme("submit", "quickstart", *TWO_BY_TWO, *SMALL, *data, *hold, "run.dir=run")
    for module in (tree / "launcher" / "runtime").rglob("*.py"):
        module.write_text("raise SystemExit('the broken tree was used')\n")
    run = slurm.folder / "run"
    (base,) = (slurm.folder / "runs").iterdir()
    assert "waits: JobHeldUser" in slurm.trireme("status", "run")
    slurm.ask("scontrol", "release", job_of(run), job_of(base))
    wait_until(lambda: len(steps(run, 0)) > 20)
    # The baseline has one rank, on the first node.
    slurm.ask("sbatch", "--partition=urgent", "--nodelist=node1", "--exclusive", "--wrap=true")
    output = slurm.trireme("wait", "run")
    assert "step 400/400" in output
    assert "speedup" in output.lower()
    log = slurm.trireme("logs", "run", "--rank", "3")
    assert "the tree as it was\n" in log
    first = slurm.trireme("logs", "run", "--rank", "0")
    (saved,) = re.findall(r"stopped by SIGTERM: saved after step (\d+)\n", first)
    assert f"resumed after step {saved}\n" in log
    assert [[record["step"] for record in steps(run, rank)] for rank in range(4)] == [list(range(400))] * 4
    assert "400/400" in slurm.trireme("status", "run")
    assert [*json.loads((run / "inputs.json").read_text())["data"]] == ["text.txt"], (
        "compared at the second start"
    )
    losses, alone = ([record["loss"] for record in steps(*place)] for place in ((run, 2), (base, 0)))
    assert losses == pytest.approx(alone, rel=2e-5)
    assert losses[int(saved) :] != pytest.approx(alone[: 400 - int(saved)], rel=2e-5)  # of a new start


SLOW = """
import time
from launcher.runtime.process.stop import StopRequest

StopRequest.__init__.__defaults__ = (0.0,)  # the ranks ask each other after every step

def slowed(self, step, *, save=Saver.save):
    if (self._root.parent / "slow").exists() and step % 20:  # the one that the end of the job asks for
        time.sleep(600)
    save(self, step)

def held(self, step_s, *, measure=Saver.measure):
    if (self._root.parent / "slow").exists() and (self._root / "step-00000020").exists():
        time.sleep(0.5)
    measure(self, step_s)

Saver.save, Saver.measure = slowed, held
"""


def test_a_job_whose_save_takes_longer_than_its_time_goes_on_from_the_checkpoint_before(slurm, tree):
    """With real ranks, beside the same run undisturbed."""
    text = slurm.folder / "text.txt"
    text.write_text("In the beginning there was a little text, and it was repeated. " * 200)
    saving = tree / "launcher" / "runtime" / "checkpoint" / "saving.py"
    saving.write_text(saving.read_text() + SLOW)
    data = (f"data.source={text}", f"data.cache_dir={slurm.folder}/cache", "train.num_steps=60")
    words = ("site=box", "cluster.nodes=1", "cluster.devices_per_node=2", *SMALL, *data)
    held = ("+site.options.hold=true", "train.checkpoint_interval=20", "train.async_checkpoint=false")
    for name in ("run", "undisturbed"):
        slurm.trireme("submit", "quickstart", *words, *held, f"run.dir={name}", "--no-baseline")
    run, other = slurm.folder / "run", slurm.folder / "undisturbed"
    (run / "slow").touch()
    slurm.ask("scontrol", "release", job_of(run), job_of(other))
    wait_until(lambda: len(steps(run, 0)) > 21)  # a stop after step 20 would save nothing more
    end = (datetime.now() + timedelta(seconds=8)).isoformat(timespec="seconds")
    slurm.ask("scontrol", "update", f"JobId={job_of(run)}", f"EndTime={end}")
    slurm.ask("scancel", "--batch", "--signal=USR1", job_of(run))
    log = run / "logs" / "executor.log"
    wait_until(
        lambda: "before the end of the job: executor.save_lead_s has to be longer\n" in log.read_text()
    )
    slurm.ask("scontrol", "update", f"JobId={job_of(run)}", "TimeLimit=10")
    wait_until(lambda: len((run / "logs" / "starts").read_text().splitlines()) == 2)
    (run / "slow").unlink()
    for name in ("run", "undisturbed"):
        slurm.trireme("wait", name)
    assert "resumed after step 20\n" in slurm.trireme("logs", "run", "--rank", "0")
    made, undisturbed = ([record["loss"] for record in steps(each, 1)][-40:] for each in (run, other))
    assert made == undisturbed
    assert made[1:] != undisturbed[:-1]
    shards = [
        "checkpoints/step-00000060/shard-00000.safetensors",
        "checkpoints/step-00000060/shard-00001.safetensors",
    ]
    assert [(run / name).read_bytes() for name in shards] == [(other / name).read_bytes() for name in shards]
    assert (run / shards[0]).read_bytes() != (run / shards[0].replace("60", "40")).read_bytes()
