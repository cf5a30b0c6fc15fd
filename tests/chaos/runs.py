"""Runs that are struck and go on, on this machine and on a Slurm in a box, and what they computed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from launcher.base.files import json_object
from tests.chaos.faults import INTERVAL, NUM_STEPS, Fault
from tests.helpers.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
CLUSTER = REPOSITORY / "slurm" / "cluster"
DISK = "size=4m"
LAYOUT = (
    *("parallel.pp=2", "model.num_layers=2", "model.hidden_size=32", "model.num_heads=2"),
    *("batch.seq_length=16", "batch.global_size=4", "batch.micro_size=1", "report.warmup_steps=1"),
    "train.eval_batches=0",
)
"""Two stages, so that each rank has a shard of its own."""
WHERE = {
    "local": ("cluster.devices_per_node=2",),
    "slurm": ("site=box", "cluster.nodes=2", "cluster.devices_per_node=1"),
}
_RANK = "launcher.runtime.process.main"


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a run left."""

    losses: frozenset[tuple[int, float]]
    """Step and loss of every record, of steps that were made again, too."""
    shards: Mapping[str, str]
    """SHA-256 of each shard after the last step."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One try of a fault."""

    fault: Fault
    place: str
    is_equal: bool
    end_s: float | None
    """From the fault to the end of all ranks, for a start that it ended."""
    outcome: str
    """How the run went on, or what went wrong."""

    @property
    def is_right(self) -> bool:
        """Whether it ended as the fault says."""
        return self.is_equal != self.fault.is_sabotage and not self.outcome.startswith("WRONG")


class WrongError(Exception):
    """A run did not go as its fault says."""


def make_tree(folder: Path, window_steps: int) -> Path:
    """A copy of the tree, in which ranks look for their fault, and fold their metrics every ``window_steps``
    steps; returns it."""
    tree = folder / "tree"
    if tree.exists():
        return tree
    for name in ("launcher", "conf", "recipes", "slurm"):
        shutil.copytree(REPOSITORY / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(REPOSITORY / "plugins", tree, dirs_exist_ok=True)
    shutil.copy(Path(__file__).with_name("hooks.py"), tree / "launcher" / "runtime" / "chaos.py")
    loop = tree / "launcher" / "runtime" / "train" / "loop.py"
    loop.write_text(
        loop.read_text() + "\n\nfrom launcher.runtime import chaos  # noqa: E402\n\nchaos.install(Trainer)\n"
    )
    records = tree / "launcher" / "contract" / "records.py"
    text, count = re.subn(
        r"^WINDOW_STEPS = \d+$", f"WINDOW_STEPS = {window_steps}", records.read_text(), flags=re.M
    )
    assert count == 1, "the window of the metrics is set elsewhere now"
    records.write_text(text)
    (folder / "text.txt").write_text("In the beginning there was a little text, and it was repeated. " * 200)
    return tree


@dataclass(kw_only=True)
class Suite:
    """A folder with a tree of its own and the runs that are made from it."""

    folder: Path
    cluster: Mapping[str, str] = field(default_factory=dict)
    """Variables that reach the Slurm in a box."""
    num_steps: int = NUM_STEPS
    interval: int = INTERVAL
    """Steps between two checkpoints."""
    window_steps: int = 10
    """So few that a short run folds its metrics, too."""
    limit_s: float = 150.0
    """Longest time of a start, after which it is ended and told to hang."""
    undisturbed: dict[tuple[str, tuple[str, ...]], Found] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        tree = make_tree(self.folder, self.window_steps)
        own = {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1", "SLURM_CLUSTER": str(CLUSTER)}
        self.environment = {**os.environ, **self.cluster, **own, "XDG_CONFIG_HOME": str(self.folder / "own")}
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def try_fault(self, fault: Fault, place: str, number: int) -> Tried:
        """Strikes a new run, has it go on, and compares it with an undisturbed one."""
        root = self.folder / re.sub(r"\W+", "-", f"{fault.name}-{place}-{number}")
        root.mkdir()
        if fault.on == "full disk":
            subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", root], check=True)
        run = Run(suite=self, place=place, folder=root / "run", fault=fault, layout=fault.layout)
        is_equal, outcome = False, ""
        try:
            expected = self.undisturbed_run(place, fault.layout)
            outcome = run.go()
            is_equal = found(run.folder, self.num_steps) == expected
        except (WrongError, subprocess.SubprocessError, OSError, ValueError) as error:
            outcome = f"WRONG: {error}"
        finally:
            run.end()
            if fault.on == "full disk":
                subprocess.run(["umount", "--lazy", root], check=True)
        return Tried(fault=fault, place=place, is_equal=is_equal, end_s=run.end_s, outcome=outcome)

    def undisturbed_run(self, place: str, layout: tuple[str, ...] = ()) -> Found:
        """What a run computes that nothing strikes; made once."""
        with self._lock:
            if (place, layout) not in self.undisturbed:
                name = re.sub(r"\W+", "-", "-".join(("undisturbed", place, *layout)))
                run = Run(suite=self, place=place, folder=self.folder / name, fault=None, layout=layout)
                if not run.folder.exists():
                    run.wait(run.start())
                self.undisturbed[place, layout] = found(run.folder, self.num_steps)
            return self.undisturbed[place, layout]


@dataclass(kw_only=True)
class Run:
    """A run, with its fault."""

    suite: Suite
    place: str
    folder: Path
    fault: Fault | None
    layout: tuple[str, ...] = ()
    end_s: float | None = None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _node: str = ""

    def __post_init__(self) -> None:
        if self.fault is not None:
            Path(f"{self.folder}.fault.json").write_text(json.dumps(asdict(self.fault)))

    @property
    def log(self) -> Path:
        """The output of the launcher, of all starts."""
        return Path(f"{self.folder}.out")

    @property
    def struck(self) -> Path:
        """The file that tells that the fault struck, and when."""
        return Path(f"{self.folder}.struck")

    def go(self) -> str:
        """From the start over the fault to the end of the training; what happened.

        Raises:
            WrongError: where it is not what the fault says.
        """
        fault = self.fault
        assert fault is not None, "nothing strikes this run"
        process = self.start(closes=fault.on == "closed output")
        if fault.outside:
            self._until(self.struck.exists, "the fault did not strike")
            self.shell(fault.outside)
        if fault.goes_on == "itself" and fault.after:  # such as a node that comes back
            self._until(lambda: self.num_starts() > 1, "it was not started again")
            self.shell(fault.after)
        code = self.wait(process, may_fail=fault.goes_on == "resume")
        if fault.on != "closed output" and not self.struck.exists():
            raise WrongError("the fault did not strike")
        if fault.goes_on != "resume":
            self._check_said()
            return (
                "trained on"
                if fault.goes_on == "unharmed"
                else f"went on by itself, {self.num_starts()} starts"
            )
        if code == 0:
            raise WrongError("the start that was struck ended with 0")
        self._measure_end()
        self._check_said()
        if fault.after:
            self.shell(fault.after)
        return self._resume()

    def _check_said(self) -> None:
        names = self.fault.names if self.fault is not None else ""
        if not re.search(names, self.said()):
            raise WrongError(f"its output does not say {names!r}")

    def _resume(self) -> str:
        assert self.fault is not None, "nothing strikes this run"
        is_saved = any((self.folder / "checkpoints").glob("step-????????"))
        flag = "--resume" if is_saved else "--overwrite"
        if self.fault.on == "two resumes":
            both = [self.start(flag), self.start(flag)]
            codes = sorted(self.wait(process, may_fail=True) for process in both)
            if codes != [0, 2]:
                raise WrongError(f"two resumes at once ended with {codes}")
            return "one resumed, one was refused"
        self.wait(self.start(flag))
        return "resumed" if is_saved else "started anew"

    def start(self, *flags: str, closes: bool = False) -> subprocess.Popen[bytes]:
        """Starts the training; a process that ends with it."""
        data = (f"data.source={self.suite.folder}/text.txt", f"data.cache_dir={self.suite.folder}/cache")
        own = () if self.fault is None else self.fault.overrides
        suite = self.suite
        length = (f"train.num_steps={suite.num_steps}", f"train.checkpoint_interval={suite.interval}")
        own = (*self.layout, *own, f"run.dir={self.folder}")
        words = ("quickstart", *WHERE[self.place], *LAYOUT, *length, *data, *own)
        if self.place == "local":
            return self._launcher("run", *words, "--no-baseline", *flags, closes=closes)
        if code := self._launcher("submit", *words, "--no-baseline", *flags).wait(self.suite.limit_s):
            raise WrongError(f"submit ended with {code}")
        return self._launcher("wait", str(self.folder))

    def _launcher(self, *words: str, closes: bool = False) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "launcher", *words],
                cwd=self.suite.folder,
                env=self.suite.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if closes else log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        if closes:
            assert process.stdout is not None, "it has a pipe"
            process.stdout.readline()
            process.stdout.close()
        return process

    def wait(self, process: subprocess.Popen[bytes], *, may_fail: bool = False) -> int:
        """Waits for the end of a start; its exit code.

        Raises:
            WrongError: where it takes too long, or fails and may not.
        """
        try:
            code = process.wait(self.suite.limit_s)
        except subprocess.TimeoutExpired:
            raise WrongError(f"it did not end within {self.suite.limit_s:g} s") from None
        if code and not may_fail:
            raise WrongError(f"it ended with {code}: {self._last_words()}")
        return code

    def _until(self, condition: Callable[[], object], otherwise: str) -> None:
        try:
            wait_until(condition, timeout_s=self.suite.limit_s)
        except AssertionError:
            raise WrongError(otherwise) from None

    def _measure_end(self) -> None:
        """Waits until the ranks that the fault struck have ended, too."""
        self._until(lambda: not self.ranks(), "ranks outlive their launcher")
        self.end_s = time.monotonic() - float(json.loads(self.struck.read_text())["at"])

    def ranks(self) -> list[int]:
        """The processes of its ranks that have not ended."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if _RANK in words and f"{self.folder}/plan.json" in words and "-c" not in words:
                found.append(int(path.parent.name))
        return found

    def shell(self, command: str) -> None:
        """Does something to the run from outside of it."""
        names = {"RUN": str(self.folder)}
        if self.place == "slurm":
            names |= {"JOB": self.job(), "NODE": self.last_node()}
        names["PID"] = str(max(self.ranks(), default=0))
        environment = self.suite.environment | names
        subprocess.run(
            ["bash", "-c", command], env=environment, check=True, timeout=60, stdout=subprocess.DEVNULL
        )

    def job(self) -> str:
        """The id of its job."""
        return str(json.loads((self.folder / "handle.json").read_text())["id"])

    def last_node(self) -> str:
        """The node of the last rank, of the start at which it was first asked for."""
        if not self._node:
            ask = f"scontrol show hostnames $(squeue --noheader --states=all --jobs={self.job()} --format=%N)"
            environment = self.suite.environment
            told = subprocess.run(
                ["bash", "-c", ask], env=environment, check=True, stdout=subprocess.PIPE, text=True
            )
            self._node = told.stdout.split()[-1]
        return self._node

    def forget_node(self) -> None:
        """Has the next question for the node ask Slurm anew."""
        self._node = ""

    def num_starts(self) -> int:
        """Starts of the job."""
        path = self.folder / "logs" / "starts"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def said(self) -> str:
        """What was printed so far, and the logs of the ranks."""
        logs = [self.log, *sorted((self.folder / "logs").glob("*.log"))]
        return "".join(path.read_text(errors="replace") for path in logs if path.exists())

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return " / ".join(lines[-3:])

    def end(self) -> None:
        """Ends what is left of it."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
        if self.place == "slurm" and (self.folder / "handle.json").exists():
            subprocess.run(
                ["scancel", self.job()], env=self.suite.environment, check=False, stderr=subprocess.DEVNULL
            )
        for pid in self.ranks():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def found(run_dir: Path, num_steps: int, *, is_whole: bool = True) -> Found:
    """What a run has computed: every loss that it recorded, and its last weights. ``is_whole``: it has
    records of all steps; a long one has folded the earlier ones.

    Raises:
        WrongError: when it did not come to its end.
    """
    losses = set()
    for path in run_dir.glob("metrics/**/rank-*"):
        for line in path.read_text().splitlines() if "sums" not in path.parts else ():
            record = json_object(line.encode()) or {}
            if record.get("type") == "step" and record["loss"] is not None:
                losses.add((record["step"], record["loss"]))
    missing = sorted({*range(num_steps)} - {step for step, _ in losses})
    if missing and is_whole:
        raise WrongError(f"steps are missing: {missing}")
    shards = (run_dir / "checkpoints" / f"step-{num_steps:08d}").glob("shard-*.safetensors")
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in shards}
    if len(digests) != 2:
        raise WrongError(f"the last checkpoint has {len(digests)} of 2 shards")
    return Found(losses=frozenset(losses), shards=digests)


def table(tries: Sequence[Tried]) -> str:
    """A line for each fault and place."""
    groups: dict[tuple[str, str], list[Tried]] = {}
    for tried in tries:
        groups.setdefault((tried.fault.name, tried.place), []).append(tried)
    lines = [f"{'fault':46} {'where':6} tried  equal  ends after  outcome"]
    for (name, place), group in groups.items():
        ends = [tried.end_s for tried in group if tried.end_s is not None]
        seconds = f"{max(ends):.1f} s" if ends else "-"
        equal = f"{sum(tried.is_equal for tried in group)} of {len(group)}"
        outcome = next((tried.outcome for tried in group if not tried.is_right), group[0].outcome)
        lines.append(f"{name:46} {place:6} {len(group):5}  {equal:6} {seconds:>10}  {outcome}")
    return "\n".join(lines)
