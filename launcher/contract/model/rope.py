"""The settings of rotary positions beyond their base."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from launcher.typed.scalars import PositiveFloat, Range, Size


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's lower rotary frequencies, for a context longer than the one first trained for. The names
    are those of ``rope_scaling`` in a ``config.json``.

    Source: Llama 3.1's model code, ``apply_scaling``.
    """

    rope_type: Literal["llama3"] = "llama3"
    """How the frequencies are lowered; there is one way."""
    factor: Annotated[float, Range(minimum=1)]
    """What the lowest frequencies are divided by."""
    low_freq_factor: PositiveFloat
    """Waves longer than original_max_position_embeddings / low_freq_factor are the lowest frequencies."""
    high_freq_factor: PositiveFloat
    """Waves shorter than original_max_position_embeddings / high_freq_factor stay as they are; between the
    two lengths the frequencies are interpolated. Above ``low_freq_factor``."""
    original_max_position_embeddings: Size
    """Tokens of the context that the model was first trained for."""
