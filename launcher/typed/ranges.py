"""The kinds of numbers that settings are: each a type with its range, which the loader checks."""

from __future__ import annotations

from typing import Annotated

from launcher.typed.read import Range

Count = Annotated[int, Range(minimum=1)]
"""A whole number of at least 1."""
Few = Annotated[int, Range(minimum=1, maximum=10_000)]
"""A whole number from 1 to 10,000, each of which a plan may go through."""
Size = Annotated[int, Range(minimum=1, maximum=10_000_000)]
"""A whole number from 1 to 10,000,000, whose divisors a plan may look for."""
Index = Annotated[int, Range(minimum=0)]
"""A whole number of at least 0."""
Positive = Annotated[float, Range(above=0)]
"""A finite number above 0."""
NonNegative = Annotated[float, Range(minimum=0)]
"""A finite number of at least 0."""
Fraction = Annotated[float, Range(minimum=0, maximum=1)]
"""A finite number from 0 to 1."""
Probability = Annotated[float, Range(minimum=0, below=1)]
"""A finite number from 0 up to, not including, 1."""
