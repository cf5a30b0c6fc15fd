"""global_size = micro_size * num_microbatches * dp: two or three unknowns from what was given."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from launcher.config.schema import BatchConfig
from launcher.errors import Fault
from launcher.plan.arithmetic import multiples_around


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """Sizes that satisfy the equation."""

    global_size: int
    micro_size: int
    num_microbatches: int
    note: str = ""
    """Says which sizes nobody gave."""


def solve(batch: BatchConfig, dp: int) -> BatchSizes | Fault:
    """The three sizes, or why there are none.

    A ``micro_size`` that neither is given nor follows is 1; then ``num_microbatches`` likewise.
    """
    total, micro, count = batch.global_size, batch.micro_size, batch.num_microbatches
    if total is None and micro is None and count is None:
        rule = "one of global_size, micro_size and num_microbatches is needed"
        return Fault("batch.global_size", "null", rule, f"Set batch.global_size={dp}.")
    assumed = []
    if micro is None and (total is None or count is None):
        micro = 1
        assumed.append("batch.micro_size")
    if count is None and total is None:
        count = 1
        assumed.append("batch.num_microbatches")
    note = f"{' and '.join(assumed)}: not given, taken as 1." if assumed else ""
    if micro is None and total is not None and count is not None:
        micro = total // (count * dp)
        fault = _division_fault(total, {"num_microbatches": count, "dp": dp}, "micro_size")
    elif count is None and total is not None and micro is not None:
        count = total // (micro * dp)
        fault = _division_fault(total, {"micro_size": micro, "dp": dp}, "num_microbatches")
    else:
        assert micro is not None, "a micro size that does not follow is assumed"
        assert count is not None, "a count that does not follow is assumed"
        total = micro * count * dp if total is None else total
        fault = _product_fault(total, micro, count, dp)
    return fault or BatchSizes(global_size=total, micro_size=micro, num_microbatches=count, note=note)


def _division_fault(total: int, factors: dict[str, int], wanted: str) -> Fault | None:
    unit = prod(factors.values())
    if total % unit == 0:
        return None
    arithmetic = f"{' * '.join(factors)} = {' * '.join(map(str, factors.values()))} = {unit}"
    rule = f"must be a multiple of {arithmetic}; {total}/{unit} is not whole"
    offers = [f"{size} ({wanted} {size // unit})" for size in multiples_around(total, unit)]
    return Fault("batch.global_size", total, rule, f"Set batch.global_size={' or '.join(offers)}.")


def _product_fault(total: int, micro: int, count: int, dp: int) -> Fault | None:
    product = micro * count * dp
    if product == total:
        return None
    rule = f"must be micro_size * num_microbatches * dp = {micro} * {count} * {dp} = {product}"
    fix = f"Set batch.global_size={product}, or leave one of the three sizes null."
    return Fault("batch.global_size", total, rule, fix)
