"""The job of a plan, as data and as text to read."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from launcher.base import registry
from launcher.base.errors import PlanError
from launcher.contract.executor import Executor
from launcher.contract.job import CODE, JobRequest, JobScript
from launcher.contract.plan import Plan, sha256


def executor_of(plan: Plan) -> Executor:
    """The executor that the plan names.

    Raises:
        PluginError: when it is not installed, or fails to load.
    """
    return registry.load(Executor, plan.config.executor.name)


def render(
    plan: Plan, run_dir: Path, *, resume: bool = False, after: str = "", code_in: Path | None = None
) -> JobScript:
    """The job that runs a plan in a run directory, once the job ``after`` has ended.

    ``code_in``: the directory that holds the frozen code, where that is not the run's.

    Raises:
        PlanError: when its executor cannot start it.
    """
    executor = executor_of(plan)
    if faults := tuple(executor.check(plan, str(run_dir))):
        raise PlanError(faults)
    request = JobRequest(
        run_dir=str(run_dir),
        plan_sha256=sha256(plan.to_json()),
        python=sys.executable,
        resume=resume,
        after=after,
        code="" if executor.is_local else str((code_in or run_dir) / CODE),
    )
    return executor.render(plan, request)


def shell_text(script: JobScript) -> str:
    """A shell script that does what the executor does: the batch script, or the one command.

    >>> print(shell_text(JobScript(argv=("echo", "it's"), environment={"A": "1 2"}, run_dir="/r")), end="")
    #!/bin/sh
    exec env 'A=1 2' \\
      echo \\
      'it'"'"'s'
    """
    if script.text:
        return script.text
    variables = [shlex.quote(f"{key}={value}") for key, value in sorted(script.environment.items())]
    words = [shlex.quote(word) for word in script.argv]
    return "#!/bin/sh\nexec env " + " \\\n  ".join([" ".join(variables), *words]) + "\n"
