"""On the first node of a job: gives the events of its run to ``run.notify`` until the job has ended.

`on_node.py RUN/plan.json SIZE`: started by the script of the job beside the ranks. ``SIZE``: bytes of the
events of earlier starts.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from launcher.contract.job import JOB_RECORD
from launcher.contract.plan import Plan
from launcher.runs.alarms.notify import Notifier

_INTERVAL_S = 0.5


def main(plan_file: Path, offset: int) -> int:
    """Follows the events until the script has recorded its end, or is gone. Returns the exit code."""
    run = Plan.from_json(plan_file.read_text(encoding="utf-8")).config.run
    script, run_dir = os.getppid(), plan_file.parent
    notifier = Notifier(run_dir, run.notify, run.notify_timeout_s, offset)
    while os.getppid() == script and not (run_dir / JOB_RECORD).exists():
        time.sleep(_INTERVAL_S)
    notifier.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
