"""Cross-entropy over a vocabulary that is split over the ranks; the logits are never gathered.

For one token with logits z and target t:  loss = log(sum_j exp(z_j - M)) + M - z_t,  M = max_j z_j.
Each of M, the sum and z_t is one number a token, reduced over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from launcher.runtime.api import IGNORE_INDEX
from launcher_plugins.parallel.tensor.runtime.collectives import TensorParallelGroup


def cross_entropy_sum(
    logits: Tensor, local_targets: Tensor, targets: Tensor, group: TensorParallelGroup
) -> Tensor:
    """The sum over tokens of the cross-entropy, the same scalar on every rank.

    Shapes: ``logits`` fp32 [batch, seq, vocabulary(local)], -inf for padding; ``local_targets``
    [batch, seq], ``targets`` less this rank's first token; ``targets`` [batch, seq].
    """
    loss: Tensor = _VocabularyCrossEntropy.apply(logits, local_targets, targets, group)  # type: ignore[no-untyped-call]
    return loss


class _VocabularyCrossEntropy(torch.autograd.Function):
    """The gradient by z_j is softmax(z)_j - [j = t]: local, once the sum is known."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, local_targets: Tensor, targets: Tensor, group: TensorParallelGroup
    ) -> Tensor:
        highest = group.all_reduce(logits.amax(-1), "max")
        is_here = (local_targets >= 0) & (local_targets < logits.shape[-1])
        column = local_targets.masked_fill(~is_here, 0)[..., None]
        shifted = logits - highest[..., None]
        target_logits = shifted.gather(-1, column)[..., 0].masked_fill(~is_here, 0)
        exponentials = shifted.exp_()
        sums, target_logits = group.all_reduce(torch.stack([exponentials.sum(-1), target_logits]))
        counts = targets != IGNORE_INDEX
        ctx.save_for_backward(exponentials.div_(sums[..., None]), column, is_here, counts)
        loss: Tensor = (sums.log() - target_logits).masked_fill(~counts, 0).sum()
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, column, is_here, counts = ctx.saved_tensors
        # In place: the forward of this node is not run again, and autograd frees it after this.
        by_logits = probabilities.scatter_add_(-1, column, -is_here[..., None].to(probabilities.dtype))
        return by_logits.mul_(counts[..., None]).mul_(grad), None, None, None
