"""Faults of settings that cannot be trained together, found as a job is planned; changes are tried on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from launcher.base.arithmetic import divisors, listed, multiples_around, nearest_first
from launcher.base.errors import Fault, left_out
from launcher.base.units import counted
from launcher.config.paths import blamed, value_at
from launcher.contract.config import DeviceConfig, LaunchConfig, ModelConfig, PrecisionConfig
from launcher.contract.data.blend import NUM_PARTS, smallest_share
from launcher.contract.data.config import BYTES
from launcher.contract.data.tokenizer import vocabulary_faults
from launcher.contract.model.checkpoint import source_checkpoint
from launcher.typed.read import Source

BYTE_VOCABULARY = 256
_TABLE = "model.max_position_embeddings"
_OPTIONAL = ("num_kv_heads", "ffn_size", "head_dim", "max_position_embeddings")
_SIZES = ("num_layers", "hidden_size", "num_heads", "vocab_size", *_OPTIONAL)


def config_faults(config: LaunchConfig, sources: Mapping[str, Source]) -> list[Fault]:
    """Faults that need neither the layout nor a plugin to be seen."""
    faults = [*_source_faults(config), *_precision_faults(config, sources)]
    faults += [*_parallel_faults(config, sources), *_initial_faults(config)]
    faults += _custom_faults(config.model) if config.model.family == "custom" else _model_faults(config.model)
    faults += _position_faults(config.model, config.batch.seq_length)
    if config.data.target is None and config.data.tokenizer == BYTES:
        faults += vocabulary_faults(config.model.vocab_size, BYTE_VOCABULARY)
    return faults


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
    if isinstance(data.source, str) or data.source is None:
        return [left_out("data.weights", data.weights, "is about a list of sources")] if data.weights else []
    if not data.source:
        return [Fault("data.source", data.source, "names no source", "Name at least one.")]
    if len(data.source) != len(data.weights):
        rule = f"a blend of {counted(len(data.source), 'source')} has as many weights"
        ways = ({"data.weights": [1] * len(data.source)},)
        return [Fault("data.weights", list(data.weights), rule, ways=ways)]
    if smallest_share(data.weights) == 0:
        rule = f"one of them is below 1/{NUM_PARTS:,} of their sum, to which they are kept"
        return [Fault("data.weights", list(data.weights), rule, "Leave its source out, or give it more.")]
    return []


def _custom_faults(model: ModelConfig) -> list[Fault]:
    faults = []
    if model.target is None:
        rule = "family custom is built by a function of yours"
        faults.append(Fault("model.target", "null", rule, "Give model.target, as package.module:function."))
    for name in _SIZES:
        if (value := getattr(model, name)) is not None:
            rule = "has no effect on a model of family custom, whose layers come from model.target"
            way = {f"model.{name}": None}
            ways = (way, {**way, f"model.options.{name}": value})
            fix = f"Set model.{name}=null, or pass it as model.options.{name}."
            faults.append(Fault(f"model.{name}", value, rule, fix, ways=ways))
    return faults


def _initial_faults(config: LaunchConfig) -> list[Fault]:
    folder = config.train.init_from
    if folder is None or config.model.family != "custom" or source_checkpoint(config.train) is not None:
        return []
    rule = "holds the weights of a model of Hugging Face's, and the layers of family custom are your own"
    return [Fault("train.init_from", folder, rule, ways=({"train.init_from": None},))]


def _model_faults(model: ModelConfig) -> list[Fault]:
    faults = []
    if model.target is not None:
        rule = f"has no effect on family {model.family}"
        ways = ({"model.target": None}, {"model.family": "custom"})
        faults.append(Fault("model.target", model.target, rule, ways=ways))
    for name in _SIZES:
        if getattr(model, name) is None and name not in _OPTIONAL:
            fix = f"Give model.{name}, or model.path."
            faults.append(Fault(f"model.{name}", "null", f"family {model.family} needs it", fix))
    return faults + _head_faults(model)


def _head_faults(model: ModelConfig) -> list[Fault]:
    hidden, heads, kv_heads = model.hidden_size, model.num_heads, model.num_kv_heads
    if hidden is None or heads is None:
        return []
    faults = []
    if model.head_dim is None and hidden % heads:
        rule = f"must divide hidden_size = {hidden}; {hidden}/{heads} is not whole"
        faults.append(Fault("model.num_heads", heads, rule, ways=_nearest_ways("num_heads", heads, hidden)))
    elif model.family == "llama" and model.head_dim is not None:
        if model.head_dim % 2:
            rule = "must be even for rotary positions"
            others = ({"model.head_dim": model.head_dim + 1}, {"model.head_dim": None})
            faults.append(Fault("model.head_dim", model.head_dim, rule, ways=others))
    elif model.family == "llama" and hidden // heads % 2:
        rule = f"hidden_size / num_heads = {hidden // heads} must be even for rotary positions"
        ways = _nearest_ways("num_heads", heads, hidden // 2) if hidden % 2 == 0 else ()
        fix = "" if ways else "Set an even model.hidden_size."
        faults.append(Fault("model.num_heads", heads, rule, fix, ways=ways))
    if kv_heads is not None and heads % kv_heads:
        rule = f"must divide num_heads = {heads} ({listed(divisors(heads))})"
        ways = _nearest_ways("num_kv_heads", kv_heads, heads)
        faults.append(Fault("model.num_kv_heads", kv_heads, rule, ways=ways))
    return faults


def _position_faults(model: ModelConfig, seq_length: int) -> Iterator[Fault]:
    """Of learned positions (gpt) and of rotary ones (llama)."""
    rows, scaling = model.max_position_embeddings, model.rope_scaling
    if rows is not None and model.family == "llama":
        rule = "has no effect on family llama, whose rotary positions have no table"
        yield Fault(_TABLE, rows, rule, ways=({_TABLE: None},))
    if rows is not None and model.family == "gpt" and rows < seq_length:
        rule = f"the samples of batch.seq_length = {seq_length} tokens need as many positions"
        yield Fault(_TABLE, rows, rule, ways=({_TABLE: seq_length}, {"batch.seq_length": rows}))
    if scaling is not None and scaling.high_freq_factor <= scaling.low_freq_factor:
        rule = f"must be above low_freq_factor = {scaling.low_freq_factor:g}"
        way = {"model.rope_scaling.high_freq_factor": 4 * scaling.low_freq_factor}
        yield Fault("model.rope_scaling.high_freq_factor", scaling.high_freq_factor, rule, ways=(way,))


def _nearest_ways(name: str, wanted: int, multiple: int) -> tuple[Mapping[str, int], ...]:
    """The divisors of a number that are nearest to a size that does not divide it."""
    return tuple({f"model.{name}": size} for size in nearest_first(wanted, divisors(multiple))[:2])


def _precision_faults(config: LaunchConfig, sources: Mapping[str, Source]) -> list[Fault]:
    precision, device = config.precision, config.device
    faults = []
    if device.attainable_fraction == 0:
        rule = "must be greater than 0"
        half = {"device.attainable_fraction": 0.5}
        faults.append(Fault("device.attainable_fraction", 0, rule, ways=(half,)))
    faults += _tf32_faults(precision, device, sources)
    if precision.compute == "fp16" and not precision.master_weights:
        rule = "Adam's second moments are squares of gradients, which vanish in fp16"
        choices = ({"precision.master_weights": True}, {"precision.compute": "bf16"})
        faults.append(Fault("precision.master_weights", "false", rule, ways=choices))
    if precision.compute not in device.peak_flops:
        known = sorted(set(device.peak_flops) & {"fp32", "bf16", "fp16"})
        rule = f"{device.name} states no peak for it in device.peak_flops ({', '.join(known)})"
        fix = "" if known else f"Give device.peak_flops.{precision.compute}."
        ways: tuple[Mapping[str, str], ...] = tuple({"precision.compute": name} for name in known)
        if known and _is_of_group("precision.compute", sources):
            fix, ways = f"Set precision={known[0]}.", ({"precision": known[0]},)
        faults.append(Fault("precision.compute", precision.compute, rule, fix, ways=ways))
    if precision.gradients not in gradient_formats(precision):
        allowed = " or ".join(gradient_formats(precision))
        rule = f"weights in {precision.compute} have gradients in {allowed}"
        faults.append(
            Fault("precision.gradients", precision.gradients, rule, ways=({"precision.gradients": "fp32"},))
        )
    return faults


def _is_of_group(path: str, sources: Mapping[str, Source]) -> bool:
    """Whether a value of ``precision`` came with the choice of a whole file."""
    source = sources.get(path)
    return source is not None and "conf/precision/" in source.where


def _tf32_faults(
    precision: PrecisionConfig, device: DeviceConfig, sources: Mapping[str, Source]
) -> list[Fault]:
    if not precision.tf32:
        return []
    rule = ""
    if device.kind == "cpu":
        rule = "is a format of GPUs, and the devices are CPUs"
    elif precision.compute != "fp32":
        rule = f"rounds products of fp32 numbers, and precision.compute is {precision.compute}"
    elif "tf32" not in device.peak_flops:
        rule = f"{device.name} states no peak for it in device.peak_flops"
    if not rule:
        return []
    if _is_of_group("precision.tf32", sources):
        return [Fault("precision.tf32", "true", rule, "Set precision=fp32.", ways=({"precision": "fp32"},))]
    return [Fault("precision.tf32", "true", rule, ways=({"precision.tf32": False},))]


def gradient_formats(precision: PrecisionConfig) -> tuple[str, ...]:
    """The formats in which gradients may be accumulated."""
    return ("fp32",) if precision.compute == "fp32" else ("fp32", precision.compute)


def _parallel_faults(config: LaunchConfig, sources: Mapping[str, Source]) -> list[Fault]:
    parallel, seq = config.parallel, config.batch.seq_length
    faults = []
    if parallel.sequence_parallel and parallel.tp == 1:
        path = blamed(("parallel.sequence_parallel", "parallel.tp"), sources)
        rule = "sequence parallelism splits activations over the tensor-parallel ranks and tp is 1"
        off, tensor = {"parallel.sequence_parallel": False}, {"parallel.tp": 2}
        faults.append(Fault(path, value_at(config, path), rule, ways=(off, tensor)))
    if parallel.sequence_parallel and seq % parallel.tp:
        path = blamed(("batch.seq_length", "parallel.tp", "parallel.sequence_parallel"), sources)
        quotient = f"{seq}/{parallel.tp} is not whole"
        rule = f"sequence parallelism needs a seq_length that is a multiple of tp = {parallel.tp}; {quotient}"
        lengths = [{"batch.seq_length": length} for length in multiples_around(seq, parallel.tp)]
        degrees = [{"parallel.tp": size} for size in nearest_first(parallel.tp, divisors(seq))[:4]]
        both = degrees + lengths if path == "parallel.tp" else lengths + degrees
        faults.append(Fault(path, value_at(config, path), rule, ways=tuple(both)))
    return faults
