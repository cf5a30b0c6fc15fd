"""Finds token ids that a model has no row for, while a batch is still in host memory.

On the device they would be found late or never: on a GPU a wrong index kills the context without saying which
it was, and tensor-parallel ranks take an id that none of them holds for one that another one holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from launcher.base.errors import ConfigError, Fault
from launcher.contract.plan import Plan
from launcher.runtime.api import IGNORE_INDEX


def check_ids(plan: Plan, inputs: Tensor, targets: Tensor, items: Sequence[int]) -> None:
    """Checks a microbatch against the vocabulary of the model; of a user's own one against the table that it
    looks its inputs up in, where it does.

    Shapes: ``inputs`` and ``targets`` [micro, ...], of any format, or empty; ``items``: number of each sample
    in the dataset.

    Raises:
        ConfigError: with the first wrong input and the first wrong target.
    """
    model = plan.config.model
    num_input_ids = plan.num_input_ids or model.vocab_size
    faults = []
    for what, values, limit in (("input", inputs, num_input_ids), ("target", targets, model.vocab_size)):
        if limit is None or (place := _outside(values, limit, allows_ignored=what == "target")) is None:
            continue
        row, *position = place
        where = position[0] if len(position) == 1 else tuple(position)
        rule = (
            f"item {items[row]} of the data has the {what} {int(values[tuple(place)])} at position {where}, "
            f"and ids are 0 to {limit - 1}"
        )
        ignored = f"; targets of {IGNORE_INDEX} are left out" if what == "target" else ""
        if model.vocab_size is None:
            fix = "Give the model's table more rows, or correct the data."
            faults.append(Fault("model.target", model.target, rule, fix))
        else:
            fix = f"Set a larger model.vocab_size, or correct the data{ignored}."
            faults.append(Fault("model.vocab_size", model.vocab_size, rule, fix))
    if faults:
        raise ConfigError(faults)


def _outside(values: Tensor, limit: int, *, allows_ignored: bool) -> list[int] | None:
    """The place of the first id that is not in 0 .. limit - 1; None where there is none."""
    if values.is_floating_point() or not values.numel():
        return None
    values = values.long()
    low, high = values.aminmax()
    if low >= 0 and high < limit:
        return None
    wrong = (values < 0) | (values >= limit)
    if allows_ignored:
        wrong &= values != IGNORE_INDEX
    places: list[list[int]] = wrong.nonzero().tolist()
    return places[0] if places else None
