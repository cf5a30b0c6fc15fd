"""One process that makes the updates of parameter servers in an order that it is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from launcher.contract.optim.rates import learning_rate
from launcher.contract.plan import Plan
from launcher.runtime.api import slice_of
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.model.build import build_chunks
from launcher.runtime.train.gradient_buckets import GradientBuckets
from launcher_plugins.optimizers.adamw import AdamWConfig
from tests.helpers.contexts import make_context


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

    def __init__(
        self, plan: Plan, updates: tuple[list[dict[str, Any]], ...], lost: Mapping[int, int] | None = None
    ) -> None:
        """``lost``: workers that were gone, and the steps they had done."""
        self.lost = lost or {}
        self.plan, self.options = plan, plan.config.architecture.options
        contexts = [make_context(plan, worker) for worker in range(plan.mesh.dp)]
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
        parts = torch.split(flat, [param.numel() for param in self.params])
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
            workers = [n for n in range(self.plan.mesh.dp) if step < self.lost.get(n, step + 1)]
        else:
            lr *= self.options.get("lr_scale", 1 / self.plan.mesh.dp)
        pushed = [self._gradient(worker, step, update["worker"] is None) for worker in workers]
        gradient = torch.stack(pushed).sum(0)
        if update["worker"] is None:
            gradient = gradient / len(workers)
            gradient = gradient * min(1.0, _clip_norm(self.plan) / float(gradient.norm()))
        own, count = gradient[part.places], len(part.versions)
        adam = optim.settings(AdamWConfig)
        beta1, beta2 = adam.betas
        part.first = part.first * beta1 + own * (1 - beta1)
        part.second = part.second * beta2 + own**2 * (1 - beta2)
        root = (part.second / (1 - beta2**count)).sqrt() + adam.eps
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
            clip = 1.0 if together else min(1.0, _clip_norm(self.plan) / float(found.norm()))
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
        for param, values in zip(
            self.params, torch.split(flat, [p.numel() for p in self.params]), strict=True
        ):
            param.copy_(values.view_as(param))


def _clip_norm(plan: Plan) -> float:
    norm = plan.config.optim.clip_norm
    assert norm is not None, "the updates of servers are compared with clipping"
    return norm


def _pieces(sizes: list[int], server: int, num_servers: int) -> Iterator[Tensor]:
    """A server's part of each bucket: one of as many equal ranges."""
    first = 0
    for size in sizes:
        yield first + torch.arange(server * size // num_servers, (server + 1) * size // num_servers)
        first += size
