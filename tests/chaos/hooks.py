"""What strikes a rank of a chaos run: `tests.chaos.tree` puts this file into a copy of the tree.

A fault is described in a file beside its run directory, ``RUN.fault.json``. It strikes once, in the first
start that comes to its moment, and notes that in ``RUN.struck``. In the tree that is tested, nothing of this
is there.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from launcher.runtime.checkpoint import saving, shard, store
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.measure import records
from launcher.runtime.train.native_update import NativeUpdate

_HANG_S = 3600


class Striker:
    """The fault of this rank."""

    def __init__(self, run_dir: str, fault: dict[str, Any]) -> None:
        self._run_dir, self.fault = run_dir, fault
        self.struck = Path(f"{run_dir}.struck")
        self.step = 0
        """The step that is being made."""
        self.trainer: Any = None

    def reach(self, moment: str) -> None:
        """Strikes, where the moment is that of the fault."""
        fault = self.fault
        if (moment, os.environ["RANK"]) != (fault["moment"], str(fault["rank"])) or self.step < fault["step"]:
            return
        try:
            with self.struck.open("x") as file:
                file.write(json.dumps({"at": time.monotonic(), "step": self.step}))
        except FileExistsError:
            return
        if fault["shell"]:
            subprocess.run(["bash", "-c", fault["shell"]], env=self._variables(), check=False)
        if fault["does"]:
            DEEDS[fault["does"]](self)

    def _variables(self) -> dict[str, str]:
        agent = os.getppid()
        launcher = Path(f"/proc/{agent}/stat").read_text().rsplit(")", 1)[1].split()[1]
        own = {"RUN": self._run_dir, "PID": str(os.getpid()), "AGENT": str(agent), "LAUNCHER": launcher}
        return {**os.environ, **own}


def fail(striker: Striker) -> None:
    """As a user's own code does."""
    raise ValueError("an item of the user's is broken")


def hang(striker: Striker) -> None:
    """Does nothing more."""
    time.sleep(_HANG_S)


def exhaust_memory(striker: Striker) -> None:
    """Asks for more than there is."""
    import resource

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, -1))
    torch.ones(2**28)


def fill_disk(striker: Striker) -> None:
    """As a file system without room."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), striker.struck.name)


def set_clock_back(striker: Striker) -> None:
    """By an hour, for this process."""
    now = time.time
    time.time = lambda: now() - 3600


def _sockets() -> list[socket.socket]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            is_socket = os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
            found += [socket.socket(fileno=os.dup(int(name)))] if is_socket else []
        except OSError:
            continue
    return [each for each in found if each.family in (socket.AF_INET, socket.AF_INET6)]


def cut_network(striker: Striker) -> None:
    """Ends every connection of this rank."""
    cut = 0
    for each in _sockets():
        try:
            each.shutdown(socket.SHUT_RDWR)
            cut += 1
        except OSError:
            continue
    assert cut, "there was no connection to cut"


def send_garbage(striker: Striker) -> None:
    """To every port on which this rank listens."""
    sent = 0
    for each in _sockets():
        if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            with socket.create_connection(each.getsockname()[:2], timeout=5) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"\xff" * 4096)
            sent += 1
    assert sent, "there was no port to send it to"


def spoil_weights(striker: Striker) -> None:
    """As a bit that flips in the memory."""
    for module in striker.trainer.part.modules.values():
        for parameter in module.parameters():
            parameter.data.fill_(torch.nan)


def skip_update(striker: Striker) -> None:
    """A sabotage: one step leaves the weights as they are."""
    update: Any = NativeUpdate
    step = update._step_optimizer

    def idle(*_: Any) -> None:
        update._step_optimizer = step

    update._step_optimizer = idle


DEEDS: dict[str, Callable[[Striker], None]] = {
    function.__name__: function
    for function in (
        *(fail, hang, exhaust_memory, fill_disk, set_clock_back),
        *(cut_network, send_garbage, skip_update, spoil_weights),
    )
}


def _before(owner: Any, name: str, meet: Callable[..., None]) -> None:
    inner = getattr(owner, name)

    def outer(*args: Any, **kwargs: Any) -> Any:
        meet(*args)
        return inner(*args, **kwargs)

    setattr(owner, name, outer)


def _arm(striker: Striker, trainer: type) -> None:
    def begin(trainer: Any, step: int, *args: Any) -> None:
        striker.step, striker.trainer = step, trainer
        time.sleep(striker.fault["slow_s"])
        striker.reach("step")

    def write(folder: Path, rank: int, *args: Any) -> None:
        (folder / f"shard-{rank:05d}.safetensors").write_bytes(b"half of it")
        striker.reach("shard")

    def sync(path: Path) -> None:
        striker.reach("rename" if path.suffix == ".unfinished" else "renamed")

    _before(trainer, "step", begin)
    _before(NativeUpdate, "apply", lambda *_: striker.reach("apply"))
    _before(saving, "save_shard", write)
    _before(shard, "write_whole", lambda *_: striker.reach("index"))
    _before(store, "write_marker", lambda *_: striker.reach("marker"))
    _before(store, "bring_to_disk", sync)
    _before(store, "prune", lambda *_: striker.reach("prune"))
    _before(records.RecordWriter, "end_window", lambda *_: striker.reach("window"))
    shim = SimpleNamespace(fsync=os.fsync, path=os.path, SEEK_END=os.SEEK_END)
    setattr(records, "os", shim)  # noqa: B010 (a module is no attribute to mypy)
    _before(shim, "fsync", lambda *_: striker.reach("fold"))
    _before(records, "_opened", lambda *_: striker.reach("folded"))


def _read_from_the_beginning() -> None:
    loader: Any = Loader
    steps = loader.steps
    loader.steps = lambda self, first: steps(self, 0)


def install(trainer: type) -> None:
    """Called by each rank, before it trains."""
    run_dir = os.path.dirname(next(word for word in sys.argv if word.endswith("plan.json")))
    description = Path(f"{run_dir}.fault.json")
    if not description.exists():
        return
    fault = json.loads(description.read_text())
    striker = Striker(run_dir, fault)
    if not striker.struck.exists():
        _arm(striker, trainer)
        striker.reach("start")
    elif fault["forgets_data"]:
        _read_from_the_beginning()
