"""What the author of an optimizer implements: a subclass of `Optimizer`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from launcher.base import registry
from launcher.base.errors import Fault
from launcher.base.registry import Plugin
from launcher.contract.config import LaunchConfig
from launcher.contract.model.shape import ModelShape, ParameterShape

__all__ = [
    "Fault",
    "LaunchConfig",
    "ModelShape",
    "Optimizer",
    "ParameterShape",
    "optimizer_of",
    "whole_tensor_faults",
]
_KERNELS = ("fused", "foreach", "loop")
"""From the fewest kernels to the most."""


class Optimizer(Plugin):
    """How gradients become new weights, and what is kept of every parameter for it.

    One with options declares them as a frozen dataclass ``Config``; ``config.optim.settings(Config)`` are
    those that were chosen.
    """

    entry_group = "launcher.optimizers"
    required = ("runtime", "states")
    runtime: str
    """``package.module:make``, called on the ranks that update with some `ParameterGroup` and the
    `RankContext`; returns a `torch.optim.Optimizer`."""
    is_elementwise: bool = False
    """Whether the update of an element depends on the gradients and states of that element alone: its tensor
    may then be cut anywhere. All states have the shape of their parameter."""
    kernels: Sequence[str] = ("loop",)
    """Values of ``fusion.optimizer`` that it can run as; ``loop`` is one of them."""

    def states(self, parameter: ParameterShape, config: LaunchConfig) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor that it keeps of a parameter, by its name in the ``state`` of the
        `torch.optim.Optimizer`. All are zero before the first update."""
        raise NotImplementedError

    def check(self, config: LaunchConfig, model: ModelShape) -> Iterable[Fault]:
        """Faults of its options, beside those of their types. ``model``: whole; it knows its parameters by
        their names."""
        return ()

    def scratch_elements(self, kernel: str, whole: int, largest: int) -> int:
        """Elements that it holds beside its states while it runs. ``whole``: of all parameters; ``largest``:
        of one."""
        return 0

    def kernel(self, config: LaunchConfig) -> str:
        """What it runs as: what is asked for, or the next that it has. Where it has one alone, nothing may be
        asked for."""
        asked = _KERNELS.index(config.fusion.optimizer)
        return next(kernel for kernel in _KERNELS[asked:] if kernel in self.kernels)


def optimizer_of(config: LaunchConfig) -> Optimizer:
    """The optimizer that a configuration names.

    Raises:
        PluginError: when it is unknown, or fails to load.
    """
    return registry.load(Optimizer, config.optim.name)


def whole_tensor_faults(config: LaunchConfig, why: str, whole: Mapping[str, object]) -> Iterable[Fault]:
    """The fault of an optimizer that needs whole tensors where something splits them, for the `check` of what
    does. ``why``: ends a sentence on the optimizer; ``whole``: the settings under which nothing is split."""
    if not optimizer_of(config).is_elementwise:
        rule = f"updates a tensor by all of its elements, and {why}"
        yield Fault("optim.name", config.optim.name, rule, ways=(whole,))
