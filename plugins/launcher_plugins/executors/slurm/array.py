"""Several jobs as one array of Slurm: one submission, one place in the queue's limits.

Every task runs the script of its own run, so the array's script holds only what sbatch reads.

Source: the manual page sbatch(1), --array and "filename pattern".
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from launcher.contract.job import EXECUTOR_LOG, GroupRequest, JobScript
from launcher_plugins.executors.slurm.options import quoted
from launcher_plugins.executors.slurm.roles import HET_JOB

_DIRECTIVE = "#SBATCH --"
_OF_ONE_RUN = (f"{_DIRECTIVE}job-name=", f"{_DIRECTIVE}output=")


def array(scripts: Sequence[JobScript], request: GroupRequest) -> JobScript | None:
    """What submits the jobs as the tasks of an array.

    None where they do not all ask for the same, and where a run is several jobs or a heterogeneous one,
    which Slurm takes no array of.
    """
    heads = [_directives(script.text) for script in scripts]
    if any(HET_JOB in script.text for script in scripts):
        return None
    if any(head != heads[0] for head in heads) or any(script.num_jobs > 1 for script in scripts):
        return None
    throttle = f"%{request.at_once}" if request.at_once else ""
    output = f"{request.folder}/".replace("%", "%%") + f"%a/{EXECUTOR_LOG}"
    lines = [
        "#!/bin/bash",
        f"# {request.name}: {len(scripts)} runs as the tasks of one array.",
        f"{_DIRECTIVE}job-name={quoted(request.name)}",
        f"{_DIRECTIVE}output={quoted(output)}",
        *heads[0],
        f"{_DIRECTIVE}array={_ranges(request.tasks)}{throttle}",
        f'exec /bin/bash {shlex.quote(request.folder)}/"$SLURM_ARRAY_TASK_ID"/job.sh',
    ]
    return JobScript(
        argv=("sbatch", "--parsable", request.script),
        environment={},
        run_dir=request.folder,
        text="\n".join(lines) + "\n",
    )


def _directives(text: str) -> list[str]:
    """What a script asks sbatch for, but for what is its run's own."""
    lines = [line for line in text.splitlines() if line.startswith(_DIRECTIVE)]
    return [line for line in lines if not line.startswith(_OF_ONE_RUN)]


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as sbatch takes them.

    >>> _ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ",".join("-".join(map(str, span)) for span in spans)
