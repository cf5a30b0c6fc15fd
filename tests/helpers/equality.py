"""Trains a few steps under any layout and any update, and gives back what one device would have: losses,
gradient norms, weights, and Adam's moments (which hold every step's clipped gradient) as whole tensors
under their global names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from launcher.contract.plan import Plan
from launcher.plan.build import build
from launcher.plan.checked_job import PlanInputs
from launcher.runtime.api import slice_of
from launcher.runtime.checkpoint.fragments import MOMENTS
from launcher.runtime.data.microbatches import Loader
from launcher.runtime.process.rank import make_context
from launcher.runtime.train import reductions
from launcher.runtime.train.loop import Trainer
from tests.helpers.configs import TOKENS
from tests.helpers.contexts import make_config
from tests.helpers.ranks import TIMEOUT_S, run_ranks

NUM_STEPS = 3
CPU = torch.device("cpu")
Sabotage = Callable[[Trainer, Loader], None]
"""Breaks one rank's trainer or loader before the first step."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The same fields whatever the layout."""

    losses: list[float]
    """Mean loss of each step."""
    norms: list[float]
    """Norm of each step's whole gradient, before clipping."""
    weights: dict[str, Tensor]
    """After the last step, as the next forward would use them."""
    moments: dict[str, Tensor]
    """Of the optimizer after the last step, named ``exp_avg/layers.0.norm.weight``."""


@dataclass(frozen=True, kw_only=True)
class _Piece:
    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True, kw_only=True)
class _RankResult:
    losses: list[float | None]
    norms: list[float]
    weights: list[_Piece]
    moments: list[_Piece]


def job(inputs: PlanInputs | None = None, **sections: dict[str, Any]) -> Plan:
    """A plan of a tiny transformer: 4 layers, 16 sequences a step unless told otherwise."""
    settings: dict[str, dict[str, Any]] = {
        "model": {"num_layers": 4, "num_heads": 4, "hidden_size": 16, "vocab_size": 256, "init_std": 0.2},
        "data": {"source": "package:pydoc_data/topics.py", "cache_dir": TOKENS},
        "batch": {"global_size": 16, "micro_size": 2, "num_microbatches": None, "seq_length": 8},
        # A large eps: where a gradient is only rounding noise, Adam must not blow it up to a step of lr.
        "optim": {"lr": 1e-2, "eps": 1e-4, "warmup_steps": 1, "clip_norm": 0.5},
        "parallel": {"bucket_bytes": 4096},
    }
    for name, changes in sections.items():
        settings[name] = settings.get(name, {}) | changes
    return build(make_config(**settings), inputs=inputs or PlanInputs())


def train(plan: Plan, sabotage: Sabotage | None = None, timeout_s: float = TIMEOUT_S) -> Trained:
    """Runs the plan on as many forked ranks as it needs."""
    (found,) = train_each([plan], sabotage, timeout_s)
    return found


def train_each(
    plans: Sequence[Plan], sabotage: Sabotage | None = None, timeout_s: float = TIMEOUT_S
) -> list[Trained]:
    """Runs some plans of one size one after the other on the same forked ranks."""
    ranks = run_ranks(plans[0].world_size, _rank_of_each, plans, sabotage, timeout_s=timeout_s)
    return [_joined(results) for results in zip(*ranks, strict=True)]


def _joined(results: Sequence[_RankResult]) -> Trained:
    losses = next(result.losses for result in reversed(results) if result.losses[0] is not None)
    return Trained(
        losses=[loss for loss in losses if loss is not None],
        norms=results[0].norms,
        weights=_assemble(piece for result in results for piece in result.weights),
        moments=_assemble(piece for result in results for piece in result.moments),
    )


def reference(model: dict[str, Any], **optim: Any) -> Trained:
    """What one device computes of a model; trained once in a session."""
    return _one_device(tuple(sorted(model.items())), tuple(sorted(optim.items())))


@cache
def _one_device(model: tuple[tuple[str, Any], ...], optim: tuple[tuple[str, Any], ...]) -> Trained:
    return train(job(model=dict(model), optim=dict(optim)))


def assert_equal(found: Trained, expected: Trained, tolerance: float = 2e-5) -> None:
    """Losses, norms, weights and moments are the same up to fp32 rounding.

    ``tolerance`` is relative for losses and norms, and relative to the largest element of each tensor
    for weights and moments: sums run in another order under another layout.
    """
    for name in ("losses", "norms"):
        torch.testing.assert_close(
            torch.tensor(getattr(found, name)), torch.tensor(getattr(expected, name)), rtol=tolerance, atol=0
        )
    for name in ("weights", "moments"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.keys() == theirs.keys()
        for tensor, reference in theirs.items():
            if tensor.endswith(".k.bias"):
                continue  # its gradient is zero in exact arithmetic: softmax ignores a shift of all scores
            scale = reference.abs().max().item()
            torch.testing.assert_close(
                ours[tensor], reference, rtol=0, atol=tolerance * scale, msg=f"{tensor}: {{}}".format
            )


def skip_sums_over(kind: str) -> Sabotage:
    """Leaves out what an update sums over one kind of group."""

    def sabotage(trainer: Trainer, loader: Loader) -> None:
        module: Any = reductions
        all_reduce = module._all_reduce
        module._all_reduce = lambda ctx, name, tensors: name == kind or all_reduce(ctx, name, tensors)

    return sabotage


def _rank_of_each(rank: int, plans: Sequence[Plan], sabotage: Sabotage | None) -> list[_RankResult]:
    return [_rank(rank, plan, sabotage) for plan in plans]


def _rank(rank: int, plan: Plan, sabotage: Sabotage | None) -> _RankResult:
    ctx = make_context(plan.rank(rank), CPU)
    trainer, loader = Trainer(ctx), Loader(ctx)
    if sabotage is not None:
        sabotage(trainer, loader)
    steps = loader.steps(0)
    done = [trainer.step(step, next(steps)) for step in range(NUM_STEPS)]
    return _RankResult(
        losses=[step.loss for step in done],
        norms=[step.outcome.grad_norm for step in done],
        weights=list(_weights(trainer)),
        moments=list(_moments(trainer)),
    )


def _weights(trainer: Trainer) -> Iterator[_Piece]:
    for module in trainer.part.modules.values():
        for param in module.parameters():
            with _whole(param):
                where = slice_of(param)
                unpadded = tuple(map(slice, where.unpadded_shape(param.shape)))
                weight = param.detach()[unpadded].float().clone()
                yield _Piece(name=where.name, global_shape=where.shape, offset=where.offset, tensor=weight)


def _whole(param: nn.Parameter) -> Any:
    """Inside, a parameter of which this rank holds a part is whole."""
    if not hasattr(param, "ds_id"):
        return nullcontext()
    import deepspeed  # heavy, and most layouts do without

    return deepspeed.zero.GatheredParameters([param])


def _moments(trainer: Trainer) -> Iterator[_Piece]:
    for fragment in trainer.update.state():
        where, tensor = fragment.slice, fragment.tensor.detach().float().clone()
        if where.name.startswith(MOMENTS):
            yield _Piece(name=where.name, global_shape=where.shape, offset=where.offset, tensor=tensor)


def _assemble(pieces: Iterable[_Piece]) -> dict[str, Tensor]:
    """Whole tensors. Copies of one piece (replicas, tied embeddings) must be the same."""
    whole: dict[str, Tensor] = {}
    for piece in pieces:
        tensor = piece.tensor
        target = whole.setdefault(piece.name, torch.full(piece.global_shape, torch.nan))
        box = tuple(slice(o, o + n) for o, n in zip(piece.offset, tensor.shape, strict=True))
        if not target[box].isnan().any():
            torch.testing.assert_close(tensor, target[box], msg=f"copies of {piece.name}: {{}}".format)
        target[box] = tensor
    assert not any(tensor.isnan().any() for tensor in whole.values()), "no rank holds some part"
    return whole
