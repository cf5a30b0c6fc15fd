"""Starts all ranks on this machine through torchrun.

The ranks meet in a file of the run directory, and speak over the loopback interface: nothing listens to
other hosts, and several runs can share a machine. torchrun starts every rank in a session of its own, so
killing torchrun's process group would not end them: `cancel` signals torchrun, waits, and then kills every
rank of this run that is left.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from launcher.base import lock
from launcher.base.errors import Fault
from launcher.base.processes import is_called_with
from launcher.base.registry import plugins
from launcher.base.timestamps import stamped
from launcher.base.units import counted, format_duration
from launcher.contract.config import LaunchConfig
from launcher.contract.executor import Executor
from launcher.contract.job import (
    EXECUTOR_LOG,
    LOCK,
    ONE_HOST,
    RENDEZVOUS_FILE,
    SECONDARY_EXIT_CODES,
    JobHandle,
    JobRequest,
    JobScript,
    JobState,
    RankEnd,
    rank_words,
)
from launcher.contract.plan import Plan
from launcher.typed.read import read_unless
from launcher.typed.scalars import NonNegativeInt, PositiveFloat

_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_GRACE_S = 3
"""Longest wait for torchrun to end ranks that do not save, before they are killed."""
_PR_SET_PDEATHSIG = 1
_SURVIVAL_S = 5
"""Longest time that ranks survive the failure of another one. torchrun sends them SIGTERM, on which ranks
that save or hang do not end at once, and would kill them after 30 s."""
_CLOSING, _KILLED = b" closing signal ", "trireme: killed process"
_FORCED = re.compile(rf"(?:Unable to shutdown process|{_KILLED}) (\d+)")
_REPORT = re.compile(r"rank\s+: (\d+) \(local_rank: \d+\)\s+exitcode\s+: (-?\d+) \(pid: (\d+)\)")
_ENDING = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end torchrun, beside SIGTERM, by which it is cancelled."""
_INHERITED = ("PET_", "TORCHELASTIC_", "PYTHON_EXEC")
"""Prefixes of variables that would change what torchrun does; they are not passed on."""


@dataclass(frozen=True, kw_only=True)
class TorchrunConfig:
    """Settings of the executor."""

    max_restarts: NonNegativeInt = 0
    """Restarts after a failure, from the newest intact checkpoint."""
    save_wait_s: PositiveFloat = field(default=600, metadata=read_unless("train.checkpoint_interval", 0))
    """Seconds that ranks have to save when the run is stopped (Ctrl-C, SIGTERM, SIGUSR1), after which they
    are killed; without a checkpoint_interval they are killed at once."""


class Torchrun(Executor):
    """The ``torchrun`` executor."""

    is_local = True
    Config = TorchrunConfig

    def __init__(self) -> None:
        self._logged: dict[str, tuple[tuple[int, int], float]] = {}
        """By job, how its log was when it was looked at last, and since when it is so, by the monotonic
        clock."""

    def check(self, plan: Plan, run_dir: str | None = None) -> Iterable[Fault]:
        """More than one node; restarts without a checkpoint to resume from."""
        return _faults(plan.config, plan.world_size)

    def notes(self, plan: Plan) -> Iterable[str]:
        """When the ranks are started again."""
        return restart_notes(plan.config, plan.config.executor.settings(TorchrunConfig).max_restarts)

    def render(self, plan: Plan, request: JobRequest) -> JobScript:
        """The torchrun command and its environment."""
        environment = {
            "PYTHONSAFEPATH": "1",  # `python -m` must not find modules in the current folder first
            "PYTHONUNBUFFERED": "1",
            **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), _LOOPBACK),
        }
        if plan.config.device.kind == "cpu":
            environment["OMP_NUM_THREADS"] = "1"
        argv = (
            *(request.python, "-m", "torch.distributed.run"),
            *("--nnodes=1", f"--nproc-per-node={plan.world_size}", "--max-restarts=0"),
            f"--rdzv-backend={ONE_HOST}",
            f"--log-dir={request.run_dir}/logs/torchrun",
            *("--module", *rank_words(request.run_dir), "--sha256", request.plan_sha256),
            *(("--resume",) if request.resume else ()),
        )
        settings = plan.config.executor.settings(TorchrunConfig)
        return JobScript(
            argv=argv,
            environment=environment,
            run_dir=request.run_dir,
            max_restarts=settings.max_restarts,
            save_wait_s=settings.save_wait_s if plan.config.train.checkpoint_interval else 0,
        )

    def submit(self, script: JobScript) -> JobHandle:
        """Starts torchrun in a session of its own, so that a terminal's Ctrl-C reaches only the launcher.

        The kernel ends torchrun when the calling thread ends, for whatever reason.
        """
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(_INHERITED)}
        inherited |= {RENDEZVOUS_FILE: _fresh_rendezvous(script.run_dir)}
        if held := lock.read(Path(script.run_dir)):
            inherited[LOCK] = lock.holder_of(held).token
        # What is ignored here, as under nohup, stays so there.
        heard = [number.name for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
        inherited["PET_SIGNALS_TO_HANDLE"] = ",".join(["SIGTERM", *heard])
        with (Path(script.run_dir) / EXECUTOR_LOG).open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 (our own argv, no shell)
                script.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=inherited | dict(script.environment),
                start_new_session=True,
                preexec_fn=_end_with_parent(),
            )
        return JobHandle(id=str(process.pid), run_dir=script.run_dir, process=process)

    def state(self, handle: JobHandle) -> JobState:
        """The state of torchrun, and the rank that failed. Kills ranks that survive another one's failure."""
        code = _process(handle).poll()
        if code is None:
            self._end_survivors(handle)
            return JobState(phase="running")
        if code == 0:
            return JobState(phase="succeeded", exit_code=0)
        log = Path(handle.run_dir) / EXECUTOR_LOG
        return failed_state(log.read_text(errors="replace"), code)

    def _end_survivors(self, handle: JobHandle) -> None:
        """Kills the ranks that survive torchrun's SIGTERM for a while, and logs it."""
        log = Path(handle.run_dir) / EXECUTOR_LOG
        with suppress(OSError):
            if self._quiet_s(handle, log) < _SURVIVAL_S or _CLOSING not in log.read_bytes():
                return
            with log.open("a", encoding="utf-8") as file:
                for pid in _rank_pids(handle):
                    file.write(stamped(f"{_KILLED} {pid}, which survived the failure of another rank\n"))
                    _signal_group(pid, signal.SIGKILL)

    def _quiet_s(self, handle: JobHandle, log: Path) -> float:
        """How long nothing has been logged, as far as was seen from here."""
        status, now = log.stat(), time.monotonic()
        mark = (status.st_size, status.st_mtime_ns)
        if self._logged.get(handle.id, ((), now))[0] != mark:
            self._logged[handle.id] = (mark, now)
        return now - self._logged[handle.id][1]

    def request_stop(self, handle: JobHandle) -> bool:
        """Sends SIGTERM to the ranks, not to torchrun, which would kill them after 30 s."""
        ranks = list(_rank_pids(handle))
        for pid in ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        if not ranks:  # none has started yet, or they cannot be found on this system
            _signal_group(_process(handle).pid, signal.SIGTERM)
        return True

    def cancel(self, handle: JobHandle) -> None:
        """Ends torchrun and every rank; returns when none is left."""
        process = _process(handle)
        if process.poll() is None:
            _signal_group(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        for pid in _rank_pids(handle):
            _signal_group(pid, signal.SIGKILL)
        if process.poll() is None:
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()


def failed_state(report: str, code: int) -> JobState:
    """The state by torchrun's output: the rank that was killed, else the one that it reports first.

    A killed rank writes no report of its own, while the ranks that waited for it do. Ranks that were killed
    because they survived the failure did not cause it.

    >>> failed_state("rank      : 1 (local_rank: 1)\\n  exitcode  : -9 (pid: 7)", 1)
    JobState(phase='failed', exit_code=-9, reason='killed by signal 9 (SIGKILL)', rank=1)
    """
    root_cause = report.rpartition("Root Cause")[2]
    others = report.removesuffix(root_cause)
    forced = set(_FORCED.findall(report))
    found = _REPORT.findall(root_cause + others)
    ended = [(int(rank), int(status)) for rank, status, pid in found if pid not in forced]
    if not ended:
        return JobState(phase="failed", exit_code=code, reason=_own_ending(report, code))
    killed = [item for item in ended if item[1] < 0 and item[1] not in SECONDARY_EXIT_CODES]
    ordered = killed + [item for item in ended if item not in killed]
    return failed_by([RankEnd(rank=rank, exit_code=code, reason=ending(code)) for rank, code in ordered])


def _own_ending(report: str, code: int) -> str:
    """How torchrun itself ended, which has told of no rank."""
    if code < 0:
        often = ", as the kernel does when memory runs out" if code == -signal.SIGKILL else ""
        return f"torchrun was {ending(code)}{often}"
    last = report.strip().splitlines()[-1:]
    return ": ".join([f"torchrun {ending(code)}", *last])


def failed_by(ends: Sequence[RankEnd]) -> JobState:
    """The state of a job whose ranks have ended so, the one that failed first before the others."""
    first = ends[0]
    return JobState(
        phase="failed", exit_code=first.exit_code, reason=first.reason, rank=first.rank, ends=tuple(ends)
    )


def ending(status: int) -> str:
    """How a process ended, as text; a status below 0 is a signal."""
    if status >= 0:
        return f"ended with exit code {status}"
    with suppress(ValueError):
        return f"killed by signal {-status} ({signal.Signals(-status).name})"
    return f"killed by signal {-status}"


def _faults(config: LaunchConfig, num_ranks: int) -> Iterator[Fault]:
    settings = config.executor.settings(TorchrunConfig)
    yield from restart_faults(config, settings.max_restarts)
    if config.cluster.spare_nodes:
        rule = "starts ranks on this machine only, which has no spare nodes"
        ways: tuple[Mapping[str, int], ...] = ({"cluster.spare_nodes": 0},)
        yield Fault("cluster.spare_nodes", config.cluster.spare_nodes, rule, ways=ways)
    if config.cluster.nodes > 1:
        others = " or ".join(sorted({*plugins("launcher.executors")} - {"torchrun"}))
        rule = f"starts ranks on this machine only, and cluster.nodes={config.cluster.nodes}"
        fits = num_ranks <= config.cluster.devices_per_node
        ways = ({"cluster.nodes": 1},) if fits else ()
        fix = "Set cluster.nodes=1, or choose" if fits else "Choose"
        hint = f": {others}" if others else ""
        fix += f" an executor that reserves machines{hint}."
        yield Fault("executor.name", "torchrun", rule, fix, ways=ways)


def _fresh_rendezvous(run_dir: str) -> str:
    """The file in which the ranks meet: one of the run directory, or where its file system cannot lock files,
    as some parallel ones, a temporary one of this machine."""
    path = Path(run_dir) / "rendezvous"
    path.unlink(missing_ok=True)  # that of an earlier start
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file, suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return str(path)
    handle, name = tempfile.mkstemp(prefix="trireme-")  # the last rank removes it
    os.close(handle)
    return name


def _process(handle: JobHandle) -> subprocess.Popen[bytes]:
    assert isinstance(handle.process, subprocess.Popen), (
        "a local job is followed by the process that started it"
    )
    return handle.process


def _end_with_parent() -> Callable[[], None] | None:
    """What the child does before it becomes torchrun: requests SIGTERM at its parent's death (Linux)."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _rank_pids(handle: JobHandle) -> Iterator[int]:
    """Ranks of this run that are alive, by their command lines (Linux), which torchrun's resembles."""
    for pid in (int(entry.name) for entry in Path("/proc").glob("[0-9]*")):
        if pid != _process(handle).pid and is_called_with(pid, rank_words(handle.run_dir)):
            yield pid


def restart_faults(config: LaunchConfig, max_restarts: int) -> Iterator[Fault]:
    """A fault of restarts without a checkpoint to resume from."""
    if max_restarts and not config.train.checkpoint_interval:
        rule = "a restart would have nothing to resume from, since train.checkpoint_interval is 0"
        interval = {"train.checkpoint_interval": max(1, config.train.num_steps // 10)}
        ways = (interval, {"executor.max_restarts": 0})
        yield Fault("executor.max_restarts", max_restarts, rule, ways=ways)


def restart_notes(config: LaunchConfig, max_restarts: int) -> Iterator[str]:
    """The longest time until a run that hangs at every start has failed."""
    if max_restarts:
        timeout_s, start_s, starts = config.run.timeout_s, config.run.start_timeout_s, max_restarts + 1
        yield (
            f"After a failure the ranks are restarted from the newest intact checkpoint, at most "
            f"{counted(max_restarts, 'time')} (executor.max_restarts). A run that hangs each time has failed "
            f"after {starts} times {timeout_s:g} s (run.timeout_s) without progress: "
            f"{format_duration(starts * timeout_s)}; where it never makes a step, after {starts} times "
            f"{start_s:g} s (run.start_timeout_s): {format_duration(starts * start_s)}."
        )
