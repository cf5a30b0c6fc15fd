"""Writes run directories whose records are consistent and whose times are exact, for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.base import registry
from launcher.base.registry import PluginRecord
from launcher.contract.actions import Action, B, F, to_text
from launcher.contract.config import LaunchConfig, LinkConfig
from launcher.contract.mesh import Mesh
from launcher.contract.plan import BatchPlan, MemoryPlan, Plan, SchedulePlan
from launcher.contract.records import EvalRecord, Header, MemoryRecord, StepRecord
from launcher.typed.read import plain
from tests.helpers.configs import launch_config, with_settings
from tests.helpers.plans import bare_plan

CUDA = {"device": {"kind": "cuda"}}
"""For ``config``: a device that is allocated whether a rank uses it or not."""
MS = 1_000_000
"""Nanoseconds in a millisecond."""
SEQ_LENGTH = 16
Record = Header | StepRecord | EvalRecord | MemoryRecord


@dataclass(frozen=True, kw_only=True)
class FakeRun:
    """A run whose every step takes the same time on a rank.

    ``kinds_ms`` gives a rank's time by `RANK_KINDS` in milliseconds, ``calls_ms`` the single calls
    of a collective kind; a kind that has no calls is one call.
    """

    mesh: Mesh = field(default_factory=lambda: Mesh(pp=1, dp=1, tp=1))
    kinds_ms: Mapping[int, Mapping[str, int]] = field(default_factory=lambda: {0: {"compute": 100}})
    calls_ms: Mapping[int, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    num_devices: int | None = None
    """Devices of the cluster; None: one per rank."""
    num_steps: int = 6
    warmup_steps: int = 2
    global_size: int = 8
    config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings that differ from the fake recipe, by group."""
    header: Mapping[str, Any] = field(default_factory=dict)
    eval_loss: float | None = None
    held_bytes: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """By rank, what autograd held at once at most, and in a whole step; of the others nothing is known."""
    first_backward_ms: Mapping[int, int] = field(default_factory=dict)
    """By rank, when the first backward of a step began."""
    exact: bool = True

    def write(self, path: Path, *, baseline: Path | str | None = None) -> Path:
        """Makes the run directory."""
        (path / "metrics").mkdir(parents=True)
        (path / "plan.json").write_text(self.plan().to_json(), encoding="utf-8")
        job = {"baseline": str(baseline)} if baseline else {}
        (path / "job.json").write_text(json.dumps(job), encoding="utf-8")
        for rank in range(self.mesh.num_ranks):
            records = [plain(record) for record in self.records(rank)]
            write_records(path, rank, records)
        return path

    def plan(self) -> Plan:
        """A plan with the few predictions that the report shows."""
        config = self._config()
        schedule = SchedulePlan(
            name="1f1b",
            actions=tuple(self._actions(stage) for stage in range(self.mesh.pp)),
            bubble_formula=0.2,
            bubble_simulated=0.25,
            forward_s=(0.01,) * self.mesh.pp,
            backward_s=(0.02,) * self.mesh.pp,
            transfer_s=0.001,
            step_s=0.123,
        )
        return bare_plan(
            config,
            batch=BatchPlan(
                global_size=self.global_size,
                micro_size=1,
                num_microbatches=self.global_size,
                seq_length=config.batch.seq_length,
            ),
            num_parameters=1_000_000,
            step_flops=1e9,
            schedule=schedule,
            memory=tuple(_memory(pp_rank) for pp_rank in range(self.mesh.pp)),
            plugins=_used(config),
            num_update_copies=1 if config.parallel.zero_stage else self.mesh.dp,
            update="pkg.module:update",
            exact=self.exact,
        )

    def records(self, rank: int) -> list[Record]:
        """What one rank writes."""
        records: list[Record] = [self._header(rank)]
        start_ns = 0
        for step in range(self.num_steps):
            made = self._step(rank, step, start_ns)
            records.append(made)
            start_ns += made.duration_ns
        if self.eval_loss is not None and self.mesh.coordinates(rank).pp == self.mesh.pp - 1:
            records.append(EvalRecord(step=self.num_steps, loss=self.eval_loss, num_tokens=64))
        if rank in self.held_bytes:
            peak, total = self.held_bytes[rank]
            records.append(
                MemoryRecord(
                    step=self.num_steps,
                    states_bytes=1,
                    peak_bytes=1,
                    held_peak_bytes=peak,
                    held_total_bytes=total,
                    grown_bytes=2 * peak,
                )
            )
        return records

    def _header(self, rank: int) -> Header:
        place = self.mesh.coordinates(rank)
        base = Header(
            rank=rank,
            role="trainer",
            pp_rank=place.pp,
            dp_rank=place.dp,
            tp_rank=place.tp,
            hostname="node0",
            device="Fake CPU",
            num_threads=1,
            num_cores=64,
            torch_version="2.6",
            p2p_latency_ns=0,
        )
        return replace(base, **self.header)

    def _step(self, rank: int, step: int, start_ns: int) -> StepRecord:
        kinds = {kind: ms * MS for kind, ms in self.kinds_ms[rank].items()}
        calls: dict[str, tuple[int, ...]] = {}
        calls |= {kind: (kinds[kind],) for kind in ("tp", "dp", "model", "tied") if kind in kinds}
        for kind, times in self.calls_ms.get(rank, {}).items():
            calls[kind] = tuple(ms * MS for ms in times)
            kinds[kind] = sum(calls[kind])
        is_last_stage = self.mesh.coordinates(rank).pp == self.mesh.pp - 1
        return StepRecord(
            step=step,
            start_ns=start_ns,
            duration_ns=sum(kinds.values()),
            kinds_ns=kinds,
            collectives_ns=calls,
            num_receives=0 if self.mesh.pp == 1 else 4,
            compute_ns=self._compute_ns(kinds.get("compute", 0)),
            num_tokens=self.global_size * self._config().batch.seq_length,
            num_samples=self.global_size,
            loss=3.0 - step / 10 if is_last_stage else None,
            first_backward_ns=self.first_backward_ms[rank] * MS if rank in self.first_backward_ms else None,
        )

    def _actions(self, stage: int) -> str:
        """All forwards, then all backwards."""
        microbatches = range(self.global_size)
        return to_text([*Action.each(stage, F, microbatches), *Action.each(stage, B, microbatches)])

    def _compute_ns(self, total: int) -> tuple[int, ...]:
        """Every forward takes a third and every backward two thirds of a microbatch's share."""
        third = total // (3 * self.global_size)
        return (third,) * self.global_size + (2 * third,) * self.global_size

    def _config(self) -> LaunchConfig:
        """The fake recipe with the differences of ``config``."""
        return with_settings(base_config(self), self.config)


def _used(config: LaunchConfig) -> tuple[PluginRecord, ...]:
    """The plugins that the report asks."""
    architecture = registry.record("launcher.architectures", config.architecture.name)
    split = (registry.record("launcher.parallels", "zero"),) if config.parallel.zero_stage else ()
    return (architecture, *split)


def _memory(pp_rank: int) -> MemoryPlan:
    return MemoryPlan(
        pp_rank=pp_rank,
        weights_bytes=4_000_000,
        gradients_bytes=4_000_000,
        optimizer_bytes=8_000_000,
        activations_bytes=4_000_000,
        peak_microbatches=1,
        other_bytes={"logits": 500_000},
    )


def write_records(path: Path, rank: int, records: list[dict[str, Any]]) -> None:
    """Writes one rank's file from plain records, whatever they hold."""
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (path / "metrics" / f"rank-{rank:05d}.jsonl").write_text(lines, encoding="utf-8")


def base_config(run: FakeRun) -> LaunchConfig:
    """Every setting of the fake recipe."""
    link = LinkConfig(latency_s=0.0, bandwidth_bytes_per_s=1e9)
    sections: dict[str, dict[str, Any]] = {
        "model": {"hidden_size": 32, "tied_embeddings": True},
        "data": {"name": "corpus", "source": "package:corpus/*.txt", "prefetch_batches": 2},
        "batch": {"global_size": run.global_size, "seq_length": SEQ_LENGTH},
        "optim": {"decay": "cosine"},
        "train": {"num_steps": run.num_steps, "eval_batches": 1},
        "precision": {"master_weights": True},
        "device": {
            "name": "cpu",
            "kind": "cpu",
            "peak_flops": {"fp32": 1e11},
            "memory_bytes": 10**9,
            "memory_bandwidth_bytes_per_s": 1e10,
        },
        "cluster": {
            "name": "here",
            "devices_per_node": run.num_devices or run.mesh.num_ranks,
            "intra_node": link,
            "inter_node": link,
        },
        "parallel": {"dp": run.mesh.dp, "tp": run.mesh.tp, "pp": run.mesh.pp, "bucket_bytes": 10**6},
        "report": {"warmup_steps": run.warmup_steps},
    }
    return with_settings(launch_config(name="fake"), sections)
