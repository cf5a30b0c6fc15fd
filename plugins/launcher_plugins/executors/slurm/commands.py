"""Slurm's commands, run without what an allocation around us would bring along."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.base.errors import JobError

_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Variables that say how Slurm is reached."""
_PREFIXES = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_")
_TIMEOUT_S = 60


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command said."""

    code: int
    output: str
    error: str


def ask(words: tuple[str, ...], environment: Mapping[str, str]) -> Answer:
    """Runs one of Slurm's commands to its end.

    Raises:
        JobError: when it is not installed here, or gives no answer.
    """
    try:
        done = subprocess.run(  # noqa: S603 (our own words, no shell)
            words,
            env=cleaned(environment),
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
    return Answer(code=done.returncode, output=done.stdout.strip(), error=_plain(done.stderr))


def cleaned(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables without those by which Slurm's commands would do other than what they are told.

    >>> cleaned({"SLURM_CONF": "/etc/slurm.conf", "SLURM_CPU_BIND": "cores", "SBATCH_QOS": "low"})
    {'SLURM_CONF': '/etc/slurm.conf'}
    """
    removed = set(left_out(environment))
    return {name: value for name, value in environment.items() if name not in removed}


def left_out(environment: Mapping[str, str]) -> list[str]:
    """The names that `cleaned` leaves out, sorted."""
    return sorted(name for name in environment if name.startswith(_PREFIXES) and name not in _KEPT)


def _plain(error: str) -> str:
    """A message without the name of the command in front of every line."""
    lines = [line.split(": ", 2)[-1] if ": error: " in line else line for line in error.strip().splitlines()]
    return "\n".join(lines)
