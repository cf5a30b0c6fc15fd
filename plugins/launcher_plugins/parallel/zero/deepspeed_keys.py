"""DeepSpeed's own keys that may be set beside what follows from the recipe, and what each may be.

DeepSpeed says of a wrong one only on the ranks, after a start; and some it knows would move states to where
the launcher's checkpoints and plans do not look for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.base.errors import did_you_mean
from launcher.contract.config import LaunchConfig

_SWITCH, _COUNT, _NUMBER = "true or false", "a whole number of at least 0", "a number"
_STAGE_3: Mapping[str, str] = {
    "stage3_allgather_sequential": _SWITCH,
    "stage3_max_live_parameters": _COUNT,
    "stage3_max_reuse_distance": _COUNT,
    "stage3_model_persistence_threshold": _COUNT,
    "stage3_module_granularity_threshold": _COUNT,
    "stage3_param_persistence_threshold": _COUNT,
    "stage3_prefetch_bucket_size": _COUNT,
    "stage3_use_all_reduce_for_fetch_params": _SWITCH,
    "log_trace_cache_warnings": _SWITCH,
    "memory_efficient_linear": _SWITCH,
    "sub_group_size": _COUNT,
}
"""Those of ``zero_optimization`` that are about split weights."""
_EVERY_STAGE: Mapping[str, str] = {
    "allgather_partitions": _SWITCH,
    "enable_sanity_checks": _SWITCH,
    "ignore_unused_parameters": _SWITCH,
    "overlap_comm": _SWITCH,
    "reduce_scatter": _SWITCH,
    "round_robin_gradients": _SWITCH,
    "use_multi_rank_bucket_allreduce": _SWITCH,
}
_FORMATS: Mapping[str, Mapping[str, str]] = {
    "fp16": {
        "consecutive_hysteresis": _SWITCH,
        "hysteresis": _COUNT,
        "initial_scale_power": _COUNT,
        "loss_scale_window": _COUNT,
        "min_loss_scale": _NUMBER,
    },
    "bf16": {"check_grad_overflow": _SWITCH},
}
_ELSEWHERE = (
    "offload_param",
    "zenflow",
    "zero_hpz_partition_size",
    "zero_quantized_gradients",
    "zero_quantized_weights",
)
"""Those that DeepSpeed knows, and that would keep states where nobody looks."""


def key_fault(key: str, value: Any, config: LaunchConfig) -> tuple[str, str] | None:
    """What is wrong with a key that does not repeat the recipe, and a hint; None where it may be.

    ``key``: dotted.
    """
    top, _, name = key.partition(".")
    if top in _FORMATS and config.precision.compute != top:
        return f"has no effect, as precision.compute={config.precision.compute}", ""
    if top == "zero_optimization" and name:
        return _zero_fault(name, value, config.parallel.zero_stage)
    return _value_fault(name, value, _FORMATS[top]) if top in _FORMATS and name else None


def _zero_fault(name: str, value: Any, stage: int) -> tuple[str, str] | None:
    if name.partition(".")[0] in _ELSEWHERE:
        return "would keep states where neither the plan nor a checkpoint has them", ""
    if name in _STAGE_3 and stage < 3:
        return f"has an effect at stage 3 alone, and parallel.zero_stage={stage}", ""
    return _value_fault(name, value, {**_EVERY_STAGE, **_STAGE_3})


def _value_fault(name: str, value: Any, known: Mapping[str, str]) -> tuple[str, str] | None:
    if name not in known:
        return "is no key that may be set here", did_you_mean(name, known)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_good = {
        _SWITCH: isinstance(value, bool),
        _COUNT: is_number and isinstance(value, int) and value >= 0,
        _NUMBER: is_number,
    }[known[name]]
    return None if is_good else (f"must be {known[name]}", "")
