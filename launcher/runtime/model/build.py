"""Builds this rank's part of the model: one module for each of its stages, with this rank's slices alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar, cast

from torch import Tensor, nn

from launcher.contract.model.sizes import Sizes
from launcher.contract.model.tensors import EMBEDDING
from launcher.runtime.api import RankContext, slice_of, tag
from launcher.runtime.data.microbatches import Microbatch
from launcher.runtime.model.blocks import Block, Dropout, Norm, Rotary, window_mask
from launcher.runtime.model.randomness import init_slice
from launcher.runtime.model.stage import Stage
from launcher.runtime.model.user_model import build_custom_chunks

Part = TypeVar("Part", bound=nn.Module)


def build_chunks(ctx: RankContext) -> list[nn.Module]:
    """The modules of this rank's stages, in chunk order, with their initial weights. Parameters that
    ``optim.groups`` freezes require no gradient.

    Two stages on one rank with tied embeddings share one parameter.
    """
    chunks = _built_chunks(ctx)
    for param in nn.ModuleList(chunks).parameters():
        if ctx.config.optim.is_frozen(slice_of(param).name):
            param.requires_grad_(False)
    return chunks


def _built_chunks(ctx: RankContext) -> list[nn.Module]:
    model = ctx.config.model
    if model.family == "custom":
        return build_custom_chunks(ctx)
    sizes = Sizes.of(model, ctx.config.batch.seq_length)
    has_prologue = any(stage.has_prologue for stage in ctx.plan.stages)
    prologue = _initialised(Prologue(ctx, sizes), ctx, sizes) if has_prologue else None
    rotary = Rotary(model, sizes, ctx.device) if model.family == "llama" else None
    mask = window_mask(ctx, sizes)
    chunks: list[nn.Module] = []
    for stage in ctx.plan.stages:
        here, recomputes = replace(ctx, layers=ctx.layers.for_stage(stage)), stage.recompute == "selective"
        blocks = [
            _initialised(Block(here, index, sizes, rotary, mask, recomputes=recomputes), ctx, sizes)
            for index in stage.layers
        ]
        epilogue = Epilogue(here, sizes, prologue) if stage.has_epilogue else None
        if epilogue is not None:
            _initialised(epilogue, ctx, sizes, shares_with=prologue)
        chunks.append(Stage(ctx.config, stage, prologue if stage.has_prologue else None, blocks, epilogue))
    return chunks


class Prologue(nn.Module):
    """Token embedding and, for gpt, learned positions."""

    def __init__(self, ctx: RankContext, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = ctx.layers.embedding(EMBEDDING, sizes.vocab, sizes.hidden)
        self.slice = ctx.layers.positions(sizes.seq_length)
        has_positions = ctx.config.model.family == "gpt"
        shape = (sizes.positions, sizes.hidden)
        self.positions = ctx.layers.replicated("positions.weight", *shape) if has_positions else None
        self.dropout = Dropout(ctx, site=0)
        if ctx.config.model.tied_embeddings:
            _mark_tied(self.embedding, is_copy=False)

    def forward(self, batch: Microbatch) -> Tensor:
        """Tokens [micro, seq] -> [micro, seq(local), hidden]."""
        hidden = self.embedding(batch.inputs)
        if self.positions is not None:
            hidden = hidden + self.positions[self.slice]
        out: Tensor = self.dropout(hidden, self.dropout.seeds(batch))
        return out


class Epilogue(nn.Module):
    """Final norm, projection to the vocabulary and loss."""

    def __init__(self, ctx: RankContext, sizes: Sizes, prologue: Prologue | None) -> None:
        super().__init__()
        is_tied = ctx.config.model.tied_embeddings
        shared = cast(nn.Parameter, prologue.embedding.weight) if is_tied and prologue is not None else None
        self.norm = Norm(ctx, "norm", sizes.hidden)
        self.head = ctx.layers.head(EMBEDDING if is_tied else "head", sizes.vocab, sizes.hidden, shared)
        if is_tied and shared is None:
            _mark_tied(self.head, is_copy=True)

    def forward(self, hidden: Tensor, batch: Microbatch) -> Tensor:
        """hidden [micro, seq(local), hidden] -> fp32 sum of the microbatch's token losses."""
        loss: Tensor = self.head(self.norm(hidden), batch.targets)
        return loss


def _mark_tied(module: nn.Module, *, is_copy: bool) -> None:
    for param in module.parameters():
        tag(param, replace(slice_of(param), is_tied=True, is_tied_copy=is_copy))


def _initialised(part: Part, ctx: RankContext, sizes: Sizes, shares_with: nn.Module | None = None) -> Part:
    """The part with its initial weights, sharded where the run shards weights: matrices normal, norm weights
    1, biases 0.

    The weights of layers that add to the residual stream are scaled down by the root of the number of
    additions. ``shares_with``: an initialised part, some of whose parameters this one may share.

    Source: Radford et al., GPT-2 (2019), section 2.3.
    """
    std = ctx.config.model.init_std
    shared = set(shares_with.parameters()) if shares_with is not None else set()
    for param in part.parameters():
        if param in shared:
            continue
        where = slice_of(param)
        if param.dim() == 1:
            nn.init.constant_(param, 0 if where.name.endswith(".bias") else 1)
            continue
        is_residual = where.name.endswith((".out.weight", ".down.weight"))
        scale = (2 * sizes.num_layers) ** -0.5 if is_residual else 1.0
        init_slice(param, where, seed=ctx.config.seed, std=std * scale)
    if ctx.partition_weights is not None:
        ctx.partition_weights(part)
    return part
