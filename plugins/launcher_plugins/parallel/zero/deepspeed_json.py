"""The DeepSpeed configuration of a job, made of the recipe's settings: whole, and with no ``auto`` in it.

Three layers: what the recipe says elsewhere and what the launcher's own backward needs (fixed); what only
tunes DeepSpeed (a default); and ``parallel.zero_options``, a user's own DeepSpeed keys, which may change
the second and add to it, but not contradict the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.base.errors import LEFT_OUT, Fault
from launcher.contract.config import LaunchConfig
from launcher.contract.strategy import FP32_BYTES
from launcher_plugins.parallel.zero.deepspeed_keys import key_fault

OPTIONS = "parallel.zero_options"
_SOURCES = {
    "train_batch_size": "batch.global_size",
    "train_micro_batch_size_per_gpu": "batch.micro_size",
    "gradient_accumulation_steps": "batch.num_microbatches",
    "gradient_clipping": "optim.clip_norm",
    "communication_data_type": "precision.gradients",
    "data_types": "precision",
    "data_types.grad_accum_dtype": "precision.gradients",
    "bf16.enabled": "precision.compute",
    "fp16.enabled": "precision.compute",
    "zero_optimization.stage": "parallel.zero_stage",
    "zero_optimization.offload_optimizer": "parallel.zero_offload",
    "zero_optimization.reduce_bucket_size": "parallel.bucket_bytes",
    "zero_optimization.allgather_bucket_size": "parallel.bucket_bytes",
    "optimizer": "optim",
    "scheduler": "optim",
    "zero_force_ds_cpu_optimizer": "parallel.zero_offload",
}
"""The setting of the recipe that a DeepSpeed key repeats."""


def deepspeed_json(config: LaunchConfig, num_parameters: int) -> dict[str, Any]:
    """The configuration of a job without `option_faults`. ``num_parameters``: that are trained, of the whole
    model."""
    ours = _merged(_tuning(config), _fixed(config, num_parameters))
    return _merged(ours, _plain(config.parallel.zero_options))


def option_faults(config: LaunchConfig, num_parameters: int) -> Iterator[Fault]:
    """Faults of a user's own DeepSpeed keys, each naming both sides of a contradiction."""
    compute = config.precision.compute
    formats = {name: {"enabled": compute == name} for name in ("bf16", "fp16")}
    fixed = dict(_leaves(_merged(formats, _fixed(config, num_parameters))))
    for key, value in _leaves(_plain(config.parallel.zero_options)):
        source = _source(key)
        if value == "auto":
            fix = "Give the value, or remove the key: the launcher fills in what follows from the recipe."
            yield _fault(key, value, "DeepSpeed would be given the word itself", fix)
        elif key in fixed:
            if fixed[key] != value:
                asked = f"{source} asks for {_shown(fixed[key])}" if source else _need(fixed[key])
                yield _fault(key, value, asked, _way_out(key, source))
        elif source:
            yield _fault(key, value, f"{source} decides on it", _way_out(key, source))
        elif (found := key_fault(key, value, config)) is not None:
            rule, hint = found
            yield _fault(key, value, rule, hint or _way_out(key, None))


def _fixed(config: LaunchConfig, num_parameters: int) -> dict[str, Any]:
    """What the recipe's other settings say, and what the launcher's own backward needs."""
    batch, precision, parallel = config.batch, config.precision, config.parallel
    stage = parallel.zero_stage
    bucket = _bucket_elements(config, num_parameters)
    fixed: dict[str, Any] = {
        "train_batch_size": batch.global_size,
        "train_micro_batch_size_per_gpu": batch.micro_size,
        "gradient_accumulation_steps": batch.num_microbatches,
        "gradient_clipping": config.optim.clip_norm or 0.0,
        "communication_data_type": precision.gradients,
        "data_types": {"grad_accum_dtype": precision.gradients},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            # The backward of stage 1 is the pipeline's, of which DeepSpeed sees only the gradients.
            "contiguous_gradients": stage > 1,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
    }
    if precision.compute == "bf16":
        fixed["bf16"] = {"enabled": True, "immediate_grad_update": True}
    if precision.compute == "fp16":
        fixed["fp16"] = {"enabled": True, "loss_scale": 0.0}
    if parallel.zero_offload:
        fixed["zero_force_ds_cpu_optimizer"] = False
        fixed["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    return fixed


def _tuning(config: LaunchConfig) -> dict[str, Any]:
    """What nothing else decides: chosen so that a rank holds what the plan says it holds."""
    stage, is_cuda = config.parallel.zero_stage, config.device.kind == "cuda"
    zero: dict[str, Any] = {
        "overlap_comm": stage > 1 and is_cuda,
        "reduce_scatter": True,
        # One reduce for each part to its owner; summing whole buckets on all ranks sends twice as much.
        "use_multi_rank_bucket_allreduce": False,
        "round_robin_gradients": False,
    }
    if stage == 3:
        # Every parameter is split, and let go right after its use.
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    if config.parallel.zero_offload:
        zero["offload_optimizer"] = {"pin_memory": is_cuda}
    tuning: dict[str, Any] = {"steps_per_print": None, "wall_clock_breakdown": False}
    if config.precision.compute == "fp16":
        # As the native loss scale: halved at once, doubled after 1,000 good steps.
        tuning["fp16"] = {"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 1}
    return tuning | {"zero_optimization": zero}


def _bucket_elements(config: LaunchConfig, num_parameters: int) -> int:
    """Elements of a bucket, an even number, as DeepSpeed needs; no larger than the model: it is allocated."""
    wanted = min(config.parallel.bucket_bytes // FP32_BYTES, num_parameters)
    return max(2, wanted + wanted % 2)


def _source(key: str) -> str | None:
    parts = key.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((_SOURCES[name] for name in names if name in _SOURCES), None)


def _need(value: Any) -> str:
    return f"the launcher runs the backward itself, which needs {_shown(value)}"


def _way_out(key: str, source: str | None) -> str:
    remove = f"Remove {OPTIONS}.{key}"
    return f"{remove}, or change {source}." if source else f"{remove}."


def _fault(key: str, value: Any, rule: str, fix: str) -> Fault:
    path = f"{OPTIONS}.{key}"
    return Fault(path, _shown(value), rule, fix, ways=({path: LEFT_OUT},))


def _shown(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) or value is None else value


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is no mapping, by its dotted key; an empty mapping is a value, too."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """``high`` over ``low``, mapping by mapping.

    >>> _merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})
    {'a': {'b': 3, 'c': 2}}
    """
    merged = dict(low)
    for key, value in high.items():
        below = merged.get(key)
        is_inner = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = _merged(below or {}, value) if is_inner else value
    return merged


def _plain(value: Any) -> Any:
    """As JSON has it; a whole number written as 5e8 is an int, as DeepSpeed's sizes must be.

    >>> _plain({"reduce_bucket_size": 5e8})
    {'reduce_bucket_size': 500000000}
    """
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
