"""Configurations for tests, built by keyword: everything small unless a test says otherwise.

The one place that knows every setting: other helpers change what differs for them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from launcher.base.errors import ConfigError
from launcher.config.compose import Composed, compose
from launcher.contract.config import (
    BatchConfig,
    ClusterConfig,
    DeviceConfig,
    LaunchConfig,
    LinkConfig,
    ModelConfig,
    ParallelConfig,
    PluginChoice,
    PrecisionConfig,
    TrainConfig,
)
from launcher.contract.data.config import DataConfig
from launcher.contract.job import ReportConfig, RunConfig
from launcher.contract.optim.config import OptimConfig
from launcher.contract.strategy import JobShape
from launcher.plan.checked_job import CheckedJob, PlanInputs, examine

SMALL_RUN = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_heads=2",
    "batch.seq_length=16",
    "batch.global_size=4",
    "batch.micro_size=1",
    "train.eval_batches=0",
    "report.warmup_steps=1",
)
"""Overrides of the quickstart for tests that start real processes."""

Settings = Mapping[str, Any]
FP32 = PrecisionConfig(name="fp32", compute="fp32", gradients="fp32", master_weights=False)
MIXED = PrecisionConfig(name="bf16", compute="bf16", gradients="fp32", master_weights=True)


def launch_config(
    *,
    model: Settings | None = None,
    batch: Settings | None = None,
    parallel: Settings | None = None,
    cluster: Settings | None = None,
    device: Settings | None = None,
    **others: Any,
) -> LaunchConfig:
    """A configuration with some settings of some groups changed; ``others`` replaces whole groups."""
    config = LaunchConfig(
        name="test",
        seed=0,
        model=replace(_MODEL, **(model or {})),
        data=_DATA,
        batch=replace(_BATCH, **(batch or {})),
        optim=_OPTIM,
        train=_TRAIN,
        precision=FP32,
        device=replace(_DEVICE, **(device or {})),
        cluster=replace(_CLUSTER, **(cluster or {})),
        parallel=replace(_PARALLEL, **(parallel or {})),
        architecture=PluginChoice(name="decentralized", options={}),
        executor=PluginChoice(name="torchrun", options={}),
        report=ReportConfig(baseline="none", warmup_steps=0),
        run=RunConfig(dir=None, root="runs", timeout_s=60, start_timeout_s=60),
    )
    return replace(config, **others)


def compose_sound(recipe: str, words: Sequence[str] = ()) -> Composed:
    """The values of a recipe with overrides.

    Raises:
        ConfigError: where any of them is faulty.
    """
    composed = compose(recipe, words)
    if composed.faults:
        raise ConfigError(composed.faults)
    return composed


def job_shape(config: LaunchConfig) -> JobShape:
    """The job of a sound configuration, without predictions."""
    found = examine(config, {}, PlanInputs())
    assert isinstance(found, CheckedJob), found
    return found.shape


def with_settings(config: LaunchConfig, sections: Mapping[str, Settings]) -> LaunchConfig:
    """A configuration with some settings of some groups changed; of ``optim`` also the optimizer's own. With
    another ``optim.name`` it has the defaults of those."""
    found = {name: dict(settings) for name, settings in sections.items()}
    if optim := found.get("optim"):
        before = config.optim.options if optim.get("name", config.optim.name) == config.optim.name else {}
        own = {name: optim.pop(name) for name in [*optim] if name not in OptimConfig.__dataclass_fields__}
        found["optim"] = {"options": {**before, **own}, **optim}
    return replace(config, **{name: replace(getattr(config, name), **found[name]) for name in found})


GPT2 = {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "vocab_size": 50257, "tied_embeddings": True}
LLAMA3_8B = {
    "family": "llama",
    "hidden_size": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "ffn_size": 14336,
    "vocab_size": 128256,
}

_MODEL = ModelConfig(
    name="tiny",
    family="gpt",
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=None,
    ffn_size=None,
    vocab_size=256,
    tied_embeddings=False,
    dropout=0.0,
    norm_eps=1e-5,
    rope_theta=10000.0,
    init_std=0.02,
    target=None,
    options={},
)
TOKENS = os.path.join(tempfile.gettempdir(), f"trireme-tests-{os.getuid()}")
"""The folder of the token files of all tests."""
_DATA = DataConfig(
    name="text",
    source="text.txt",
    tokenizer="bytes",
    eval_fraction=0.1,
    prefetch_batches=0,
    cache_dir=TOKENS,
    target=None,
    options={},
)
_BATCH = BatchConfig(global_size=16, micro_size=1, num_microbatches=None, seq_length=32)
_OPTIM = OptimConfig(
    name="adamw",
    lr=1e-3,
    options={"betas": [0.9, 0.95], "eps": 1e-8},
    weight_decay=0.1,
    clip_norm=1.0,
    warmup_steps=0,
    decay="constant",
    min_lr_fraction=0.1,
)
_TRAIN = TrainConfig(num_steps=2, eval_interval=0, eval_batches=0, checkpoint_interval=0, keep_checkpoints=1)
_DEVICE = DeviceConfig(
    name="box",
    kind="cuda",
    peak_flops={"fp32": 1e12, "bf16": 4e12},
    memory_bytes=80_000_000_000,
    memory_bandwidth_bytes_per_s=1e12,
    attainable_fraction=0.5,
)
_CLUSTER = ClusterConfig(
    name="lab",
    nodes=1,
    devices_per_node=8,
    intra_node=LinkConfig(latency_s=1e-6, bandwidth_bytes_per_s=100e9),
    inter_node=LinkConfig(latency_s=1e-5, bandwidth_bytes_per_s=10e9),
    allow_idle_devices=True,
)
_PARALLEL = ParallelConfig(
    dp=1,
    tp=1,
    pp=1,
    num_chunks=1,
    schedule="1f1b",
    schedule_options={},
    layers_per_stage="even",
    sequence_parallel=False,
    recompute="none",
    zero_stage=0,
    rank_order="pp-dp-tp",
    bucket_bytes=25_000_000,
)
