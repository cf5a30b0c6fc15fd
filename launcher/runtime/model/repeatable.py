"""Whether a user's layer computes the same under every layout.

Recomputation runs a forward twice, with other microbatches it runs more or less often, and a checkpoint
holds the weights and the optimizer's state alone. So a layer is run a second time on the same input: it must
give the same, change nothing of its own, and draw no random numbers. What it makes in its first run and
keeps, such as a table of positions, does no harm.

Which samples share a microbatch depends on the layout, too: a sample must give the same beside another one.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_TOLERANCE = 1e-4
"""Of the largest element: sums of one layer may run in another order in its second run."""
_OF_TORCH = frozenset(vars(nn.Module()))


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors that a layer takes or gives: one, or several in a tuple."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def detached(given: Any, *, requires_grad: bool = True) -> Any:
    """What a layer is given, as leaves of a graph of its own."""
    leaves = tuple(tensor.detach() for tensor in tensors_of(given))
    for leaf in leaves:
        leaf.requires_grad_(requires_grad and leaf.is_floating_point())
    return leaves if isinstance(given, tuple) else leaves[0]


def backward(output: Any) -> None:
    """The backward of a layer's output, where something needs a gradient."""
    if roots := [tensor for tensor in tensors_of(output) if tensor.requires_grad]:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def generator_states() -> dict[str, bytes]:
    """The states of the generators that all code of a process shares, by who has them."""
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "Python's random": pickle.dumps(random.getstate()),
        "NumPy": pickle.dumps(np.random.get_state()),
    }


def differences(layer: nn.Module, given: Any, output: Any, generators: dict[str, bytes]) -> Iterator[str]:
    """What a second run of the layer does otherwise than the first one, each as the end of a sentence.

    ``output``: of the first run, whose backward is done; ``generators``: their states before it.
    """
    before = _state(layer)
    again = layer(detached(given))
    backward(again)
    after = _state(layer)
    drawn = [name for name, state in generator_states().items() if state != generators[name]]
    changed = [name for name, value in after.items() if not _is_same(value, before.get(name))]
    if drawn:
        yield f"draws random numbers from {drawn[0]}, other ones on every rank and when it is recomputed"
    if changed:
        yield (
            f"changes its {changed[0]} whenever it runs: the result would depend on microbatches, "
            "recomputation and layout, and no checkpoint holds it"
        )
    if not (drawn or changed) and not _is_close(again, output):
        yield "gives another result when it runs again on the same input, as for recomputation"


def beside(layer: nn.Module, given: Any, output: Any, other: Any) -> tuple[Any, bool]:
    """The layer's output for another sample, and whether one of the two changes when both run together.

    ``other``: the other sample's input; None where a layer before took no two samples. What the layer raises
    goes on.
    """
    if other is None:
        return None, False
    pairs = zip(tensors_of(given), tensors_of(other), strict=True)
    both = tuple(torch.cat((one, two)) if one.shape[:1] == (1,) else one for one, two in pairs)
    with torch.no_grad():
        alone = layer(other)
        found = tensors_of(layer(both if isinstance(given, tuple) else both[0]))
    expected = [tensors_of(output), tensors_of(alone)]
    first = [a[: len(b)] if b.dim() else a for a, b in zip(found, expected[0], strict=True)]
    second = [a[-len(b) :] if b.dim() else a for a, b in zip(found, expected[1], strict=True)]
    return alone, not (_is_close(first, output) and _is_close(second, alone))


def _state(layer: nn.Module) -> dict[str, Any]:
    """Copies of all that the layer holds and can be compared: tensors, numbers, texts and generators."""
    found: dict[str, Any] = {}
    for name, tensor in chain(layer.named_parameters(), layer.named_buffers()):
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        found[f"{kind} {name}"] = tensor.detach().clone()
    for path, module in layer.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
        for name, value in own.items():
            label = f"attribute {path}.{name}" if path else f"attribute {name}"
            for index, leaf in enumerate(tree_leaves(value)):
                if (kept := _copied(leaf)) is not None:
                    found[f"{label}{f'[{index}]' if index else ''}"] = kept
    return found


def _copied(value: Any) -> Any:
    """A copy to compare; None of what has nothing to compare."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator | np.random.RandomState | random.Random):
        return pickle.dumps(value)
    return value if isinstance(value, bool | int | float | str) else None


def _is_same(one: Any, other: Any) -> bool:
    """Bit by bit: a NaN is equal to itself."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return type(one) is type(other) and bool(one == other)
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _is_close(one: Any, other: Any) -> bool:
    found, expected = ([tensor.detach().double() for tensor in tensors_of(each)] for each in (one, other))
    return [tensor.shape for tensor in found] == [tensor.shape for tensor in expected] and all(
        torch.allclose(a, b, rtol=0, atol=_TOLERANCE * _largest(b), equal_nan=True)
        for a, b in zip(found, expected, strict=True)
    )


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0
