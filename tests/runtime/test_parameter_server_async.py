"""Workers on their own: what the servers hold in the end is what one process computes that makes the same
updates in the recorded order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import factories
import pytest
import torch
from servers import Served, serve_and_train, servers_job
from torch import Tensor

from launcher.plan.model import Plan
from launcher.runtime.api import slice_of
from launcher.runtime.data import Loader
from launcher.runtime.gradients import GradientBuckets
from launcher.runtime.learning_rate import learning_rate
from launcher.runtime.loop import Trainer
from launcher.runtime.model import build_chunks

STEPS = 5
MODES: dict[str, dict[str, Any]] = {
    "async": {"mode": "async"},
    "async, two servers": {"mode": "async", "servers": 2},
    "bounded by 1": {"mode": "bounded", "staleness": 1, "lr_scale": 0.7},
    "async, top_k": {"mode": "async", "servers": 2, "compression": "top_k", "top_k_fraction": 0.1},
    "async, bf16": {"mode": "async", "compression": "bf16"},
    "sync, top_k": {"mode": "sync", "compression": "top_k", "top_k_fraction": 0.1},
}


TOLERANCES = {"async, bf16": 1e-4}
"""Of the largest element: a gradient between two bf16 numbers may be rounded either way."""


def straggle(trainer: Trainer, loader: Loader, step: int) -> None:
    """The last worker is late once, so that the others' updates come between."""
    is_last = trainer.ctx.plan.rank == trainer.ctx.plan.plan.mesh.dp - 1
    time.sleep(0.6 if is_last and step == 1 else 0.01)


def three_workers(options: dict[str, Any]) -> Plan:
    return servers_job(
        workers=3, options=options, batch={"global_size": 6, "micro_size": 2}, train={"num_steps": STEPS}
    )


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Plan, Served]]:
    """Each mode is run once."""
    made = {}
    for mode, options in MODES.items():
        plan = three_workers(options)
        folder = tmp_path_factory.mktemp("run")
        made[mode] = plan, serve_and_train(plan, folder, straggle, num_steps=STEPS)
    return made


@pytest.mark.parametrize("mode", MODES)
def test_the_recorded_order_gives_the_same_parameters(mode: str, runs: Any) -> None:
    plan, served = runs[mode]
    assert_same(served, Simulation(plan, served.updates).run(), TOLERANCES.get(mode, 2e-5))


@pytest.mark.parametrize("mode", ["async, bf16", "sync, top_k"])
def test_what_compression_leaves_out_is_not_lost(mode: str, runs: Any) -> None:
    plan, served = runs[mode]
    forgetful = Simulation(plan, served.updates)
    forgetful.remembers = False
    with pytest.raises(AssertionError):
        assert_same(served, forgetful.run(), TOLERANCES.get(mode, 2e-5))


def test_updates_in_another_order_give_others(runs: Any) -> None:
    plan, served = runs["async"]
    (updates,) = served.updates
    place = next(n for n in range(1, len(updates)) if updates[n]["worker"] != updates[n - 1]["worker"])
    first, second = updates[place - 1], updates[place]
    swapped = [*updates[: place - 1], second, first, *updates[place + 1 :]]
    with pytest.raises((AssertionError, StopIteration)):
        assert_same(served, Simulation(plan, (swapped,)).run())


def test_gradients_of_fresher_parameters_give_others(runs: Any) -> None:
    plan, served = runs["async"]
    (updates,) = served.updates
    assert any(update["update"] != update["pulled_at"] for update in updates), "no gradient was stale"
    fresh = [update | {"pulled_at": update["update"]} for update in updates]
    with pytest.raises(AssertionError):
        assert_same(served, Simulation(plan, (fresh,)).run())


def test_no_worker_is_farther_ahead_than_the_bound(runs: Any) -> None:
    assert most_ahead(runs["bounded by 1"][1]) == 1
    assert most_ahead(runs["async"][1]) > 1, "the straggler was not late enough to show anything"


def most_ahead(served: Served) -> int:
    """Steps between a worker that makes an update and the slowest of all."""
    num_done = [0, 0, 0]
    found = []
    for update in served.updates[0]:
        found.append(update["step"] - min(num_done))
        num_done[update["worker"]] = update["step"] + 1
    return max(found)


def assert_same(served: Served, weights: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    for name, expected in weights.items():
        if not name.endswith(".k.bias"):  # its gradient is rounding noise alone
            scale = float(expected.abs().max())
            torch.testing.assert_close(
                served.trained.weights[name],
                expected,
                rtol=0,
                atol=tolerance * scale,
                msg=lambda m, n=name: n + m,
            )


@dataclass
class Part:
    """The part of the flattened parameters that one server holds."""

    places: Tensor
    """Indices into the flattened parameters."""
    versions: list[Tensor]
    first: Tensor
    second: Tensor
    waiting: list[dict[str, Any]] = field(default_factory=list)
    """Updates still to be made, in order."""


class Simulation:
    """One process that computes each gradient from the parameters that its worker had; AdamW written out."""

    def __init__(self, plan: Plan, updates: tuple[list[dict[str, Any]], ...]) -> None:
        self.plan, self.options = plan, plan.config.architecture.options
        contexts = [factories.make_context(plan, worker) for worker in range(plan.mesh.dp)]
        (self.model,) = build_chunks(contexts[0])
        self.batches = [loader.steps(0) for loader in map(Loader, contexts)]
        buckets = GradientBuckets(
            dtype=torch.float32, bucket_bytes=plan.config.parallel.bucket_bytes, exchange=None
        )
        buckets.add_chunk(self.model)
        sizes = [bucket.flat.numel() for bucket in buckets.all()]
        self.params = [param for bucket in buckets.all() for param in bucket.params]
        for param in self.params:
            param.grad = None
        start = torch.cat([param.detach().flatten() for param in self.params])
        self.decays = torch.cat([torch.full((p.numel(),), float(p.dim() > 1)) for p in self.params])
        num_servers = len(updates)
        self.pieces = [list(_pieces(sizes, server, num_servers)) for server in range(num_servers)]
        self.parts = [
            Part(places, [start[places]], torch.zeros(len(places)), torch.zeros(len(places)), list(records))
            for places, records in zip(map(torch.cat, self.pieces), updates, strict=True)
        ]
        self.pulled = {
            (server, update["worker"], update["step"]): update["pulled_at"]
            for server, records in enumerate(updates)
            for update in records
        }
        self.left_out = torch.zeros(plan.mesh.dp, len(start))
        self.gradients: dict[tuple[int, int], Tensor] = {}
        self.remembers = True

    def run(self) -> dict[str, Tensor]:
        """The weights after all updates."""
        while any(part.waiting for part in self.parts):
            part = next(part for part in self.parts if part.waiting and self._can_be_made(part.waiting[0]))
            self._update(part, part.waiting.pop(0))
        flat = self._flat([part.versions[-1] for part in self.parts])
        parts = flat.split([param.numel() for param in self.params])
        return {slice_of(p).name: values.view_as(p) for p, values in zip(self.params, parts, strict=True)}

    def _can_be_made(self, update: dict[str, Any]) -> bool:
        """Whether each server has the version that the update's gradients were computed with."""
        if update["worker"] is None:
            return all(len(part.versions) > update["step"] for part in self.parts)
        places = [(server, update["worker"], update["step"]) for server in range(len(self.parts))]
        return all(
            self.pulled[place] < len(part.versions) for place, part in zip(places, self.parts, strict=True)
        )

    def _update(self, part: Part, update: dict[str, Any]) -> None:
        step, optim = update["step"], self.plan.config.optim
        lr = learning_rate(optim, step, self.plan.config.train.num_steps)
        workers = [update["worker"]]
        if update["worker"] is None:
            workers = list(range(self.plan.mesh.dp))
        else:
            lr *= self.options.get("lr_scale", 1 / self.plan.mesh.dp)
        gradient = sum(self._gradient(worker, step, update["worker"] is None) for worker in workers)
        if update["worker"] is None:
            gradient = gradient / len(workers)
            gradient = gradient * min(1.0, optim.clip_norm / float(gradient.norm()))
        own, count = gradient[part.places], len(part.versions)
        beta1, beta2 = optim.betas
        part.first = part.first * beta1 + own * (1 - beta1)
        part.second = part.second * beta2 + own**2 * (1 - beta2)
        root = (part.second / (1 - beta2**count)).sqrt() + optim.eps
        before = part.versions[-1] * (1 - lr * optim.weight_decay * self.decays[part.places])
        part.versions.append(before - lr * part.first / (1 - beta1**count) / root)

    def _gradient(self, worker: int, step: int, together: bool) -> Tensor:
        """What a worker pushes, of all servers together; clipped where each clips its own."""
        if (worker, step) not in self.gradients:
            servers = range(len(self.parts))
            at = [step if together else self.pulled[server, worker, step] for server in servers]
            self._load(self._flat([part.versions[n] for part, n in zip(self.parts, at, strict=True)]))
            batches = next(self.batches[worker])
            loss = sum(self.model(None, batch) for batch in batches) / sum(b.targets.numel() for b in batches)
            found = torch.cat([g.flatten() for g in torch.autograd.grad(loss, self.params)])
            packed = self._packed(worker, found)
            clip = 1.0 if together else min(1.0, self.plan.config.optim.clip_norm / float(found.norm()))
            self.gradients[worker, step] = packed * clip
        return self.gradients[worker, step]

    def _packed(self, worker: int, gradient: Tensor) -> Tensor:
        compression = self.options.get("compression", "none")
        if compression == "none":
            return gradient
        wanted = gradient + self.left_out[worker]
        packed = torch.zeros_like(wanted)
        for places in (places for pieces in self.pieces for places in pieces):
            values = wanted[places]
            if compression == "bf16":
                packed[places] = values.bfloat16().float()
            else:
                kept = max(1, -int(-len(places) * self.options["top_k_fraction"] // 1))
                largest = values.abs().argsort(descending=True)[:kept]
                packed[places[largest]] = values[largest]
        if self.remembers:
            self.left_out[worker] = wanted - packed
        return packed

    def _flat(self, values: list[Tensor]) -> Tensor:
        flat = torch.empty(sum(map(len, values)))
        for part, own in zip(self.parts, values, strict=True):
            flat[part.places] = own
        return flat

    @torch.no_grad()
    def _load(self, flat: Tensor) -> None:
        for param, values in zip(self.params, flat.split([p.numel() for p in self.params]), strict=True):
            param.copy_(values.view_as(param))


def _pieces(sizes: list[int], server: int, num_servers: int) -> Iterator[Tensor]:
    """A server's part of each bucket: one of as many equal ranges."""
    first = 0
    for size in sizes:
        yield first + torch.arange(server * size // num_servers, (server + 1) * size // num_servers)
        first += size
