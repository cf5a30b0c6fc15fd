"""Every setting of a launch: its type, its unit, its range. Those of a site are in `launcher.contract.site`.

The classes are the only description of the configuration: the loader reads them to check a recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

from launcher.contract.alarms.config import AlarmsConfig
from launcher.contract.data.config import DataConfig
from launcher.contract.job import ReportConfig, RunConfig
from launcher.contract.model.rope import RopeScaling
from launcher.contract.optim.config import OptimConfig
from launcher.contract.site import SiteConfig
from launcher.typed.read import REST, read_if, read_or_raise, read_unless, read_where, read_while
from launcher.typed.scalars import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Range,
    Size,
    SmallInt,
)
from launcher.typed.trust import OF_READER, READS_FILES, names_code

Settings = TypeVar("Settings")
DEFAULT_SCHEDULE, DEFAULT_ARCHITECTURE = "1f1b", "decentralized"
"""What a run on one device is made with, and what takes the place of a choice that cannot run."""
CHUNKED_SCHEDULE = "interleaved_1f1b"
"""What runs several model chunks per pipeline rank."""
LOCAL_EXECUTOR, SUBMITTING_EXECUTOR = "torchrun", "slurm"
"""Who starts ranks on this machine, and who takes a job, where nobody says otherwise."""
DType = Literal["fp32", "bf16", "fp16"]
"""A number format of weights, gradients or activations."""

_RANKS = ("parallel.dp", "parallel.tp", "parallel.pp", "architecture.name")
_NODES = ("site.roles", "cluster.nodes", "cluster.devices_per_node")
_WINDOW_RULE = "batch.seq_length is above model.sliding_window"
NOT_COMPUTED = (
    "model.name",
    "data.name",
    "data.cache_dir",
    "data.prefetch_batches",
    "precision.name",
    "train.checkpoint_interval",
    "train.keep_checkpoints",
    "train.keep_every",
    "train.async_checkpoint",
)
"""Labels, and settings that change how fast but not what is computed."""


def _several_axes(*sizes: int) -> bool:
    return sum(size > 1 for size in sizes) > 1


def _ranks_share_a_node(devices_per_node: int, dp: int, tp: int, pp: int, architecture: str) -> bool:
    """Whether they do; other architectures may have ranks beside those that train."""
    return devices_per_node > 1 and (dp * tp * pp > 1 or architecture != DEFAULT_ARCHITECTURE)


def _on_several_nodes(roles: Mapping[str, Any], nodes: int, per_node: int, *ranks: Any) -> bool:
    """Whether ranks are, some perhaps of a role with nodes of its own."""
    dp, tp, pp, architecture = ranks
    return bool(roles) or (nodes > 1 and (dp * tp * pp > per_node or architecture != DEFAULT_ARCHITECTURE))


def _is_window(window: int, seq_length: int) -> bool:
    """Whether a window leaves a token out."""
    return window < seq_length


@dataclass(frozen=True, kw_only=True)
class PluginChoice:
    """A plugin by its entry-point name, with the settings that its own ``Config`` declares."""

    name: str
    """Entry-point name, such as ``torchrun``."""
    options: Mapping[str, Any] = field(metadata=REST)
    """Every other key of the YAML node, checked against the plugin's ``Config``."""

    def settings(self, declared: type[Settings]) -> Settings:
        """The options as the plugin's own ``Config``, once planning has checked them."""
        return read_or_raise(declared, self.options)


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """One accelerator, or one CPU core share, by its datasheet."""

    name: str
    """Product name."""
    kind: Literal["cuda", "cpu"]
    """Which torch device runs the ranks."""
    peak_flops: Mapping[str, PositiveFloat]
    """Dense peak FLOP/s by number format (fp32, tf32, bf16, fp16)."""
    memory_bytes: PositiveInt
    """Bytes of memory that one rank may use."""
    memory_bandwidth_bytes_per_s: PositiveFloat
    """Bytes per second between the device and its memory."""
    attainable_fraction: Fraction
    """Share of the peak that large matmuls reach: an assumption, used only for predicted times."""
    measured_in: str | None = field(default=None, metadata=READS_FILES)
    """Run directory whose measured forwards and backwards of every stage take the place of this device's
    figures, in predicted times and in ``parallel.layers_per_stage=auto``: of the same model, microbatch, tp,
    precision, recomputation and kind of device, split over any stages. null = by the figures."""
    memory_check: Literal["refuse", "warn"] = "refuse"
    """What becomes of a plan predicted not to fit into ``memory_bytes``: refused, or made with a note."""
    limits_memory: bool = False
    """Hold each rank that trains to ``memory_bytes``: what it would take beyond them ends the run, as on a
    device of that size. On a CPU it counts what threads and libraries take in the training, too."""


@dataclass(frozen=True, kw_only=True)
class LinkConfig:
    """A network link by the alpha-beta model: time = latency + bytes / bandwidth."""

    latency_s: NonNegativeFloat
    """Seconds until the first byte arrives."""
    bandwidth_bytes_per_s: PositiveFloat
    """Bytes per second of one device, one direction."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The machines: how many, how many devices in each, and the links between them."""

    name: str
    """Name shown in the plan."""
    nodes: Size
    """Number of nodes."""
    devices_per_node: SmallInt
    """Devices in one node; one rank drives one device."""
    intra_node: LinkConfig = field(
        metadata=read_where("several ranks share a node", _ranks_share_a_node, *_NODES[2:], *_RANKS)
    )
    """Link between two devices of one node."""
    inter_node: LinkConfig = field(
        metadata=read_where("ranks are on several nodes", _on_several_nodes, *_NODES, *_RANKS)
    )
    """Link between two devices of different nodes."""
    allow_idle_devices: bool
    """Accept a strategy that leaves devices unused."""
    spare_nodes: NonNegativeInt = 0
    """Nodes reserved beyond ``nodes``, for those that fail the check of nodes or crash."""
    device_name: str | None = None
    """Product name of the devices in it, for a warning where ``device`` is another; null = any."""


Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the training is spread over the devices."""

    dp: PositiveInt | Literal["auto"]
    """Data-parallel replicas; ``auto`` = devices / (tp * pp), and 1 on the CPU where devices may be idle."""
    tp: PositiveInt
    """Tensor-parallel ranks."""
    pp: PositiveInt
    """Pipeline ranks (p)."""
    num_chunks: PositiveInt
    """Model chunks on each pipeline rank (v); above 1 only for schedules that interleave."""
    schedule: str
    """Name of a schedule plugin, such as ``1f1b``."""
    schedule_options: Mapping[str, Any]
    """Settings of the schedule plugin (its ``Config``): ``uneven_groups`` of ``interleaved_1f1b``."""
    layers_per_stage: tuple[int, ...] | Literal["even", "auto"]
    """``even``; ``auto`` = by predicted or measured time, embedding and head counted; or the number of layers
    of every stage in stage order (length pp * num_chunks)."""
    sequence_parallel: bool
    """Split the activations between tensor-parallel regions along the sequence."""
    recompute: Recompute | tuple[Recompute, ...]
    """What is not kept for the backward but computed again: ``none``; ``selective``: norms and activation
    functions, which cost little; ``full``: all but the input of each layer. Or one of them for every stage
    in stage order (length pp * num_chunks)."""
    zero_stage: Annotated[int, Range(minimum=0, maximum=3)]
    """ZeRO stage, by DeepSpeed: 0 replicates the model states over the data-parallel ranks, 1 splits the
    optimizer state between them, 2 the gradients, too, 3 also the weights."""
    rank_order: str = field(
        metadata=read_where("two of parallel.dp, tp and pp are above 1", _several_axes, *_RANKS[:3])
    )
    """The mesh axes from the outermost to the innermost, joined by hyphens: ``pp-dp-tp``. Megatron's
    ``--order`` of the same ranks begins with the innermost: ``tp-dp-pp``."""
    bucket_bytes: PositiveInt = field(metadata=read_unless("parallel.dp", 1))
    """Bytes at which a bucket of gradients starts its all-reduce."""
    zero_offload: bool = False
    """Keep the optimizer state of ZeRO in the memory of the CPU, and update there."""
    zero_options: Mapping[str, Any] = field(default_factory=dict)
    """Further DeepSpeed settings, as its own JSON nests them; none may contradict the recipe."""
    plugins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further parallel plugins by name, each with its settings (its ``Config``)."""

    def on_one_device(self) -> ParallelConfig:
        """The same with nothing spread, and no setting of what spreads it."""
        return replace(
            self,
            dp=1,
            tp=1,
            pp=1,
            num_chunks=1,
            schedule=DEFAULT_SCHEDULE,
            schedule_options={},
            layers_per_stage="even",
            sequence_parallel=False,
            zero_stage=0,
            zero_offload=False,
            zero_options={},
            plugins={},
        )


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats of the model states."""

    name: str
    """Name shown in the plan."""
    compute: DType
    """Weights and activations in forward and backward."""
    gradients: DType
    """Accumulated and reduced gradients."""
    master_weights: bool = field(metadata=read_unless("precision.compute", "fp32", neutral=False))
    """Keep an fp32 copy of the weights in the optimizer."""
    tf32: bool = False
    """Round the inputs of fp32 matrix products to TF32, as GPUs since Ampere multiply fastest."""

    @property
    def products(self) -> str:
        """The number format that matrix products run in."""
        return "tf32" if self.tf32 else self.compute


@dataclass(frozen=True, kw_only=True)
class FusionConfig:
    """Which operations run as one kernel in place of several. What is computed differs by rounding alone."""

    optimizer: Literal["fused", "foreach", "loop"] = "fused"
    """The update as one kernel (``fused``), as one kernel per operation over all tensors (``foreach``), or
    tensor by tensor (``loop``). An optimizer without such kernels takes the next of them that it has."""
    attention: Literal["fused", "plain"] = "fused"
    """``fused``: torch's scaled_dot_product_attention, which keeps no scores; ``plain``: two matrix
    products and a softmax, which keep seq_length x seq_length weights of every head."""
    compile: Literal["none", "block"] = "none"
    """``none``: layers run as they are written; ``block``: torch.compile makes kernels of each layer for
    itself, which needs a C++ compiler."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model: a decoder-only transformer, or a user's own list of layers."""

    name: str
    """Name shown in the plan."""
    family: Literal["gpt", "llama", "custom"]
    """``gpt``: learned positions, LayerNorm, GELU; ``llama``: rotary positions, RMSNorm, SwiGLU;
    ``custom``: built by ``target``."""
    path: str | None = field(default=None, metadata={**read_unless("model.family", "custom"), **READS_FILES})
    """Folder with a ``config.json`` of GPT-2, Llama, Mistral, Qwen2 or Qwen3 in Hugging Face's format, which
    gives the family, the sizes and what else makes the network; null = the settings here."""
    num_layers: SmallInt | None
    """Transformer blocks."""
    hidden_size: Size | None
    """Width of the residual stream, in numbers per token."""
    num_heads: Size | None
    """Attention heads."""
    num_kv_heads: Size | None
    """Key and value heads; null = num_heads."""
    head_dim: Size | None = None
    """Width of one attention head; null = hidden_size / num_heads."""
    ffn_size: Size | None
    """Width inside the MLP; null = 4 * hidden_size."""
    vocab_size: Size | None
    """Tokens in the vocabulary."""
    max_position_embeddings: Size | None = None
    """Rows of the table of learned positions (gpt), at least batch.seq_length; null = batch.seq_length."""
    tied_embeddings: bool = field(metadata=read_unless("model.family", "custom", neutral=False))
    """The output head uses the input embedding's weight."""
    dropout: Probability = field(metadata=read_unless("model.family", "custom"))
    """Probability of zeroing, after the embedding and after each residual branch."""
    norm_eps: PositiveFloat = field(metadata=read_unless("model.family", "custom"))
    """Added to the variance in every norm."""
    rope_theta: PositiveFloat = field(metadata=read_while("model.family", "llama"))
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = field(default=None, metadata=read_while("model.family", "llama"))
    """How rotary frequencies are lowered for a longer context; null = not at all."""
    attention_bias: Literal["none", "qkv", "all"] = field(
        default="none", metadata=read_while("model.family", "llama", neutral="none")
    )
    """Biases in the attention: ``none``; ``qkv``: of queries, keys and values (Qwen2); ``all``: also of the
    output."""
    qk_norm: bool = field(default=False, metadata=read_while("model.family", "llama", neutral=False))
    """A norm over each head's query and key, before they are rotated (Qwen3)."""
    sliding_window: Size | None = field(
        default=None,
        metadata=read_if(
            read_while("model.family", "llama"),
            read_where(_WINDOW_RULE, _is_window, "model.sliding_window", "batch.seq_length"),
        ),
    )
    """Tokens that one attends to at most, itself counted (Mistral); null = all before it. It masks, and saves
    no operations."""
    init_std: PositiveFloat = field(
        metadata=read_if(read_unless("model.family", "custom"), read_while("train.init_from", None))
    )
    """Standard deviation of the initial weights."""
    target: str | None = field(metadata=names_code("launcher.models"))
    """``package.module:function`` that builds a user's own layers (family ``custom``)."""
    options: Mapping[str, Any]
    """Passed to ``target`` as keyword arguments."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Samples per step. Of the three sizes at least one is given; the others follow."""

    global_size: PositiveInt | None
    """Samples per optimizer step over all ranks = micro_size * num_microbatches * dp."""
    micro_size: PositiveInt | None
    """Samples in one forward pass of one rank."""
    num_microbatches: PositiveInt | None
    """Forward passes per step (m)."""
    seq_length: PositiveInt
    """Tokens per sample, by which speeds are counted; 1 where a sample is no sequence: they count samples."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length of the training and what happens along the way."""

    num_steps: PositiveInt
    """Optimizer steps."""
    eval_interval: NonNegativeInt = field(metadata=read_unless("train.eval_batches", 0, neutral=0))
    """Steps between evaluations; 0 = only after the last step."""
    eval_batches: NonNegativeInt
    """Global batches per evaluation; 0 = no evaluation."""
    checkpoint_interval: NonNegativeInt
    """Steps between checkpoints; 0 = none."""
    keep_checkpoints: PositiveInt = field(metadata=read_unless("train.checkpoint_interval", 0))
    """How many checkpoints are kept, the newest."""
    keep_every: NonNegativeInt = field(
        default=0, metadata=read_unless("train.checkpoint_interval", 0, neutral=0)
    )
    """Every checkpoint after a multiple of so many steps is kept for good beside them, a multiple of
    ``checkpoint_interval``; 0 = none."""
    async_checkpoint: bool = field(
        default=True, metadata=read_unless("train.checkpoint_interval", 0, neutral=True)
    )
    """Write checkpoints in the background from a copy of the state, while the training goes on."""
    init_from: str | None = field(default=None, metadata=READS_FILES)
    """Where the first weights are from: a folder with a GPT-2, Llama, Mistral, Qwen2 or Qwen3 model in
    Hugging Face's format, or a checkpoint of another run, RUN/checkpoints/step-00000040, which
    ``--from RUN@40`` stands for; null = random weights."""
    init_optimizer: bool = field(default=False, metadata=read_unless("train.init_from", None, neutral=False))
    """Take the optimizer's state of that checkpoint, too, and go on after its step: ``num_steps``, learning
    rate and data count on from there. Else the training begins with step 1, with a fresh optimizer."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Everything a launch depends on."""

    name: str
    """Name of the run; the recipe's file name unless it is given."""
    seed: NonNegativeInt
    """Seed of initial weights, data order and dropout."""
    model: ModelConfig
    data: DataConfig
    batch: BatchConfig
    optim: OptimConfig
    train: TrainConfig
    precision: PrecisionConfig
    device: DeviceConfig
    cluster: ClusterConfig
    parallel: ParallelConfig
    architecture: PluginChoice
    executor: PluginChoice
    report: ReportConfig
    run: RunConfig
    site: SiteConfig = field(default_factory=SiteConfig, metadata=OF_READER)
    fusion: FusionConfig = field(default_factory=FusionConfig)
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)
