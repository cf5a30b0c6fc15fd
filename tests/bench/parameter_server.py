"""Parameter servers measured: their transport, their overlap, and who wins over slow links.

    python -m tests.bench.parameter_server transport      push and pull beside raw gloo messages
    python -m tests.bench.parameter_server overlap        sleeping compute over emulated links (root)
    python -m tests.bench.parameter_server alone          workers on their own, one of them late
    python -m tests.bench.parameter_server links          servers against an all-reduce over emulated links

Every number is a median over steps, and both sides of a comparison run in turn. Ranks are the real worker
and the real server with layers that sleep instead of computing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.contract.config import LinkConfig
from launcher.contract.plan import Plan
from launcher.runtime.api import GlobalSlice, tag
from launcher.runtime.process.rank import make_context
from launcher.runtime.train.gradient_buckets import GradientBuckets
from launcher_plugins.architectures.parameter_server.cost import Exchange
from launcher_plugins.architectures.parameter_server.runtime.server import serve
from launcher_plugins.architectures.parameter_server.runtime.shard import Piece
from launcher_plugins.architectures.parameter_server.runtime.update_rules import SynchronousUpdate
from launcher_plugins.architectures.parameter_server.runtime.worker import update
from tests.bench.emulated_links import links, run_behind_links
from tests.helpers.equality import job
from tests.helpers.objects import inside, substitute, there
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")
Run = Callable[..., list[Any]]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What each worker does in a step."""

    num_layers: int = 8
    layer_numel: int = 250_000
    forward_s: float = 0.0
    """Of all layers."""
    backward_s: float = 0.0
    num_steps: int = 8
    late_s: dict[int, float] = field(default_factory=dict)
    """By worker, what it sleeps longer in every step."""
    computes: bool = True
    """Whether there is a forward and a backward; else gradients leave all at once."""
    in_step: bool = True
    """Whether workers start each step together, and end it with the pull."""

    @property
    def num_bytes(self) -> int:
        """Of all gradients, which are fp32 as are the weights."""
        return 4 * self.num_layers * self.layer_numel


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor, work: Work) -> Tensor:
        ctx.gradient, ctx.work = gradient, work
        time.sleep(work.forward_s / work.num_layers)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(ctx.work.backward_s / ctx.work.num_layers)
        return grads[0], ctx.gradient, None, None


class Sleeper(nn.Module):
    """A layer of some weights that takes its time."""

    def __init__(self, index: int, work: Work) -> None:
        super().__init__()
        self.weight, self.work = nn.Parameter(torch.zeros(work.layer_numel)), work
        self.gradient = torch.full((work.layer_numel,), 1e-3)
        shape = (work.layer_numel,)
        tag(self.weight, GlobalSlice(name=f"layers.{index}", shape=shape, offset=(0,), is_sharded=False))

    def forward(self, x: Tensor) -> Tensor:
        """x -> x."""
        out: Tensor = _Sleep.apply(x, self.weight, self.gradient, self.work)
        return out


def plan_of(workers: int, work: Work, **options: Any) -> Plan:
    """A plan for the sleeping layers: one bucket for each."""
    return job(
        parallel={"dp": workers, "bucket_bytes": 4 * work.layer_numel},
        optim={"clip_norm": options.pop("clip_norm", None)},
        architecture={"name": "parameter_server", "options": options},
        batch={"global_size": 4 * workers, "micro_size": 1},
        train={"num_steps": 10_000},
        run={"timeout_s": 60.0},
    )


def steps_s(rank: int, plan: Plan, work: Work, run_dir: str) -> list[float]:
    """Seconds of each step of a worker, the first two left out; nothing from a server."""
    ctx = make_context(plan.rank(rank), CPU)
    if ctx.plan.role.serve:
        serve(ctx, Path(run_dir), resume=False)
        return []
    worker = inside(update(ctx))
    model = nn.Sequential(*(Sleeper(index, work) for index in range(work.num_layers)))
    worker.prepare([model])
    taken = []
    for step in range(work.num_steps + 2):
        if work.in_step:
            dist.barrier(ctx.groups.dp.handle)
        start = time.perf_counter()
        time.sleep(work.late_s.get(rank, 0.0))
        worker.begin(step)
        if not work.computes:
            for bucket in worker._buckets.all():
                worker._push_bucket(bucket.flat)
            worker.apply(step)
            worker._wait_for(worker._pulled)
            taken.append(time.perf_counter() - start)
            continue
        num_targets = worker.sum(torch.ones((), dtype=torch.float64))
        loss = model(torch.zeros(1, requires_grad=True)).sum()
        num_targets.wait()
        worker.backward(loss, None, chunk=0, last=True)
        loss_sum = worker.sum(torch.ones((), dtype=torch.float64))
        worker.apply(step)
        loss_sum.wait()
        if work.in_step:
            worker._wait_for(worker._pulled)
        taken.append(time.perf_counter() - start)
    there(ctx.replicas).leave(work.num_steps + 2)
    return taken[2:]


def all_reduces_s(rank: int, work: Work) -> list[float]:
    """Seconds of an all-reduce of the same buckets over all ranks, which are the workers alone."""
    buckets = [torch.zeros(work.layer_numel) for _ in range(work.num_layers)]
    taken = []
    for _ in range(work.num_steps + 2):
        dist.barrier()
        start = time.perf_counter()
        for handle in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            there(handle).wait()
        taken.append(time.perf_counter() - start)
    return taken[2:]


def raw_s(rank: int, num_workers: int, work: Work) -> list[float]:
    """Seconds in which every worker sends all buckets to one peer and receives as much from it."""
    workers = list(range(num_workers))
    group = dist.new_group(workers)
    peers = workers if rank == num_workers else [num_workers]
    out, back = (
        {peer: [torch.zeros(work.layer_numel) for _ in range(work.num_layers)] for peer in peers}
        for _ in range(2)
    )
    taken = []
    for _ in range(work.num_steps + 2):
        if rank < num_workers:
            dist.barrier(group)
        start = time.perf_counter()
        waits = []
        for tag_, peer in ((tag_, peer) for tag_ in range(work.num_layers) for peer in peers):
            waits.append(dist.irecv(back[peer][tag_], peer, tag=tag_))
            waits.append(dist.isend(out[peer][tag_], peer, tag=tag_))
        for handle in waits:
            there(handle).wait()
        taken.append(time.perf_counter() - start)
    return taken[2:]


def served_s(plan: Plan, work: Work, run: Run = run_ranks) -> float:
    """Median step over all workers."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "metrics").mkdir()
        return statistics.median(t for row in run(plan.world_size, steps_s, plan, work, folder) for t in row)


@contextmanager
def without(owner: Any, *names: str) -> Iterator[None]:
    """Inside, some methods do nothing."""
    kept = {name: getattr(owner, name) for name in names}
    for name in names:
        setattr(owner, name, lambda *arguments: None)
    yield
    for name, method in kept.items():
        setattr(owner, name, method)


@contextmanager
def without_sums() -> Iterator[None]:
    """Inside, a server sends its parameters as soon as all workers have pushed, and computes nothing."""
    kept = SynchronousUpdate._sum
    substitute(SynchronousUpdate, "_sum", lambda rule, bucket: 0.0)
    with without(Piece, "update"):
        yield
    substitute(SynchronousUpdate, "_sum", kept)


def transport() -> None:
    """The bar: push and pull without the update move 80 % of the bytes a second of raw messages."""
    print("workers  servers   MB each way   raw MB/s   transport        summing          updating")
    for workers, layer_numel in ((2, 250_000), (2, 1_000_000), (4, 1_000_000)):
        work = Work(layer_numel=layer_numel, num_steps=16, computes=False)
        plan = plan_of(workers, work)
        times: dict[str, list[float]] = {name: [] for name in ("raw", "transport", "summing", "updating")}
        for _ in range(5):
            raw = run_ranks(workers + 1, raw_s, workers, work)
            times["raw"].append(statistics.median(t for row in raw[:workers] for t in row))
            with without_sums(), without(GradientBuckets, "clear"):
                times["transport"].append(served_s(plan, work))
            with without(Piece, "update"), without(GradientBuckets, "clear"):
                times["summing"].append(served_s(plan, work))
            times["updating"].append(served_s(plan, work))
        moved = 2 * workers * work.num_bytes / 1e6
        speed = {name: moved / statistics.median(values) for name, values in times.items()}
        best = speed.pop("raw")
        shown = "   ".join(f"{value:5.0f} ({value / best:4.0%})" for value in speed.values())
        print(f"{workers:7}  {1:7}   {work.num_bytes / 1e6:11.1f}   {best:8.0f}   {shown}")


def overlap() -> None:
    """The bar: a step within 10 % of the plan's overlapped prediction, and below the one without overlap."""
    rate = 50e6
    print("seconds of a step, measured / predicted with the rate of raw messages: with overlap, without")
    for workers, servers, clip_norm in ((2, 1, None), (2, 1, 1.0), (4, 2, None), (4, 2, 1.0)):
        work = Work(forward_s=0.15, backward_s=0.3, num_steps=6, in_step=False)
        found: dict[bool, list[float]] = {True: [], False: []}
        with links(workers + servers, rate):
            raw = [t for row in run_behind_links(2, raw_s, 1, work) for t in row]
            for _, overlaps in [(n, o) for n in range(2) for o in (True, False)]:
                plan = plan_of(workers, work, servers=servers, overlap=overlaps, clip_norm=clip_norm)
                found[overlaps].append(served_s(plan, work, run_behind_links))
        raw_rate = work.num_bytes / statistics.median(raw)
        exchange = _exchange(workers, servers, work, raw_rate, pulls_last=clip_norm is not None)
        compute_s = work.forward_s + work.backward_s
        cells = []
        for overlaps in (True, False):
            measured = statistics.median(found[overlaps])
            hidden = replace(exchange, overlaps=overlaps)
            predicted = compute_s + hidden.in_step.exposed_s(work.forward_s, work.backward_s, compute_s)
            cells.append(f"{measured:.3f} / {predicted:.3f} ({measured / predicted - 1:+.0%})")
        clips = "clipped" if clip_norm else "unclipped"
        speed = f"{raw_rate / 1e6:.1f} MB/s"
        load = f"load {os.getloadavg()[0]:.1f}"
        print(f"  {workers} + {servers} {clips:<9} {speed}  {'   '.join(cells)}  {load}")


def alone() -> None:
    """The bars: asynchronous workers within 10 % of compute alone, whoever is late."""
    rate = 50e6
    work = Work(forward_s=0.15, backward_s=0.3, num_steps=8, in_step=False, layer_numel=62_500)
    late = replace(work, late_s={1: 0.5})
    with links(5, rate):
        plan = plan_of(4, work, servers=1, mode="async")
        rows = {}
        for name, each in (("all in time", work), ("worker 1 late by 0.5 s", late)):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "metrics").mkdir()
                taken = run_behind_links(plan.world_size, steps_s, plan, each, folder)
            rows[name] = [statistics.median(row) for row in taken if row]
    compute_s = work.forward_s + work.backward_s
    print(f"asynchronous, 4 workers, 1 server; compute alone {compute_s:.3f} s a step")
    for name, medians in rows.items():
        print(f"  {name:<24} {'  '.join(f'{m:.3f} ({compute_s / m:.0%})' for m in medians)}")


def winners() -> None:
    """The bar: T_servers / T_all-reduce within 20 % of the formulas', and the right winner."""
    rate = 10e6
    work = Work(num_layers=20, layer_numel=62_500, num_steps=3)
    all_s = work.num_bytes / rate
    print(f"links of {rate / 1e6:g} MB/s, {work.num_bytes / 1e6:g} MB; seconds, beside the formula's")
    print("workers  servers   parameter servers      all-reduce             ratio")
    for workers in (3, 4):
        ring_s = 2 * (workers - 1) / workers * all_s
        for servers in range(1, workers + 1):
            served_expected_s = max(1, workers / servers) * all_s
            plan = plan_of(workers, work, servers=servers)
            served, ring = [], []
            with links(workers + servers, rate):
                for _ in range(2):
                    served.append(served_s(plan, work, run_behind_links))
                    rows = run_behind_links(workers, all_reduces_s, work)
                    ring += [t for row in rows for t in row]
            ours, theirs = statistics.median(served), statistics.median(ring)
            pairs = (
                (ours, served_expected_s),
                (theirs, ring_s),
                (ours / theirs, served_expected_s / ring_s),
            )
            cells = "   ".join(f"{found:.3f} {said:.3f} ({found / said - 1:+4.0%})" for found, said in pairs)
            print(f"{workers:7}  {servers:7}   {cells}", flush=True)


def _exchange(workers: int, servers: int, work: Work, rate: float, *, pulls_last: bool) -> Exchange:
    return Exchange(
        num_workers=workers,
        num_servers=servers,
        num_buckets=work.num_layers,
        push_bytes=work.num_bytes,
        pull_bytes=work.num_bytes,
        link=LinkConfig(latency_s=1e-4, bandwidth_bytes_per_s=rate),
        update_s=0.0,
        is_lockstep=True,
        pulls_last=pulls_last,
        overlaps=True,
    )


def main() -> None:
    """Runs the measurements that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = {"transport": transport, "overlap": overlap, "alone": alone, "links": winners}
    parser.add_argument("what", choices=known)
    what = parser.parse_args().what
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, torch {torch.__version__}")
    known[what]()


if __name__ == "__main__":
    main()
