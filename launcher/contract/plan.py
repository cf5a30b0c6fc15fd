"""The plan as data: everything the ranks need and everything that was predicted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from launcher.base.errors import LauncherError
from launcher.base.registry import PluginRecord
from launcher.contract.actions import Action, PipelineShape, from_text
from launcher.contract.config import LaunchConfig, Recompute
from launcher.contract.mesh import Coordinates, Mesh
from launcher.contract.model.shape import TensorShape
from launcher.contract.moved import upgraded
from launcher.typed.read import plain, read_or_raise

VERSION = 1
"""Raised when a field changes its meaning; a rank refuses a plan of another version."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One slice of the model."""

    stage: int
    pp_rank: int
    chunk: int
    first_layer: int
    num_layers: int
    has_prologue: bool
    has_epilogue: bool
    input_shape: tuple[int, ...]
    """Shape of what the stage receives for one sample, whole; empty on the first stage."""
    input_tensors: tuple[TensorShape, ...] = ()
    """What it consists of, where it is not one tensor in the compute format."""
    recompute: Recompute
    """What its layers compute again in the backward."""
    num_frozen: int = 0
    """How many of its layers, from its first on, no gradient reaches: nothing up to them is trained."""

    @property
    def layers(self) -> range:
        """Global indices of its layers."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def is_frozen(self) -> bool:
        """Whether no gradient reaches it at all. All stages before it are like that, too."""
        return self.num_frozen == self.num_layers > 0


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """global_size = micro_size * num_microbatches * dp."""

    global_size: int
    micro_size: int
    num_microbatches: int
    seq_length: int

    @property
    def num_tokens(self) -> int:
        """Tokens of a step: positions of its samples, whether the loss counts their targets or not. A sample
        without a sequence (length 1) is one token, and called a sample."""
        return self.global_size * self.seq_length

    @property
    def unit(self) -> str:
        """What these are called, wherever a number of them or a speed is shown."""
        return "samples" if self.seq_length == 1 else "tokens"


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Predicted bytes on the ranks of one pp_rank (the largest over tp)."""

    pp_rank: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    """At the schedule's peak."""
    peak_microbatches: int
    """Stage inputs held at once at the peak, over the rank's chunks."""
    other_bytes: Mapping[str, int]
    persistent_bytes: Mapping[str, int] = field(default_factory=dict)
    """Buffers that are kept from step to step, and so are there at the update, too."""

    @property
    def total_bytes(self) -> int:
        """All kinds together."""
        parts = (self.states_bytes, self.other_bytes, self.persistent_bytes)
        return self.activations_bytes + sum(sum(kinds.values()) for kinds in parts)

    @property
    def states_bytes(self) -> dict[str, int]:
        """The model states by kind."""
        return {
            "weights": self.weights_bytes,
            "gradients": self.gradients_bytes,
            "optimizer": self.optimizer_bytes,
        }

    @property
    def update_bytes(self) -> dict[str, int]:
        """By kind, what is held between the schedule of a step and its update."""
        return {name: size for name, size in self.states_bytes.items() if size} | dict(self.persistent_bytes)


@dataclass(frozen=True, kw_only=True)
class TrafficPlan:
    """One kind of message on the ranks of one pp_rank, per step."""

    pp_rank: int
    purpose: str
    operation: str
    axis: str
    message_bytes: int
    count: int
    sent_bytes: int
    """Bytes that the rank sends per step, by the ring algorithm for collectives."""
    time_s: float
    """Predicted by latency and bandwidth of the slowest link of the group."""
    overlappable: bool


@dataclass(frozen=True, kw_only=True)
class SchedulePlan:
    """The order of work on every pipeline rank, and its predicted timing."""

    name: str
    actions: tuple[str, ...]
    """One line of actions per pp_rank, sends and receives included."""
    bubble_formula: float | None
    """Idle share for equal stages and free messages, by the schedule's closed form."""
    bubble_simulated: float
    """Idle share by simulation with the predicted costs of these stages and messages."""
    forward_s: tuple[float, ...]
    """Predicted forward time per stage and microbatch."""
    backward_s: tuple[float, ...]
    """Predicted time of B per stage and microbatch: the whole backward, or the gradient of the stage's
    input alone where the schedule splits it."""
    transfer_s: float
    """Predicted time of one message between stages."""
    step_s: float
    """Predicted time of the whole step, with what is not hidden of the gradient exchange."""
    splits_backward: bool = False
    """Whether the actions hold a W, the weight gradients alone, for every B."""
    weight_s: tuple[float, ...] = ()
    """Predicted time of W per stage and microbatch; empty where there is none."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """Ranks of one kind of work."""

    name: str
    num_ranks: int
    trains: bool
    """Whether its ranks hold the model and sit on the mesh."""
    serve: str | None = None
    """``package.module:serve``, called in place of the training loop on the ranks of a role that does not
    train: with the `RankContext`, the run directory, and ``resume`` by name."""
    memory_bytes: int | None = None
    """Predicted bytes on each of its ranks, for a role that does not train."""
    is_expendable: bool = False
    """Whether the run goes on when one of its ranks is gone."""


@dataclass(frozen=True, kw_only=True)
class RolePlan(Role):
    """A role on consecutive ranks; trainers are ranks 0 .. n-1."""

    first_rank: int
    num_nodes: int | None = None
    """Nodes of its own; null: its ranks are on the cluster's devices."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """What a plugin tells of its part in a plan."""

    plugin: str
    """Its name."""
    title: str
    lines: tuple[str, ...]
    """For a person, each at most 98 columns wide; none: there is nothing to show."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Numbers and words for programs, and for what the plugin says of the run."""
    about: Literal["memory", "traffic"] = "traffic"
    """The part of the plan that it is shown behind."""


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """What one rank does."""

    plan: Plan
    rank: int
    role: RolePlan
    coordinates: Coordinates | None
    """None for a role that does not train."""
    stages: tuple[StagePlan, ...]
    actions: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The contract between the launcher and the ranks."""

    version: int
    config: LaunchConfig
    """With every `auto` resolved."""
    mesh: Mesh
    roles: tuple[RolePlan, ...]
    batch: BatchPlan
    stages: tuple[StagePlan, ...]
    num_parameters: int
    step_flops: float
    """Model FLOPs of one step (forward and backward, recomputation not counted)."""
    schedule: SchedulePlan
    memory: tuple[MemoryPlan, ...]
    traffic: tuple[TrafficPlan, ...]
    plugins: tuple[PluginRecord, ...]
    """Every plugin in use; ranks load no other."""
    parallels: tuple[str, ...]
    """``package.module:apply`` of every parallel plugin in use, in order of application."""
    update: str
    """``package.module:update`` of the architecture, or of the parallel plugin that takes its place."""
    exact: bool
    """Whether the run computes what one device computes."""
    notes: tuple[str, ...]
    """Warnings for the reader, each a sentence."""
    source_roots: tuple[str, ...]
    """Folders put on the ranks' module path for a user's own model and data."""
    documents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further JSON files of the run directory, by name: what a library that the ranks use is given."""
    sections: tuple[Section, ...] = ()
    """What plugins tell of their part."""
    num_input_ids: int | None = None
    """As of `ModelShape`: every integer in the inputs is below it."""
    num_frozen_parameters: int = 0
    """Of all parameters, those that are not trained."""
    num_state_elements: int | None = None
    """Numbers that the optimizer keeps of the whole model; None in older plans: two per parameter."""
    num_update_copies: int = 1
    """How many replicas make the same update; 1 where they share it out among them."""
    program: str = "launcher.runtime.process.rank:run"
    """``package.module:run`` of what every rank does with the plan: training, unless a measurement."""

    @property
    def world_size(self) -> int:
        """Ranks over all roles."""
        return sum(role.num_ranks for role in self.roles)

    @property
    def num_cluster_ranks(self) -> int:
        """Ranks on the cluster's devices: all but those of roles with nodes of their own."""
        return sum(role.num_ranks for role in self.roles if role.num_nodes is None)

    @property
    def num_nodes(self) -> int:
        """Nodes over all roles, with spare ones."""
        cluster = self.config.cluster
        return cluster.nodes + cluster.spare_nodes + sum(role.num_nodes or 0 for role in self.roles)

    @property
    def num_devices(self) -> int:
        """Devices that are taken, used or not. On the CPU a device is a process: none is taken idle."""
        cluster = self.config.cluster
        if self.config.device.kind == "cpu":
            return self.world_size
        return max(cluster.nodes * cluster.devices_per_node, self.num_cluster_ranks)

    @property
    def fits(self) -> bool:
        """Whether every rank fits into the memory of its device, by prediction."""
        return all(part.total_bytes <= self.config.device.memory_bytes for part in self.memory)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint, about: the weights and the optimizer's states in fp32; 0 where none is
        written."""
        states = 2 * self.num_parameters if self.num_state_elements is None else self.num_state_elements
        return 4 * (self.num_parameters + states) if self.config.train.checkpoint_interval else 0

    def node_memory_bytes(self, ranks_per_node: int) -> int:
        """Predicted bytes of all ranks of the node that holds the most; ranks fill nodes in their order."""
        by_rank = [self._rank_bytes(rank) for rank in range(self.num_cluster_ranks)]
        firsts = range(0, len(by_rank), ranks_per_node)
        return max(sum(by_rank[first : first + ranks_per_node]) for first in firsts)

    def _rank_bytes(self, rank: int) -> int:
        planned = self.rank(rank)
        if planned.coordinates is None:
            return planned.role.memory_bytes or 0
        pp_rank = planned.coordinates.pp
        return next(part.total_bytes for part in self.memory if part.pp_rank == pp_rank)

    @property
    def pipeline(self) -> PipelineShape:
        """The sizes that the schedule depends on."""
        return PipelineShape(
            num_pp_ranks=self.mesh.pp,
            num_chunks=self.config.parallel.num_chunks,
            num_microbatches=self.batch.num_microbatches,
            num_frozen=sum(stage.is_frozen for stage in self.stages),
        )

    @property
    def lists(self) -> list[tuple[Action, ...]]:
        """The actions of every pp_rank."""
        return [from_text(actions) for actions in self.schedule.actions]

    @property
    def predicted_speed(self) -> float:
        """Tokens a second, by prediction."""
        return self.batch.num_tokens / self.schedule.step_s

    def section(self, plugin: str) -> Mapping[str, Any]:
        """The values of what a plugin told of its part; empty where it told nothing."""
        return next((section.values for section in self.sections if section.plugin == plugin), {})

    def rank(self, rank: int) -> RankPlan:
        """What one rank does."""
        role = next(r for r in self.roles if r.first_rank <= rank < r.first_rank + r.num_ranks)
        if not role.trains:
            return RankPlan(plan=self, rank=rank, role=role, coordinates=None, stages=(), actions="")
        coordinates = self.mesh.coordinates(rank - role.first_rank)
        stages = tuple(stage for stage in self.stages if stage.pp_rank == coordinates.pp)
        actions = self.schedule.actions[coordinates.pp]
        return RankPlan(
            plan=self, rank=rank, role=role, coordinates=coordinates, stages=stages, actions=actions
        )

    def to_json(self) -> str:
        """The text of plan.json, byte-stable."""
        return json.dumps(plain(self), indent=1, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan written as ``text``.

        Raises:
            LauncherError: when the version is another one, or a field is wrong.
        """
        values: dict[str, Any] = json.loads(text)
        if values.get("version") != VERSION:
            raise LauncherError(
                f"plan.json has version {values.get('version')}, this launcher reads {VERSION}"
            )
        return read_or_raise(Plan, upgraded(values))


def sha256(text: str) -> str:
    """Hash of a plan's text, as the job script carries it."""
    return hashlib.sha256(text.encode()).hexdigest()
