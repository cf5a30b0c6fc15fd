"""DeepSpeed's own keys that may be set beside what follows from the recipe, and what each may be.

DeepSpeed says of a wrong one only on the ranks, after a start, and of others nothing, though they do nothing
where the launcher runs the loop. Some would move states to where its checkpoints and plans do not look for
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.base.errors import did_you_mean
from launcher.contract.config import LaunchConfig

_SWITCH, _COUNT, _POSITIVE = "true or false", "a whole number of at least 0", "a whole number of at least 1"
_STAGE_3: Mapping[str, str] = {
    "stage3_allgather_sequential": _SWITCH,
    "stage3_max_live_parameters": _COUNT,
    "stage3_max_reuse_distance": _COUNT,
    "stage3_model_persistence_threshold": _COUNT,
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
    "use_multi_rank_bucket_allreduce": _SWITCH,
}
_FORMATS: Mapping[str, Mapping[str, str]] = {
    "fp16": {
        "consecutive_hysteresis": _SWITCH,
        "hysteresis": _POSITIVE,
        "initial_scale_power": _COUNT,
        "loss_scale_window": _POSITIVE,
        "min_loss_scale": _POSITIVE,
    },
    "bf16": {"check_grad_overflow": _SWITCH},
}
TAKEN = (*_FORMATS, "log_level", "zero_optimization")
"""The top-level keys that may be set."""
_ELSEWHERE = "would keep states where neither the plan nor a checkpoint has them"
_UNUSABLE: Mapping[str, str] = {
    "offload_param": _ELSEWHERE,
    "round_robin_gradients": "reorders the states, which DeepSpeed's own map of them does not follow",
    "stage3_module_granularity_threshold": "gathers modules whole, and their backward then fails",
    "zenflow": _ELSEWHERE,
    "zero_hpz_partition_size": _ELSEWHERE,
    "zero_quantized_gradients": _ELSEWHERE,
    "zero_quantized_weights": _ELSEWHERE,
}
"""Those of ``zero_optimization`` that DeepSpeed knows and that do not go with the rest, and why."""
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
"""Values of ``log_level``, of what DeepSpeed writes to the log of each rank."""
_RECORDS = "metrics/rank-*.jsonl in the run's folder has the loss and the times of every step"
_SAVING = "train.checkpoint_interval and the settings beside it decide on checkpoints"
_SUMS = "precision.gradients=fp32 keeps sums of gradients from overflowing"
_EXPERTS = "there are no experts to spread"
UNUSED: Mapping[str, str] = {
    "activation_checkpointing": "parallel.recompute says what is computed again",
    "aio": "nothing is kept on disks",
    "autotuning": "trireme sweep compares settings",
    "bfloat16": "precision.compute decides on the format",
    "checkpoint": _SAVING,
    "comet": _RECORDS,
    "comms_logger": _RECORDS,
    "compile": "fusion.compile says what is compiled",
    "csv_monitor": _RECORDS,
    "data_efficiency": "data decides on the samples",
    "data_parallel_size": "parallel.dp is the number of replicas",
    "dataloader_drop_last": "data decides on the samples",
    "datastates_ckpt": _SAVING,
    "disable_allgather": "DeepSpeed itself ignores it",
    "disable_python_gc": "nobody would collect in its place",
    "dump_state": "deepspeed.json in the run's folder is what DeepSpeed was given",
    "expert_parallel": _EXPERTS,
    "flops_profiler": _RECORDS,
    "gradient_allreduce_op": "the loss is scaled so that the mean over the replicas is the gradient",
    "gradient_predivide_factor": _SUMS,
    "hybrid_engine": "nothing is generated while training",
    "managed_gradient_accumulation": "the launcher says which microbatch is the last",
    "memory_breakdown": _RECORDS,
    "pipeline": "parallel.pp and parallel.schedule decide on the pipeline",
    "prescale_gradients": _SUMS,
    "seq_parallel_communication_data_type": "parallel.sequence_parallel goes with parallel.tp",
    "sequence_parallel_size": "parallel.sequence_parallel goes with parallel.tp",
    "steps_per_print": _RECORDS,
    "tensor_parallel": "parallel.tp splits the layers",
    "tensorboard": _RECORDS,
    "timers": _RECORDS,
    "torch_autocast": "precision.compute decides on the format",
    "use_data_before_expert_parallelism": _EXPERTS,
    "vocabulary_size": "model.vocab_size is padded by itself",
    "wall_clock_breakdown": _RECORDS,
    "wandb": _RECORDS,
    "weight_quantization": "precision.compute decides on the format",
}
"""Top-level keys that DeepSpeed knows and that would fail or do nothing here, with what does it instead."""
_HOLDING: Mapping[str, Any] = {
    **dict.fromkeys(("comet.enabled", "comms_logger.enabled", "csv_monitor.enabled"), False),
    **dict.fromkeys(("flops_profiler.enabled", "tensorboard.enabled", "wandb.enabled"), False),
    **dict.fromkeys(("dump_state", "memory_breakdown", "wall_clock_breakdown"), False),
    "gradient_predivide_factor": 1,
    "prescale_gradients": False,
    "steps_per_print": None,
    "zero_optimization.round_robin_gradients": False,
}
"""What holds anyway of keys that are refused, and may be said: files for other launchers do."""


def key_fault(key: str, value: Any, config: LaunchConfig) -> tuple[str, str] | None:
    """What is wrong with a key that does not repeat the recipe, and a hint; None where it may be.

    ``key``: dotted.
    """
    top, _, name = key.partition(".")
    if key in _HOLDING and value == _HOLDING[key]:
        return None
    if top in UNUSED:
        rule = "is not taken: the launcher runs the loop, and DeepSpeed the update of the weights"
        return rule, f"Remove parallel.zero_options.{key}: {UNUSED[top]}."
    if top not in TAKEN:
        return "is no key of DeepSpeed that may be set here", did_you_mean(top, (*TAKEN, *UNUSED))
    if top == "log_level":
        is_level = not name and value in LOG_LEVELS
        return None if is_level else (f"must be one of {', '.join(LOG_LEVELS)}", "")
    if top in _FORMATS and config.precision.compute != top:
        return f"has no effect, as precision.compute={config.precision.compute}", ""
    if not name:
        return None if value == {} else ("must be settings by name", "")
    if top == "zero_optimization":
        return _zero_fault(name, value, config.parallel.zero_stage)
    return _value_fault(name, value, _FORMATS[top])


def _zero_fault(name: str, value: Any, stage: int) -> tuple[str, str] | None:
    if (reason := _UNUSABLE.get(name.partition(".")[0])) is not None:
        return reason, ""
    if name == "overlap_comm" and value is True and stage == 1:
        return "reduces gradients in every backward, which stage 1 does once a step", ""
    if name in _STAGE_3 and stage < 3:
        return f"has an effect at stage 3 alone, and parallel.zero_stage={stage}", ""
    return _value_fault(name, value, {**_EVERY_STAGE, **_STAGE_3})


def _value_fault(name: str, value: Any, known: Mapping[str, str]) -> tuple[str, str] | None:
    if name not in known:
        return "is no key that may be set here", did_you_mean(name, known)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    is_good = {
        _SWITCH: isinstance(value, bool),
        _COUNT: is_number and value >= 0,
        _POSITIVE: is_number and value >= 1,
    }[known[name]]
    return None if is_good else (f"must be {known[name]}", "")
