"""Fills in every value that follows from others."""

from __future__ import annotations

from dataclasses import replace

from launcher.contract.config import LaunchConfig, ModelConfig
from launcher.contract.plan import BatchPlan


def resolve_model(model: ModelConfig) -> ModelConfig:
    """With the default key and value heads and MLP width.

    A model whose hidden size is unknown is returned as it is; `checks` says so.
    """
    if model.family == "custom" or model.hidden_size is None:
        return model
    return replace(
        model,
        num_kv_heads=model.num_heads if model.num_kv_heads is None else model.num_kv_heads,
        ffn_size=4 * model.hidden_size if model.ffn_size is None else model.ffn_size,
    )


def resolve(config: LaunchConfig, dp: int, sizes: BatchPlan) -> LaunchConfig:
    """The configuration with no ``auto`` and no missing size left."""
    batch = replace(
        config.batch,
        global_size=sizes.global_size,
        micro_size=sizes.micro_size,
        num_microbatches=sizes.num_microbatches,
    )
    return replace(config, parallel=replace(config.parallel, dp=dp), batch=batch)


def padded_vocabulary(model: ModelConfig, tp: int) -> int | None:
    """The vocabulary rounded up to a multiple of tp; None for a model without one.

    For 250,682 tokens and tp = 8: 250,688.
    """
    if model.vocab_size is None:
        return None
    return -(-model.vocab_size // tp) * tp
