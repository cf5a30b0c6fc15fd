"""The sizes of a GPT or Llama model, with every default resolved."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.contract.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of the whole model."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head: int
    """Width of one attention head."""
    ffn: int
    vocab: int
    num_layers: int
    seq_length: int
    positions: int
    """Rows of the table of learned positions."""
    window: int | None
    """Tokens that one attends to at most; None: all before it."""

    @property
    def queries(self) -> int:
        """Width of the queries of all heads."""
        return self.num_heads * self.head

    @property
    def keys(self) -> int:
        """Width of the keys, or of the values, of all heads that have some."""
        return self.num_kv_heads * self.head

    @staticmethod
    def of(model: ModelConfig, seq_length: int) -> Sizes:
        """The sizes of a GPT or Llama configuration."""
        hidden, heads = _known(model.hidden_size), _known(model.num_heads)
        return Sizes(
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=model.num_kv_heads or heads,
            head=model.head_dim or hidden // heads,
            ffn=model.ffn_size or 4 * hidden,
            vocab=_known(model.vocab_size),
            num_layers=_known(model.num_layers),
            seq_length=seq_length,
            positions=model.max_position_embeddings or seq_length,
            window=biting(model.sliding_window, seq_length),
        )


def biting(window: int | None, seq_length: int) -> int | None:
    """A window that leaves a token of a sample out, else None."""
    return window if window is not None and window < seq_length else None


def _known(size: int | None) -> int:
    assert size is not None, "a plan for a transformer without its sizes"
    return size
