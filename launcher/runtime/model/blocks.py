"""The parts of a decoder-only transformer of the GPT-2 and Llama families."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher.contract.config import ModelConfig
from launcher.runtime.api import DTYPES, GlobalSlice, Layers, RankContext, new_parameter
from launcher.runtime.data.microbatches import Microbatch
from launcher.runtime.model.randomness import DropoutKey, dropout, dropout_rows
from launcher.runtime.model.recompute import light, not_keeping


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of the whole model, every null resolved."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    ffn: int
    vocab: int
    num_layers: int
    seq_length: int

    @property
    def head(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.num_heads

    @staticmethod
    def of(model: ModelConfig, seq_length: int) -> Sizes:
        """The sizes that a GPT or Llama configuration gives."""
        hidden, heads = _known(model.hidden_size), _known(model.num_heads)
        return Sizes(
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=model.num_kv_heads or heads,
            ffn=model.ffn_size or 4 * hidden,
            vocab=_known(model.vocab_size),
            num_layers=_known(model.num_layers),
            seq_length=seq_length,
        )


class Norm(nn.Module):
    """LayerNorm (gpt) or RMSNorm (llama), computed in fp32. ``is_light``: in the backward once again."""

    def __init__(self, ctx: RankContext, name: str, size: int, *, is_light: bool = False) -> None:
        super().__init__()
        self.is_light = is_light
        model = ctx.config.model
        self.eps = model.norm_eps
        self.weight = whole_parameter(ctx, f"{name}.weight", size)
        self.bias = whole_parameter(ctx, f"{name}.bias", size) if model.family == "gpt" else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]."""
        inputs = (x, self.weight) if self.bias is None else (x, self.weight, self.bias)
        return light(self._normalised, *inputs) if self.is_light else self._normalised(*inputs)

    def _normalised(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is None:
            return functional.rms_norm(x.float(), weight.shape, weight.float(), self.eps).to(x.dtype)
        return functional.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), self.eps).to(
            x.dtype
        )


class Dropout(nn.Module):
    """Drops elements by their global position, so that every layout drops the same."""

    def __init__(self, ctx: RankContext, site: int) -> None:
        super().__init__()
        self.p, self.seed, self.site = ctx.config.model.dropout, ctx.config.seed, site
        self.positions = ctx.layers.positions(ctx.config.batch.seq_length)

    def rows(self, batch: Microbatch) -> Tensor | None:
        """What decides for each token of a microbatch; None: nothing is dropped. It hashes names, which no
        compiler could follow, so it is made outside of what is compiled."""
        if self.p == 0 or not self.training:
            return None
        key = DropoutKey(seed=self.seed, step=batch.step, site=self.site)
        return dropout_rows(key, batch.samples, self.positions)

    def forward(self, x: Tensor, rows: Tensor | None) -> Tensor:
        """x [batch, seq(local), hidden] -> the same shape. ``rows``: from `rows`."""
        return x if rows is None else dropout(x, self.p, rows)


class Rotary(nn.Module):
    """Turns each pair of a head's elements by an angle that grows with the position.

    Source: Su et al., RoFormer (2021), equation 34, with pairs (i, i + head/2) as in Llama.
    """

    def __init__(self, theta: float, sizes: Sizes, device: torch.device) -> None:
        super().__init__()
        pairs = torch.arange(0, sizes.head, 2, device=device, dtype=torch.float32)
        positions = torch.arange(sizes.seq_length, device=device, dtype=torch.float32)
        angles = torch.outer(positions, theta ** (-pairs / sizes.head))
        self.cosine, self.sine = angles.cos(), angles.sin()

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, heads, seq, head] -> the same shape."""
        first, second = x.float().chunk(2, dim=-1)
        turned = (first * self.cosine - second * self.sine, second * self.cosine + first * self.sine)
        return torch.cat(turned, dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention over this rank's heads; several query heads may share a key and value head.

    ``is_light``: without one kernel that keeps no scores, they are computed again in the backward.
    """

    def __init__(
        self,
        layers: Layers,
        name: str,
        sizes: Sizes,
        rotary: Rotary | None,
        *,
        is_fused: bool,
        is_light: bool,
    ) -> None:
        super().__init__()
        bias = rotary is None
        keys = sizes.num_kv_heads * sizes.head
        outs = {"q": sizes.hidden, "k": keys, "v": keys}
        self.inputs = layers.column(name, sizes.hidden, outs, bias=bias)
        self.output = layers.row(f"{name}.out", sizes.hidden, sizes.hidden, bias=bias)
        self.rotary = rotary
        self.head_size = sizes.head
        self.is_grouped = sizes.num_kv_heads != sizes.num_heads
        self.is_fused, self.is_light = is_fused, is_light

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, seq(local), hidden] -> the same shape."""
        with not_keeping(x):
            parts = self.inputs(x)
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in parts)
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        if self.is_fused:
            mixed = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=self.is_grouped
            )
        else:
            mixed = light(plain_attention, q, k, v) if self.is_light else plain_attention(q, k, v)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as its formula has it: softmax(q k^T / sqrt(head)) v, with the weights kept.

    Shapes: q [batch, heads, seq, head]; k and v the same, or with fewer heads that groups of q share.
    """
    batch, heads, length, head = q.shape
    kv_heads = k.shape[1]
    rows = q.reshape(batch, kv_heads, -1, head)  # the queries of a group end to end: k is not repeated
    scores = (rows @ k.transpose(-2, -1) * head**-0.5).view(batch, kv_heads, -1, length, length)
    future = torch.full((length, length), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    weights = (scores + future).softmax(-1)
    mixed: Tensor = weights.flatten(2, 3) @ v
    return mixed.view(batch, heads, length, head)


class MLP(nn.Module):
    """GELU (gpt) or SwiGLU (llama) between a wide and a narrow linear. ``is_light``: the activation is
    computed again in the backward."""

    def __init__(self, layers: Layers, name: str, sizes: Sizes, *, is_gated: bool, is_light: bool) -> None:
        super().__init__()
        self.is_light = is_light
        self.activation = _swiglu if is_gated else _gelu
        outs = {"gate": sizes.ffn, "up": sizes.ffn} if is_gated else {"up": sizes.ffn}
        self.inputs = layers.column(name, sizes.hidden, outs, bias=not is_gated)
        self.output = layers.row(f"{name}.down", sizes.ffn, sizes.hidden, bias=not is_gated)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, seq(local), hidden] -> the same shape."""
        with not_keeping(x):
            wide = self.inputs(x)
        active = light(self.activation, *wide) if self.is_light else self.activation(*wide)
        with not_keeping(active):
            out: Tensor = self.output(active)
        return out


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


class Block(nn.Module):
    """One layer: attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(
        self,
        ctx: RankContext,
        index: int,
        sizes: Sizes,
        rotary: Rotary | None,
        *,
        recomputes_light: bool,
    ) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.attention_norm = Norm(ctx, f"{name}.attention_norm", sizes.hidden, is_light=recomputes_light)
        is_fused = ctx.config.fusion.attention == "fused"
        self.attention = Attention(
            ctx.layers, f"{name}.attention", sizes, rotary, is_fused=is_fused, is_light=recomputes_light
        )
        self.attention_dropout = Dropout(ctx, site=1 + 2 * index)
        self.mlp_norm = Norm(ctx, f"{name}.mlp_norm", sizes.hidden, is_light=recomputes_light)
        self.mlp = MLP(
            ctx.layers, f"{name}.mlp", sizes, is_gated=rotary is not None, is_light=recomputes_light
        )
        self.mlp_dropout = Dropout(ctx, site=2 + 2 * index)

    def rows(self, batch: Microbatch) -> tuple[Tensor | None, Tensor | None]:
        """What its dropouts go by in a microbatch."""
        return self.attention_dropout.rows(batch), self.mlp_dropout.rows(batch)

    def forward(self, x: Tensor, attention_rows: Tensor | None, mlp_rows: Tensor | None) -> Tensor:
        """x [batch, seq(local), hidden] -> the same shape. The others: from `rows`."""
        x = x + self.attention_dropout(self.attention(self.attention_norm(x)), attention_rows)
        out: Tensor = x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), mlp_rows)
        return out


def whole_parameter(ctx: RankContext, name: str, *shape: int) -> nn.Parameter:
    """A parameter that every tensor-parallel rank holds whole."""
    where = GlobalSlice(
        name=name,
        shape=shape,
        offset=(0,) * len(shape),
        is_sharded=False,
        is_summed_over_tp=ctx.layers.splits_sequence,
    )
    return new_parameter(where, shape, ctx.device, DTYPES[ctx.config.precision.compute])


def _known(size: int | None) -> int:
    assert size is not None, "a plan for a transformer without its sizes"
    return size
