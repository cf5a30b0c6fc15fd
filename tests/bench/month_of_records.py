"""The report of a month: 500,999 steps of 64 ranks, of which the records are made here, not measured.

    python -m tests.bench.month_of_records [--steps 500999] [--folder DIR]

Prints the bytes on the disk, and the seconds and the peak memory of a process that reads and prints the
report. The records of 999 steps since the last window are whole; whole steps of earlier windows are not made,
since the report does not read them.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from launcher.contract.mesh import Mesh
from launcher.contract.records import COLLECTIVE_KINDS, WINDOW_STEPS
from launcher.report.tables import speedup_text
from launcher.runtime.measure.fold import fold
from launcher.runtime.measure.records import RecordWriter
from launcher.typed.read import plain
from tests.helpers.fake_runs import MS, FakeRun
from tests.helpers.record_windows import files_of, varied_steps

KINDS = {"compute": 90, "replicated": 5, "pipeline": 12, "tp": 8, "dp": 9, "model": 1, "other": 3}
CALLS = {"tp": (1,) * 8, "dp": (3, 3, 3), "model": (1,)}
SAMPLE = 20
"""Steps that are made with times of their own; the others repeat them."""


def month_run(mesh: Mesh, microbatches: int = 16) -> FakeRun:
    """The layout, and what its steps consist of."""
    ranks = range(mesh.num_ranks)
    return FakeRun(
        mesh=mesh,
        kinds_ms=dict.fromkeys(ranks, KINDS),
        calls_ms=dict.fromkeys(ranks, CALLS),
        num_steps=SAMPLE,
        global_size=microbatches,
        header={"p2p_latency_ns": MS},
    )


def write_month(path: Path, num_steps: int, mesh: Mesh) -> Path:
    """A run directory with the records of so many steps."""
    run = month_run(mesh)
    run.write(path)
    headers, sample = varied_steps(run)
    windows, tail = divmod(num_steps, WINDOW_STEPS)
    shortest = {kind: int(kind in CALLS) for kind in COLLECTIVE_KINDS}
    for rank, header in enumerate(headers):
        files_of(path, rank)[0].unlink()
        writer = RecordWriter(path, header)
        rows = [step[rank] for step in sample]
        whole = [replace(rows[step % SAMPLE], step=step) for step in range(WINDOW_STEPS)]
        parts = [json.dumps(plain(fold(part, shortest, 0))) for part in (whole[:2], whole[2:], whole)]
        for window in range(windows):
            first = window * WINDOW_STEPS
            texts = (
                [(parts[0], 0, first), (parts[1], 2, first + 2)] if window == 0 else [(parts[2], 0, first)]
            )
            for text, was, now in texts:
                writer._sums.write(text.replace(f'"first_step": {was},', f'"first_step": {now},') + "\n")
        if windows:
            writer.end_window([], windows * WINDOW_STEPS - 1)
        lines = [json.dumps(plain(row), separators=(",", ":")) for row in rows]
        for step in range(windows * WINDOW_STEPS, windows * WINDOW_STEPS + tail):
            number = f'"step":{step % SAMPLE},'
            writer._file.write(lines[step % SAMPLE].replace(number, f'"step":{step},') + "\n")
        writer.close()
    return path


def report_in_a_process(path: Path) -> tuple[float, int, str]:
    """Seconds, bytes of memory at most, and the text of a report by a process of its own."""
    command = [sys.executable, "-m", "tests.bench.month_of_records", "--report", str(path)]
    begin = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    peak = int(done.stderr.split()[-1])
    return time.perf_counter() - begin, peak, done.stdout


def main() -> None:
    """Makes the records and reports on them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500_999)
    parser.add_argument("--folder", type=Path, help="where the run is made; default: a temporary folder")
    parser.add_argument("--report", type=Path, help="only report on this run")
    given = parser.parse_args()
    if given.report:
        sys.stdout.write(speedup_text([given.report], None, ascii_only=True))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=sys.stderr)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        path = write_month(Path(folder) / "month", given.steps, Mesh(pp=4, dp=4, tp=4))
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        seconds, peak, text = report_in_a_process(path)
    print(text)
    print(f"{given.steps} steps of 64 ranks: {size / 1e6:.0f} MB on the disk")
    print(f"report: {seconds:.1f} s, {peak / 1e6:.0f} MB of memory")


if __name__ == "__main__":
    main()
