"""Muon: the step of a hidden matrix is its momentum, orthogonalised; AdamW updates the rest.

    b <- momentum b + g        o = the nearest orthogonal matrix, about, by Newton-Schulz iterations
    w <- w - lr (decay w + scale o)

Matrices of embeddings and of the head, vectors, and tensors of more dims are AdamW's.

Source: Jordan et al., Muon (2024); Liu et al., Muon is Scalable for LLM Training (2025), section 2.2, of the
scale with which AdamW's learning rate and decay can be used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from launcher.base.errors import nearest
from launcher.contract.optim.plugin import Fault, LaunchConfig, ModelShape, Optimizer, ParameterShape
from launcher.typed.scalars import PositiveFloat, Probability, Range
from launcher_plugins.optimizers.adamw import MOMENTS

_HIDDEN = "layers."
"""How the names of matrices between the embedding and the head begin."""


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Settings of the optimizer."""

    momentum: Probability = 0.95
    """What is left of the sum of the gradients after each step."""
    nesterov: bool = True
    """Whether a step looks ahead along the sum."""
    num_iterations: Annotated[int, Range(minimum=1, maximum=99)] = 5
    """Newton-Schulz iterations."""
    scale: Literal["adamw", "original"] = "adamw"
    """Size of a step: ``adamw``: as long as AdamW's, so that its learning rate and decay can be used;
    ``original``: sqrt(max(1, rows / columns))."""
    adamw_names: tuple[str, ...] = ()
    """Names of further matrices that AdamW updates, such as embedding and head of a model of your own; with
    the wildcards ``*`` and ``?``."""
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    """AdamW's decay of the first and of the second moment, per step."""
    eps: PositiveFloat = 1e-8
    """AdamW's addition to the root of the second moment."""

    def takes(self, name: str, shape: Sequence[int]) -> bool:
        """Whether a parameter is a hidden matrix."""
        is_hidden = len(shape) == 2 and name.startswith(_HIDDEN)
        return is_hidden and not any(fnmatchcase(name, pattern) for pattern in self.adamw_names)


class Muon(Optimizer):
    """Muon with AdamW: one sum per element of a hidden matrix, two moments per element of others."""

    runtime = "launcher_plugins.optimizers.runtime:muon"
    Config = MuonConfig

    def states(self, parameter: ParameterShape, config: LaunchConfig) -> Mapping[str, tuple[int, ...]]:
        """The sum of the gradients, or AdamW's moments."""
        is_hidden = config.optim.settings(MuonConfig).takes(parameter.name, parameter.shape)
        return dict.fromkeys(("momentum_buffer",) if is_hidden else MOMENTS, parameter.shape)

    def check(self, config: LaunchConfig, model: ModelShape) -> Iterable[Fault]:
        """Names that match nothing."""
        names = config.optim.settings(MuonConfig).adamw_names
        known = [each.name for each in model.parameters] if names else []
        for index, pattern in enumerate(names):
            if not any(fnmatchcase(name, pattern) for name in known):
                rule = "matches the name of no parameter"
                rest = [*names[:index], *names[index + 1 :]]
                ways = ({"optim.adamw_names": rest},)
                near = nearest(pattern, known)
                fix = f"Did you mean {near}?" if near else f"A name is such as {known[-1]}."
                yield Fault("optim.adamw_names", pattern, rule, fix, ways=ways)

    def scratch_elements(self, kernel: str, whole: int, largest: int) -> int:
        """The momentum that is looked ahead along, in fp32, and the iterates of one matrix, in bf16."""
        return 4 * largest
