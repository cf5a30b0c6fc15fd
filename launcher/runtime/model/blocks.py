"""The parts of a decoder-only transformer of the GPT-2 and Llama families."""

from __future__ import annotations

from functools import partial
from math import tau

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher.contract.config import ModelConfig
from launcher.contract.model.rope import RopeScaling
from launcher.contract.model.sizes import Sizes
from launcher.runtime.api import DTYPES, RankContext
from launcher.runtime.data.microbatches import Microbatch
from launcher.runtime.model.layers import Layers
from launcher.runtime.model.randomness import dropout, token_seeds
from launcher.runtime.model.selective_recompute import checkpoint_without_output, discarding_output


class Norm(nn.Module):
    """LayerNorm (gpt) or RMSNorm (llama), computed in fp32. ``recomputes``: again in the backward.
    ``is_in_region``: of values that tensor parallelism splits."""

    def __init__(
        self, ctx: RankContext, name: str, size: int, *, recomputes: bool = False, is_in_region: bool = False
    ) -> None:
        super().__init__()
        self.recomputes = recomputes
        model = ctx.config.model
        self.eps = model.norm_eps
        self.weight = ctx.layers.replicated(f"{name}.weight", size, is_in_region=is_in_region)
        self.bias = ctx.layers.replicated(f"{name}.bias", size) if model.family == "gpt" else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]."""
        inputs = (x, self.weight) if self.bias is None else (x, self.weight, self.bias)
        return checkpoint_without_output(self._normalised, *inputs, is_enabled=self.recomputes)

    def _normalised(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is None:
            return functional.rms_norm(x.float(), weight.shape, weight.float(), self.eps).to(x.dtype)
        out = functional.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), self.eps)
        return out.to(x.dtype)


class Dropout(nn.Module):
    """Drops elements by their global position, so that every layout drops the same."""

    def __init__(self, ctx: RankContext, site: int) -> None:
        super().__init__()
        self.p, self.seed, self.site = ctx.config.model.dropout, ctx.config.seed, site
        self.positions = ctx.layers.positions(ctx.config.batch.seq_length)

    def seeds(self, batch: Microbatch) -> Tensor | None:
        """A seed for each token of a microbatch; None: nothing is dropped. Computed outside of compiled code:
        no compiler can follow the hash of a name."""
        if self.p == 0 or not self.training:
            return None
        return token_seeds(batch.samples, self.positions, seed=self.seed, step=batch.step, site=self.site)

    def forward(self, x: Tensor, seeds: Tensor | None) -> Tensor:
        """x [batch, seq(local), hidden] -> the same shape. ``seeds``: from `seeds`."""
        return x if seeds is None else dropout(x, self.p, seeds)


class Rotary(nn.Module):
    """Rotates each pair of a head's elements by an angle that grows with the position.

    Source: Su et al., RoFormer (2021), equation 34, with pairs (i, i + head/2) as in Llama.
    """

    def __init__(self, model: ModelConfig, sizes: Sizes, device: torch.device) -> None:
        super().__init__()
        pairs = torch.arange(0, sizes.head, 2, device=device, dtype=torch.float32)
        positions = torch.arange(sizes.seq_length, device=device, dtype=torch.float32)
        frequencies: Tensor = model.rope_theta ** (-pairs / sizes.head)
        if model.rope_scaling is not None:
            frequencies = _lowered(frequencies, model.rope_scaling)
        angles = torch.outer(positions, frequencies)
        self.cosine, self.sine = angles.cos(), angles.sin()

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, heads, seq, head] -> the same shape."""
        first, second = x.float().chunk(2, dim=-1)
        rotated = (first * self.cosine - second * self.sine, second * self.cosine + first * self.sine)
        return torch.cat(rotated, dim=-1).to(x.dtype)


def _lowered(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's frequencies: the lowest are divided, the highest stay, the others lie between."""
    waves = scaling.original_max_position_embeddings * frequencies / tau  # that the first context held
    kept = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def window_mask(ctx: RankContext, sizes: Sizes) -> Tensor | None:
    """What a sliding window adds to the scores [seq, seq]: 0 where a token attends, else -inf. None: there is
    no window, or one that leaves nothing out. One for all layers: their backwards keep it."""
    if sizes.window is None:
        return None
    dtype, shape = DTYPES[ctx.config.precision.compute], (sizes.seq_length, sizes.seq_length)
    before = torch.full(shape, -torch.inf, dtype=dtype, device=ctx.device).tril(-sizes.window)
    return before + future_mask(before)


def future_mask(like: Tensor) -> Tensor:
    """[..., seq, seq] -> what causal attention adds to such scores [seq, seq]."""
    return torch.full(like.shape[-2:], -torch.inf, dtype=like.dtype, device=like.device).triu(1)


class Attention(nn.Module):
    """Causal attention over this rank's heads; several query heads may share a key and value head.

    ``mask``: from `window_mask`. ``recomputes``: norms of queries and keys, and the scores, are computed
    again in the backward, the latter unless a fused kernel saves none.
    """

    def __init__(
        self,
        ctx: RankContext,
        name: str,
        sizes: Sizes,
        rotary: Rotary | None,
        mask: Tensor | None,
        *,
        recomputes: bool,
    ) -> None:
        super().__init__()
        layers, model = ctx.layers, ctx.config.model
        biased = "all" if rotary is None else model.attention_bias
        outs = {"q": sizes.queries, "k": sizes.keys, "v": sizes.keys}
        self.inputs = layers.column(name, sizes.hidden, outs, bias=biased != "none")
        self.output = layers.row(f"{name}.out", sizes.queries, sizes.hidden, bias=biased == "all")
        self.norms: nn.ModuleList | None = None
        if model.qk_norm:
            self.norms = nn.ModuleList(
                Norm(ctx, f"{name}.{part}_norm", sizes.head, recomputes=recomputes, is_in_region=True)
                for part in "qk"
            )
        self.rotary, self.mask = rotary, mask
        self.head_size = sizes.head
        self.num_sharing = sizes.num_heads // sizes.num_kv_heads
        self.is_fused, self.recomputes = ctx.config.fusion.attention == "fused", recomputes

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, seq(local), hidden] -> the same shape."""
        with discarding_output(x):
            parts = self.inputs(x)
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in parts)
        if self.norms is not None:
            q, k = (norm(part) for norm, part in zip(self.norms, (q, k), strict=True))
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        if self.is_fused:
            mixed = self._fused(q, k, v)
        else:
            attend = partial(plain_attention, mask=self.mask)
            mixed = checkpoint_without_output(attend, q, k, v, is_enabled=self.recomputes)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out

    def _fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attention = functional.scaled_dot_product_attention
        if self.mask is None:
            return attention(q, k, v, is_causal=True, enable_gqa=self.num_sharing > 1)
        if self.num_sharing > 1:  # no kernel takes shared heads beside a mask without keeping the scores
            k, v = (part.repeat_interleave(self.num_sharing, dim=1) for part in (k, v))
        return attention(q, k, v, attn_mask=self.mask)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Causal attention by its formula, softmax(q k^T / sqrt(head)) v, which saves the attention weights.

    Shapes: q [batch, heads, seq, head]; k and v the same, or with fewer heads that groups of q share;
    ``mask`` [seq, seq], added to the scores; None: the causal one.
    """
    batch, heads, length, head = q.shape
    kv_heads = k.shape[1]
    rows = q.reshape(batch, kv_heads, -1, head)  # the queries of a group end to end: k is not repeated
    scores = (rows @ k.transpose(-2, -1) * head**-0.5).view(batch, kv_heads, -1, length, length)
    weights = (scores + (future_mask(scores) if mask is None else mask)).softmax(-1)
    mixed: Tensor = weights.flatten(2, 3) @ v
    return mixed.view(batch, heads, length, head)


class MLP(nn.Module):
    """GELU (gpt) or SwiGLU (llama) between the up and the down projection. ``recomputes``: the activation is
    computed again in the backward."""

    def __init__(self, layers: Layers, name: str, sizes: Sizes, *, is_gated: bool, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.activation = _swiglu if is_gated else _gelu
        outs = {"gate": sizes.ffn, "up": sizes.ffn} if is_gated else {"up": sizes.ffn}
        self.inputs = layers.column(name, sizes.hidden, outs, bias=not is_gated)
        self.output = layers.row(f"{name}.down", sizes.ffn, sizes.hidden, bias=not is_gated)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, seq(local), hidden] -> the same shape."""
        with discarding_output(x):
            wide = self.inputs(x)
        active = checkpoint_without_output(self.activation, *wide, is_enabled=self.recomputes)
        with discarding_output(active):
            out: Tensor = self.output(active)
        return out


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


class Block(nn.Module):
    """One layer: attention and MLP, each after a norm and added to the residual stream. ``recomputes``: by
    selective recomputation."""

    def __init__(
        self,
        ctx: RankContext,
        index: int,
        sizes: Sizes,
        rotary: Rotary | None,
        mask: Tensor | None,
        *,
        recomputes: bool,
    ) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.attention_norm = Norm(ctx, f"{name}.attention_norm", sizes.hidden, recomputes=recomputes)
        self.attention = Attention(ctx, f"{name}.attention", sizes, rotary, mask, recomputes=recomputes)
        self.attention_dropout = Dropout(ctx, site=1 + 2 * index)
        self.mlp_norm = Norm(ctx, f"{name}.mlp_norm", sizes.hidden, recomputes=recomputes)
        self.mlp = MLP(ctx.layers, f"{name}.mlp", sizes, is_gated=rotary is not None, recomputes=recomputes)
        self.mlp_dropout = Dropout(ctx, site=2 + 2 * index)

    def seeds(self, batch: Microbatch) -> tuple[Tensor | None, Tensor | None]:
        """The seeds of its two dropouts for a microbatch."""
        return self.attention_dropout.seeds(batch), self.mlp_dropout.seeds(batch)

    def forward(self, x: Tensor, attention_seeds: Tensor | None, mlp_seeds: Tensor | None) -> Tensor:
        """x [batch, seq(local), hidden] -> the same shape. The others: from `seeds`."""
        x = x + self.attention_dropout(self.attention(self.attention_norm(x)), attention_seeds)
        out: Tensor = x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), mlp_seeds)
        return out
