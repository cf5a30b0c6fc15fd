"""A model as its layers: parameters, operations, and what each keeps and gives on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod


@dataclass(frozen=True, kw_only=True)
class TensorShape:
    """One tensor of what a layer gives to the next."""

    shape: tuple[int, ...]
    """Without the batch dim."""
    dtype: str | None
    """torch's name of a format without gradients, such as ``int64``; None: the compute format."""
    is_shared: bool = False
    """Whether it has no batch dim: one tensor for all samples of a microbatch."""


@dataclass(frozen=True, kw_only=True)
class ParameterShape:
    """One parameter, whole."""

    name: str
    """Global name, the same under every layout, such as ``layers.3.attention.q.weight``; in a `LayerShape` of
    ``layers`` without ``layers.3.``, so that equal layers are equal."""
    shape: tuple[int, ...]
    is_trained: bool = True
    is_split: bool = False
    """Whether tensor-parallel ranks hold different parts of it."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One layer of the model, whole (before any split), per sample."""

    name: str
    num_parameters: int
    """All parameters."""
    num_replicated_parameters: int
    """Those that every tensor-parallel rank holds whole (norms, row-split biases)."""
    num_region_parameters: int = 0
    """Of the replicated ones, those that are used inside a split region (norms of queries and keys): each
    rank has the gradient of its own heads alone."""
    parameters: tuple[ParameterShape, ...] = ()
    """All of them by name."""
    forward_flops: float
    """Floating-point operations of one sample's forward (a multiply-add counts 2)."""
    kept_elements: int = 0
    """Elements kept for the backward in the compute format, split by tensor parallelism."""
    kept_replicated_elements: int = 0
    """Elements kept in the compute format that are whole on every tensor-parallel rank unless
    sequence parallelism splits them."""
    output_elements: int
    """Elements of the output that the next layer receives."""
    output_shape: tuple[int, ...]
    """Shape of one sample's output, without the batch dim."""
    output_tensors: tuple[TensorShape, ...] = ()
    """What the output consists of, where it is not one tensor in the compute format. It is then counted as
    the message that holds it between two stages."""
    num_fp32_parameters: int = 0
    """Parameters that stay in fp32 whatever the compute format."""
    num_frozen_parameters: int = 0
    """Of all parameters, those that are not trained."""
    has_backward: bool = True
    """Whether a gradient reaches it; False where nothing is trained up to it."""
    backward_flops: float | None = None
    """Operations of one sample's backward; None: twice the forward's, as where all is trained."""
    kept_gathered_elements: int = 0
    """Elements kept in the compute format that enter a split region: whole on every tensor-parallel rank,
    unless sequence parallelism keeps them in parts and gathers them again."""
    kept_replicated_bytes: int = 0
    """Bytes kept whatever the format (dropout masks, one byte an element), whole on every tensor-parallel
    rank unless sequence parallelism splits them."""
    kept_fp32_elements: int = 0
    """Elements kept in fp32 whatever the compute format, split by tensor parallelism."""
    kept_replicated_fp32_elements: int = 0
    """Elements kept in fp32, whole on every tensor-parallel rank unless sequence parallelism splits them."""
    weight_flops: float = 0.0
    """Of one sample's backward, the operations that a split backward leaves to the weight gradients;
    0 where the layer cannot be split and its backward runs whole."""
    selective: LayerShape | None = None
    """The same layer under selective recomputation, which keeps less; None where it has no such form."""
    again_flops: float = 0.0
    """In such a form, the operations of the matmuls that are computed again."""

    def num_local_frozen_parameters(self, tp: int) -> int:
        """Those that are not trained on each of ``tp`` tensor-parallel ranks."""
        split = sum(prod(each.shape) for each in self.parameters if each.is_split and not each.is_trained)
        return self.num_frozen_parameters - split + -(-split // tp)

    @property
    def num_trained_parameters(self) -> int:
        """Of all parameters, those that have a gradient and optimizer states."""
        return self.num_parameters - self.num_frozen_parameters


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model as a chain: prologue (embedding), layers, epilogue (head and loss)."""

    family: str
    layers: tuple[LayerShape, ...]
    prologue: LayerShape | None
    """Goes with the first stage."""
    epilogue: LayerShape | None
    """Goes with the last stage."""
    num_tied_parameters: int
    """Parameters of the epilogue that are the prologue's; on another stage they are a second copy."""
    num_mask_elements: int = 0
    """Elements of a table in the compute format that each rank holds once, for all layers: the mask of a
    sliding window."""
    num_input_ids: int | None = None
    """Rows of the table in which a user's own model looks its inputs up; None: it has none, or the family
    tells."""
    cut_at: int | None = None
    """The last layer that passes no gradient on to parameters that require one; None: there is none."""
    single_sample: str | None = None
    """The first layer of a user's own model that fails on two samples at once, and its error; None: none."""

    @cached_property
    def parts(self) -> list[LayerShape]:
        """All that it consists of, in order."""
        return [part for part in (self.prologue, *self.layers, self.epilogue) if part]

    @cached_property
    def parameters(self) -> tuple[ParameterShape, ...]:
        """All parameters under their global names, tied ones once."""
        return self.parameters_of(range(len(self.layers)), self.prologue, self.epilogue)

    def parameters_of(self, layers: Iterable[int], *ends: LayerShape | None) -> tuple[ParameterShape, ...]:
        """Those of some layers and ends, under their global names, tied ones once."""
        found = [
            replace(each, name=f"layers.{index}.{each.name}")
            for index in layers
            for each in self.layers[index].parameters
        ]
        found += [each for end in ends if end for each in end.parameters]
        return tuple({each.name: each for each in found}.values())

    @cached_property
    def num_parameters(self) -> int:
        """Parameters of the whole model, tied ones counted once."""
        return sum(part.num_parameters for part in self.parts) - self.num_tied_parameters

    @property
    def num_fp32_parameters(self) -> int:
        """Those that stay in fp32 whatever the compute format."""
        return sum(part.num_fp32_parameters for part in self.parts)

    @cached_property
    def num_trained_parameters(self) -> int:
        """Of its parameters, those that are trained."""
        frozen = sum(part.num_frozen_parameters for part in self.parts)
        return self.num_parameters - frozen + self.num_frozen_tied_parameters

    @property
    def num_frozen_tied_parameters(self) -> int:
        """Tied parameters, if they are not trained: each end counts them as frozen."""
        first = self.prologue.parameters[0] if self.prologue and self.prologue.parameters else None
        return 0 if first is None or first.is_trained else self.num_tied_parameters


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is measured of a user's own model and data."""

    model: ModelShape | None
    """None where the model is not the user's own."""
    num_samples: int | None
    """None where the data are not."""
