"""What the runtime half of a plugin may use: the context of a rank, and the interfaces it implements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from launcher.contract.config import LaunchConfig
from launcher.contract.plan import RankPlan
from launcher.runtime.measure.clock import Clock
from launcher.runtime.model.deferred_weight_gradients import DeferredWeightGradient, SplitBackward
from launcher.runtime.process.groups import Groups
from launcher.runtime.process.stop import StopRequest

if TYPE_CHECKING:
    from launcher.runtime.model.layers import Layers


@dataclass(frozen=True, kw_only=True)
class GlobalSlice:
    """Which part of which global tensor a local parameter is: a box at ``offset``."""

    name: str
    """Global name, the same under every layout, such as ``layers.3.attention.q.weight``."""
    shape: tuple[int, ...]
    """Shape of the global tensor, without padding: the last rows of a local tensor may overhang it
    (a vocabulary that tp does not divide). They are zero, get no gradient, and are not kept."""
    offset: tuple[int, ...]
    """Where the local tensor begins in each dim."""
    is_sharded: bool
    """Whether the tensor-parallel ranks hold different slices (else equal copies)."""
    is_tied: bool = False
    """On the first and on the last stage (tied embeddings): their gradients are summed."""
    is_tied_copy: bool = False
    """The last stage's copy of a tied parameter, on another rank than the first stage's."""
    is_summed_over_tp: bool = False
    """A whole copy whose gradient each tensor-parallel rank has only for its part of the sequence, or of the
    heads."""

    @staticmethod
    def unsharded(name: str, shape: Sequence[int], *, is_summed_over_tp: bool = False) -> GlobalSlice:
        """The whole of a global tensor."""
        return GlobalSlice(
            name=name,
            shape=tuple(shape),
            offset=(0,) * len(shape),
            is_sharded=False,
            is_summed_over_tp=is_summed_over_tp,
        )

    def is_owned_by(self, tp_rank: int) -> bool:
        """Whether the copy of this tp_rank counts: of equal copies only one does, so that a sum over all
        ranks of a replica, or their checkpoint, has each element of the global tensor once."""
        return not self.is_tied_copy and (self.is_sharded or tp_rank == 0)

    def unpadded_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a local tensor without its padding, which is behind the rest in each dim.

        >>> GlobalSlice(name="w", shape=(65, 8), offset=(33, 0), is_sharded=True).unpadded_shape((33, 8))
        (32, 8)
        """
        boxes = zip(local_shape, self.shape, self.offset, strict=True)
        return tuple(max(0, min(local, whole - start)) for local, whole, start in boxes)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The torch name of every number format of the configuration."""
NEWEST_ORDER = 2
"""The version of the order of the samples of a training that starts from its first step."""
IGNORE_INDEX = -100
"""Targets with this value add nothing to the loss."""


def new_parameter(
    where: GlobalSlice, shape: Sequence[int], device: torch.device, dtype: torch.dtype
) -> nn.Parameter:
    """An uninitialised local parameter that carries ``global_slice``. ``shape`` is local."""
    parameter = nn.Parameter(torch.empty(tuple(shape), device=device, dtype=dtype))
    tag(parameter, where)
    return parameter


def tag(parameter: nn.Parameter, where: GlobalSlice) -> None:
    """Records on a parameter which slice of a global tensor it is."""
    parameter.global_slice = where  # type: ignore[attr-defined]


def slice_of(parameter: Tensor) -> GlobalSlice:
    """Which slice of a global tensor a parameter is."""
    where = getattr(parameter, "global_slice", None)
    assert isinstance(where, GlobalSlice), "a parameter without a global slice: `tag` was not called"
    return where


@dataclass(frozen=True, kw_only=True)
class GlobalFragment:
    """A slice of a state tensor under its global name, for checkpoints."""

    slice: GlobalSlice
    tensor: Tensor


Root = Tensor | GradientEdge
"""Where a backward begins: the loss, or the gradient edge of a stage's output. The output itself is freed
as soon as it has been sent."""


FragmentReader = Callable[[str, Sequence[int], Sequence[int]], Tensor]
"""Reads any box of any global tensor from a checkpoint: by the name, and the offset and shape of the box."""


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """The result of an update."""

    grad_norm: float
    """Norm of the whole model's gradient before clipping; not a number where `Update.skip` made none."""
    lr: float
    is_skipped: bool = False
    is_finite: bool = True
    """False: the gradient is infinite or not a number, no loss scale helps, and no update was made."""
    disagreement: float | None = None
    """Where replicas average their weights: the norm of this one's difference from the average, over the norm
    of the average."""


class Stateful(Protocol):
    """Has the state that a checkpoint saves."""

    def state(self) -> Iterable[GlobalFragment]:
        """Master weights and optimizer state under global names."""

    def load(self, read: FragmentReader) -> None:
        """Restores what `state` returned, under any layout."""


class Update(Stateful, Protocol):
    """Owns the update of the parameters; exactly one per run, so that the loop has no branch on the strategy.

    The executor calls `backward` for every B of the rank and `backward_weight` for every W; ``last``
    is true for the last B, and the last W, of each chunk in the step. A chunk's gradients are final
    after its last B, or after its last W where the schedule splits the backward.
    """

    @property
    def loss_scale(self) -> float:
        """Factor of the loss before its backward: 1, or large enough that fp16 gradients do not underflow."""

    def prepare(self, chunks: Sequence[nn.Module]) -> Sequence[nn.Module]:
        """Takes over the chunks' parameters; returns the modules to run."""

    def begin(self, step: int) -> None:
        """Called before the first forward of a step. Does nothing by default."""
        return

    def backward(self, out: Root | None, grad: Tensor | None, *, chunk: int, last: bool) -> None:
        """Backward of one microbatch. ``out``: where it begins, for `torch.autograd.backward`; None where
        nothing needs a gradient. ``grad``: its gradient, None for the loss."""

    def backward_weight(self, deferred: Sequence[DeferredWeightGradient], *, chunk: int, last: bool) -> None:
        """The weight gradients that a split backward has deferred."""

    def apply(self, step: int) -> StepOutcome:
        """Finishes the gradient exchange, clips, updates the parameters, clears the gradients."""

    def skip(self, step: int) -> StepOutcome:
        """In place of `apply`: finishes the gradient exchange and clears the gradients, and changes neither
        parameters nor optimizer state. Called on all ranks."""
        raise AssertionError("the plan refuses to skip batches here")

    def close(self) -> None:
        """Frees its resources, if it has any."""
        return


class Handle(Protocol):
    """An asynchronous communication, as `torch.distributed.Work`."""

    def wait(self) -> Any:
        """Returns when the tensor may be used (on CUDA: by the current stream)."""


@dataclass(frozen=True)
class Waiting:
    """A `Handle` made of a function."""

    wait: Callable[[], Any]


class Transport(Protocol):
    """Point-to-point messages between pipeline ranks.

    Messages are matched by their tag where the backend has tags; where it has none (NCCL), the messages
    from one rank to another are received in the order in which they were sent.
    """

    def receive(self, buffer: Tensor, source: int, tag: int) -> Handle:
        """Posts the receive of one message from a pp_rank into ``buffer``."""

    def send(self, tensor: Tensor, destination: int, tag: int) -> Handle:
        """Starts sending a contiguous tensor to a pp_rank, without blocking."""


class Replicas(Protocol):
    """Communication of replicas that use no collectives with each other, since one may be late or have
    failed.

    Ranks of another role hold the parameters and save the checkpoints.
    """

    @property
    def is_asynchronous(self) -> bool:
        """Whether each replica steps on its own: gradient and loss are of its samples alone."""

    def sum(self, value: Tensor) -> Handle:
        """Starts summing a number over the replicas, in place."""

    def synchronize(self) -> None:
        """Waits for the other replicas; from then until the next step all have the same parameters."""

    def leave(self, num_done: int) -> None:
        """Announces that this replica ends, after ``num_done`` steps."""


@dataclass(kw_only=True)
class RankContext:
    """What one rank works with. The runtime halves of the parallel plugins add their parts in turn."""

    plan: RankPlan
    device: torch.device
    groups: Groups
    clock: Clock
    split_backward: SplitBackward
    """Defers weight gradients where the schedule splits the backward."""
    layers: Layers
    """Whole layers; tensor parallelism replaces them by its own."""
    transport: Transport | None = None
    """Set by pipeline parallelism."""
    exchange_gradients: Callable[[Tensor], Handle] | None = None
    """Set by data parallelism: starts summing a flat bucket of gradients, in place, over the replicas."""
    replicas: Replicas | None = None
    """Set by an architecture whose replicas use no collectives with each other."""
    stop: StopRequest | None = None
    """Set by the loop, where ranks save a checkpoint when they are asked to stop."""
    sample_order: int = NEWEST_ORDER
    """Version of the order of the samples; that of the checkpoint that the training goes on from."""
    partition_weights: Callable[[nn.Module], None] | None = None
    """Set by a strategy that shards the weights themselves: called with each part of the model as soon as
    its weights are initialised, so that no rank ever holds all of them."""

    @property
    def common_device(self) -> torch.device:
        """The device of tensors in collectives over all ranks of the run: some roles have no GPU."""
        return self.device if all(role.trains for role in self.plan.plan.roles) else torch.device("cpu")

    @property
    def config(self) -> LaunchConfig:
        """The run's settings."""
        return self.plan.plan.config
