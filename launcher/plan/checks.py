"""Settings that are well formed one by one but cannot be trained together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from launcher.config.schema import LaunchConfig, ModelConfig, PrecisionConfig
from launcher.errors import Fault
from launcher.plan.arithmetic import divisors, listed, multiples_around, nearest_of
from launcher.plan.model import MemoryPlan
from launcher.typed import Source
from launcher.units import format_bytes

BYTE_VOCABULARY = 256
_SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size", "vocab_size")
_OPTIONAL = ("num_kv_heads", "ffn_size")


def config_faults(config: LaunchConfig) -> list[Fault]:
    """Faults that need neither the layout nor a plugin to be seen."""
    faults = [*_source_faults(config), *_precision_faults(config), *_parallel_faults(config)]
    faults += _custom_faults(config.model) if config.model.family == "custom" else _model_faults(config.model)
    vocab = config.model.vocab_size
    if config.data.target is None and vocab is not None and vocab < BYTE_VOCABULARY:
        rule = f"the bytes tokenizer gives {BYTE_VOCABULARY} different tokens, and each needs its row"
        faults.append(Fault("model.vocab_size", vocab, rule, f"Set model.vocab_size={BYTE_VOCABULARY}."))
    return faults


def memory_faults(memory: Sequence[MemoryPlan], config: LaunchConfig) -> list[Fault]:
    """A fault when the fullest rank does not fit its device; names its largest part and ways out."""
    fullest = max(memory, key=lambda ranks: ranks.total_bytes)
    limit = config.device.memory_bytes
    if fullest.total_bytes <= limit:
        return []
    parts = parts_bytes(fullest)
    largest = max(parts, key=lambda name: parts[name])
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    rule = (
        f"a rank of pp_rank {fullest.pp_rank} needs {format_bytes(fullest.total_bytes)} "
        f"({held}) and its device has {format_bytes(limit)}; the largest part is {largest}"
    )
    is_state = largest in ("weights", "gradients", "optimizer")
    ways = _state_ways(config) if is_state else _activation_ways(config)
    return [Fault("device.memory_bytes", limit, rule, f"{', or '.join(ways)}.".capitalize())]


def parts_bytes(memory: MemoryPlan) -> dict[str, int]:
    """The parts of a rank's memory by name, in the order they are shown."""
    return {
        "weights": memory.weights_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer": memory.optimizer_bytes,
        "activations": memory.activations_bytes,
        **memory.other_bytes,
    }


def with_sources(faults: Iterable[Fault], sources: Mapping[str, Source]) -> tuple[Fault, ...]:
    """The faults, each with the file and line or the override that set its value, once each."""
    placed: list[Fault] = []
    for fault in faults:
        source = sources.get(fault.path)
        named = replace(fault, where=source.where) if source and not fault.where else fault
        if named not in placed:
            placed.append(named)
    return tuple(placed)


def _source_faults(config: LaunchConfig) -> list[Fault]:
    data = config.data
    if (data.source is None) == (data.target is None):
        rule = "exactly one of data.source (text) and data.target (your own dataset) is needed"
        return [Fault("data.source", data.source or "null", rule, "Set one and make the other null.")]
    return []


def _custom_faults(model: ModelConfig) -> list[Fault]:
    faults = []
    if model.target is None:
        rule = "family custom is built by a function of yours"
        faults.append(Fault("model.target", "null", rule, "Set model.target=package.module:function."))
    for name in _SIZES:
        if (value := getattr(model, name)) is not None:
            rule = "has no effect on a model of family custom, whose layers come from model.target"
            fix = f"Set model.{name}=null, or pass it as model.options.{name}."
            faults.append(Fault(f"model.{name}", value, rule, fix))
    return faults


def _model_faults(model: ModelConfig) -> list[Fault]:
    faults = []
    if model.target is not None:
        rule = f"has no effect on family {model.family}"
        faults.append(
            Fault("model.target", model.target, rule, "Set model.family=custom or model.target=null.")
        )
    for name in _SIZES:
        if getattr(model, name) is None and name not in _OPTIONAL:
            faults.append(
                Fault(f"model.{name}", "null", f"family {model.family} needs it", f"Give model.{name}.")
            )
    return faults + _head_faults(model)


def _head_faults(model: ModelConfig) -> list[Fault]:
    hidden, heads, kv_heads = model.hidden_size, model.num_heads, model.num_kv_heads
    if hidden is None or heads is None:
        return []
    faults = []
    if hidden % heads:
        rule = f"must divide hidden_size = {hidden}; {hidden}/{heads} is not whole"
        fix = f"Set model.num_heads={nearest_of(heads, divisors(hidden))}."
        faults.append(Fault("model.num_heads", heads, rule, fix))
    elif model.family == "llama" and hidden // heads % 2:
        rule = f"hidden_size / num_heads = {hidden // heads} must be even for rotary positions"
        choices = [d for d in divisors(hidden) if hidden // d % 2 == 0]
        fix = (
            f"Set model.num_heads={nearest_of(heads, choices)}."
            if choices
            else "Set an even model.hidden_size."
        )
        faults.append(Fault("model.num_heads", heads, rule, fix))
    if kv_heads is not None and heads % kv_heads:
        rule = f"must divide num_heads = {heads} ({listed(divisors(heads))})"
        fix = f"Set model.num_kv_heads={nearest_of(kv_heads, divisors(heads))}."
        faults.append(Fault("model.num_kv_heads", kv_heads, rule, fix))
    return faults


def _precision_faults(config: LaunchConfig) -> list[Fault]:
    precision, device = config.precision, config.device
    faults = []
    if device.attainable_fraction == 0:
        rule = "a device that attains nothing of its peak never ends a step"
        faults.append(Fault("device.attainable_fraction", 0, rule, "Set device.attainable_fraction=0.5."))
    if precision.compute not in device.peak_flops:
        known = sorted(set(device.peak_flops) & {"fp32", "bf16", "fp16"})
        rule = f"{device.name} states no peak for it in device.peak_flops ({', '.join(known)})"
        fix = (
            f"Set precision.compute={known[0]}." if known else f"Give device.peak_flops.{precision.compute}."
        )
        faults.append(Fault("precision.compute", precision.compute, rule, fix))
    if precision.gradients not in gradient_formats(precision):
        allowed = " or ".join(gradient_formats(precision))
        rule = f"weights in {precision.compute} have gradients in {allowed}"
        faults.append(
            Fault("precision.gradients", precision.gradients, rule, "Set precision.gradients=fp32.")
        )
    return faults


def gradient_formats(precision: PrecisionConfig) -> tuple[str, ...]:
    """The formats in which gradients may be accumulated."""
    return ("fp32",) if precision.compute == "fp32" else ("fp32", precision.compute)


def _parallel_faults(config: LaunchConfig) -> list[Fault]:
    parallel, seq = config.parallel, config.batch.seq_length
    faults = []
    if parallel.zero_stage:
        rule = "no installed plugin shards the model states over the replicas, so only 0 has an effect"
        faults.append(Fault("parallel.zero_stage", parallel.zero_stage, rule, "Set parallel.zero_stage=0."))
    if parallel.sequence_parallel and parallel.tp == 1:
        rule = "splits activations over the tensor-parallel ranks and tp is 1"
        fix = "Set parallel.sequence_parallel=false or parallel.tp=2."
        faults.append(Fault("parallel.sequence_parallel", "true", rule, fix))
    if parallel.sequence_parallel and seq % parallel.tp:
        offers = " or ".join(map(str, multiples_around(seq, parallel.tp)))
        rule = (
            f"sequence parallelism needs a multiple of tp = {parallel.tp}; {seq}/{parallel.tp} is not whole"
        )
        faults.append(Fault("batch.seq_length", seq, rule, f"Set batch.seq_length={offers}."))
    return faults


def _state_ways(config: LaunchConfig) -> list[str]:
    parallel = config.parallel
    ways = [f"raise parallel.pp above {parallel.pp}"]
    if config.model.family != "custom":
        ways.insert(0, f"raise parallel.tp above {parallel.tp}")
    return [*ways, "choose a smaller model"]


def _activation_ways(config: LaunchConfig) -> list[str]:
    parallel, micro = config.parallel, config.batch.micro_size
    ways = [f"set batch.micro_size={micro // 2}"] if micro and micro > 1 else []
    if parallel.recompute == "none":
        ways.append("set parallel.recompute=full")
    if parallel.tp > 1 and not parallel.sequence_parallel:
        ways.append("set parallel.sequence_parallel=true")
    return [*ways, f"raise parallel.pp above {parallel.pp}" if not ways else "shorten batch.seq_length"]
