"""On the first node of a job: gives the events of its run to ``run.notify``, and its figures to
``run.prometheus``, until the job has ended.

`on_node.py RUN/plan.json SIZE`: started by the script of the job beside the ranks. ``SIZE``: bytes of the
events of earlier starts.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from launcher.app.beside.exporter import Exporter
from launcher.app.output import TERMINAL
from launcher.contract.job import AGAIN_NOTE, FINISHED_NOTE, JOB_RECORD, Phase
from launcher.contract.plan import Plan
from launcher.runs.alarms.notify import Notifier
from launcher.runs.store import RunDirectory

_INTERVAL_S = 0.5


def main(plan_file: Path, offset: int) -> int:
    """Follows the run until the script has recorded its end, or is gone. Returns the exit code."""
    plan = Plan.from_json(plan_file.read_text(encoding="utf-8"))
    script, run_dir, run = os.getppid(), plan_file.parent, plan.config.run
    notifier = Notifier(run_dir, run.notify, run.notify_timeout_s, offset) if run.notify else None
    exporter = None
    if run.prometheus is not None:
        exporter = Exporter(RunDirectory(run_dir), plan, say)
    while os.getppid() == script and not (run_dir / JOB_RECORD).exists():
        time.sleep(_INTERVAL_S)
    if notifier is not None:
        notifier.close()
    if exporter is not None:
        exporter.close(phase_at_end(run_dir))
    return 0


def say(text: str) -> None:
    """Writes to the output of the job, as its script does."""
    TERMINAL.event(f"trireme: {text}")


def phase_at_end(run_dir: Path) -> Phase | None:
    """The phase of a run whose job has ended, by what its script has left; None: nothing."""
    if not (run_dir / JOB_RECORD).exists():
        return None
    if (run_dir / FINISHED_NOTE).exists():
        return "succeeded"
    with suppress(OSError):
        return "cancelled" if (run_dir / AGAIN_NOTE).read_text().strip() == "cancelled" else "pending"
    return "failed"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
