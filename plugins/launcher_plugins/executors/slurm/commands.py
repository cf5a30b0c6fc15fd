"""Runs Slurm's commands, without the variables of an allocation that this process may be in."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from launcher.base.errors import JobError

_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Variables that locate the cluster."""
_PREFIXES = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_")
_TIMEOUT_S = 60


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """Exit code and output of a command."""

    code: int
    output: str
    error: str


def run_command(words: tuple[str, ...]) -> CommandResult:
    """Runs one of Slurm's commands.

    Raises:
        JobError: when it is not installed here, or does not return in time.
    """
    try:
        done = subprocess.run(  # noqa: S603 (our own words, no shell)
            words,
            env=cleaned(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise JobError(
            f"{words[0]} is not on this machine. Go to one with Slurm's commands, or look with --dry-run."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise JobError(f"{words[0]} gave no answer in {_TIMEOUT_S} s: is the controller up?") from error
    # Without "COMMAND: error: " at the start of every line.
    lines = [
        line.split(": ", 2)[-1] if ": error: " in line else line for line in done.stderr.strip().splitlines()
    ]
    return CommandResult(code=done.returncode, output=done.stdout.strip(), error="\n".join(lines))


def rows(text: str, num_fields: int) -> Iterator[list[str]]:
    """The lines of a table whose fields a bar divides; lines that a site prints around it are none.

    >>> list(rows("Welcome to alps\\n7|RUNNING |0:0", 3))
    [['7', 'RUNNING', '0:0']]
    """
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) == num_fields:
            yield fields


def cleaned(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables without those that override options of Slurm's commands.

    >>> cleaned({"SLURM_CONF": "/etc/slurm.conf", "SLURM_CPU_BIND": "cores", "SBATCH_QOS": "low"})
    {'SLURM_CONF': '/etc/slurm.conf'}
    """
    removed = removed_names(environment)
    return {name: value for name, value in environment.items() if name not in removed}


def removed_names(environment: Mapping[str, str]) -> list[str]:
    """The names that `cleaned` removes, sorted."""
    return sorted(name for name in environment if name.startswith(_PREFIXES) and name not in _KEPT)
