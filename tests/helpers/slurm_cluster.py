"""The launcher and Slurm's commands, as the tests of this folder call them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.cli.main import main

REPOSITORY = Path(__file__).resolve().parents[2]
CLUSTER = REPOSITORY / "slurm" / "cluster"
TWO_BY_TWO = (
    "site=box",
    "cluster.nodes=2",
    "cluster.devices_per_node=2",
    "parallel.dp=2",
    "executor.check_nodes=false",
)
RANK = f"""#!/bin/bash
# Stands in for a rank: python START_FILE launcher.runtime.process.main RUN/plan.json --sha256 HEX
[ "$2" = launcher.runtime.process.main ] || exec {shlex.quote(sys.executable)} "$@"
run=$(dirname "$3")
meets=${{TRIREME_RENDEZVOUS_FILE:-$MASTER_ADDR:$MASTER_PORT}}
export PLACE="$RANK $LOCAL_RANK $WORLD_SIZE $(hostname) $meets ${{*: -1}}"
"""
TELLS = 'echo "$PLACE" >>"$run/told"\n'

SAVES = "train.checkpoint_interval=1000"


def saving_rank(last: int) -> str:
    """What a rank does that works until it is told to end, and saves then; at start ``last`` it is done."""
    return f"""exec {sys.executable} - "$run" <<'PYTHON'
import os, pathlib, signal, sys, time
run, told = pathlib.Path(sys.argv[1]), []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: told.append(number))
with (run / "told").open("a") as file:  # now that it can be told itself
    file.write(os.environ["PLACE"] + "\\n")
start = len((run / "logs" / "starts").read_text().splitlines())
while not told and start < {last}:
    time.sleep(0.05)
if os.environ["RANK"] == "0" and told:
    (run / "checkpoints" / f"step-{{start:08}}").mkdir(parents=True)
    (run / "exit" / "stopped.json").write_text(f'{{{{"step": {{start}}}}}}')
PYTHON"""


class Slurm:
    """The commands of the cluster, and the launcher in a folder of its own."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self.folder = folder
        self.environment = {**os.environ, **variables}
        self.launcher = [sys.executable, "-m", "launcher"]

    def ask(self, *words: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment, text=True, stdout=subprocess.PIPE, check=True
        )
        return done.stdout.strip()

    def refusal(self, *words: str) -> str:
        """What a command of Slurm says of what is wrong."""
        return subprocess.run(
            words, cwd=self.folder, env=self.environment, text=True, stderr=subprocess.PIPE, check=False
        ).stderr

    def trireme(self, *words: str, code: int = 0) -> str:
        """The output of a verb that ends with an exit code, in a process that is forked from this one, unless
        another tree is to be imported."""
        if "PYTHONPATH" in self.environment:
            done = subprocess.run(
                [*self.launcher, *words],
                cwd=self.folder,
                env=self.environment,
                capture_output=True,
                text=True,
                check=False,
            )
            found, output = done.returncode, done.stdout + done.stderr
        else:
            found, output = self._forked(words)
        assert found == code, output
        return output

    def _forked(self, words: Sequence[str]) -> tuple[int, str]:
        temporary = tempfile.TemporaryFile
        with open(os.devnull) as none, temporary("w+") as out, temporary("w+") as err:
            if (child := os.fork()) == 0:
                code = -1
                try:
                    os.chdir(self.folder)
                    os.environ.clear()
                    os.environ.update(self.environment)
                    for number, stream in enumerate((none, out, err)):
                        os.dup2(stream.fileno(), number)
                    sys.stdin, sys.stdout, sys.stderr = none, out, err
                    code = main([*words])
                except BaseException:
                    traceback.print_exc()
                finally:
                    out.flush()
                    err.flush()
                    os._exit(code)
            _, status = os.waitpid(child, 0)
            out.seek(0)
            err.seek(0)
            return os.waitstatus_to_exitcode(status), out.read() + err.read()

    def stand_in(self, does: str) -> str:
        """The setting by which ranks do what a line of shell says."""
        path = self.folder / "rank"
        path.write_text(RANK + ("" if "PLACE" in does else TELLS) + does + "\n")
        path.chmod(0o755)
        return f"site.python={path}"

    def submit(
        self, does: str, *overrides: str, recipe: str = "quickstart", run: str = "run"
    ) -> tuple[Path, str]:
        """Submits a job whose ranks do what a line of shell says; its run directory and its id."""
        words = (*TWO_BY_TWO, self.stand_in(does), f"run.dir='{run}'", *overrides)
        self.trireme("submit", recipe, *words, "--no-baseline")
        return self.folder / run, job_of(self.folder / run)

    def run_cluster(self, *words: str) -> None:
        """Has the cluster itself do something."""
        subprocess.run([CLUSTER, *words, self.environment["CLUSTER"]], check=True, timeout=60)

    def told(self) -> list[list[str]]:
        """What every rank of every start has told of its place: rank, local rank, ..., its last word."""
        path = self.folder / "run" / "told"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def rendezvous(self) -> list[tuple[str, str]]:
        """The rendezvous of every start of the job, as its output tells."""
        log = self.folder / "run" / "logs" / "executor.log"
        return re.findall(r": rendezvous (\S+) (?:at|in) (\S+)", log.read_text()) if log.exists() else []


def job_of(run: Path) -> str:
    """The id of the job of a run."""
    return str(json.loads((run / "handle.json").read_text())["id"])
