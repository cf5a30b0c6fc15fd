"""A folder with stand-ins for srun, scontrol and python, in which job scripts run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from launcher.contract.job import JobRequest
from launcher.contract.plan import Plan
from launcher_plugins.executors.slurm.executor import Slurm

REQUEST = JobRequest(
    run_dir="/runs/a b", plan_sha256="5a" * 32, python="/venv/bin/python", code="/runs/a b/lib"
)
CHECKOUT = Path(__file__).resolve().parents[2]
GOLDEN = CHECKOUT / "tests" / "golden" / "slurm"
TWO_BY_TWO = (
    "executor=slurm",
    "cluster.nodes=2",
    "cluster.devices_per_node=2",
    "parallel.dp=2",
    "executor.check_nodes=false",
)
_STAMP = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (?=trireme: )", re.MULTILINE)
_OWN = re.compile(r"(\S+ )?trireme: ")
SRUN = """#!/bin/bash
# Starts every task that it is asked for, as the real one does, each with its own place.
# A colon is between the parts of a heterogeneous job, whose tasks are numbered on.
total=0 rank=0
for word in "$@"; do [[ $word = --ntasks=* ]] && total=$((total + ${word#*=})); done
while [ $# != 0 ]; do
  while [[ $1 = --* ]]; do
    case $1 in
      --ntasks=*) count=${1#*=} ;;
      --ntasks-per-node=*) per_node=${1#*=} ;;
    esac
    shift
  done
  command=()
  while [ $# != 0 ] && [ "$1" != : ]; do command+=("$1"); shift; done
  shift
  for ((task = 0; task < count; task++)); do
    SLURM_PROCID=$((rank++)) SLURM_LOCALID=$((task % per_node)) SLURM_NODEID=$((task / per_node)) \\
      SLURM_NTASKS=$total "${command[@]}" || rc=$?
  done
done
exit ${rc:-0}
"""
PYTHON = """#!/bin/bash
# Stands in for a rank: tells what it was started with.
[ "$2" = launcher_plugins.executors.slurm.nodelist ] || [ "$1" = -ISc ] && exec {python} "$@"
{{
  printf '%s|' "$RANK" "$LOCAL_RANK" "$WORLD_SIZE" "$MASTER_ADDR:$MASTER_PORT" "${{EXTRA-unset}}" "$@"
  echo
}} >>"$TOLD"
exit ${{RANK_CODE:-0}}
"""
SCONTROL = """#!/bin/bash
[ "$*" = 'show hostnames node[7-8]' ] && printf 'node7\\nnode8\\n'
"""


class Stage:
    """A folder with stand-ins for srun, scontrol and python, in which scripts run."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan
        self.run_dir = folder / "it's a $run; 100% #1 é"
        self.run_dir.mkdir()
        (folder / "bin").mkdir()
        self.write("srun", SRUN)
        self.write("scontrol", SCONTROL)
        self.write("python", PYTHON.format(python=shlex.quote(sys.executable)))

    def write(self, name: str, text: str) -> None:
        """Puts a program on the path of the script."""
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def start(self, **variables: str) -> subprocess.Popen[str]:
        """Starts the script as Slurm does on the first node."""
        request = replace(
            REQUEST, run_dir=str(self.run_dir), python=str(self.folder / "bin" / "python"), code=str(CHECKOUT)
        )
        script = self.folder / "job.sh"
        script.write_text(Slurm().render(self.plan, request).text)
        environment = {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "SLURM_JOB_ID": "41",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "node[7-8]",
            "TOLD": str(self.folder / "told"),
            **variables,
        }
        return subprocess.Popen(
            ["bash", script],
            env=environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, process: subprocess.Popen[str]) -> None:
        """Waits for the script. ``done`` has what it said, without the times."""
        said = process.communicate(timeout=120)
        for line in filter(_OWN.match, "".join(said).splitlines()):
            assert _STAMP.match(line), f"the time is missing: {line}"
        output, error = (_STAMP.sub("", text) for text in said)
        self.done = subprocess.CompletedProcess(process.args, process.returncode, output, error)

    def run(self, **variables: str) -> list[list[str]]:
        """Runs the script to its end. Of each rank: place, rendezvous, EXTRA, words."""
        self.end(self.start(**variables))
        told = self.folder / "told"
        lines = told.read_text().splitlines() if told.exists() else []
        return [line.removesuffix("|").split("|") for line in lines]

    def record(self) -> str:
        """What the script says of the end of the job."""
        return (self.run_dir / "exit" / "job.json").read_text()
