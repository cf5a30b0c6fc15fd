"""Layers of a user's own that keep something, count, draw, or take and give more than one tensor."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

VOCAB, WIDTH, LENGTH = 16, 16, 8


class Copy:
    """Says after each token the same token."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return tokens, tokens.clone()


class Beyond(Copy):
    """Sixteen of them, but of item ``wrong`` token 3 is ``token``."""

    def __init__(self, wrong: int = 0, token: int = 300, where: str = "inputs") -> None:
        self.wrong, self.token, self.where = wrong, token, where

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().__getitem__(index)
        if index == self.wrong:
            (inputs if self.where == "inputs" else targets)[3] = self.token
        return inputs, targets


class LazyRotary(nn.Module):
    """Keeps its table from the first forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cosine", None, persistent=False)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.cosine is None:
            self.cosine = torch.arange(x.shape[1]).float().cos()[:, None]
        return self.linear(x * self.cosine.to(x.dtype))


class LazyMask(nn.Module):
    """Registers its buffer in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.linspace(0.5, 1, LENGTH)[:, None], persistent=False)
        return x * self.mask.to(x.dtype)


class GivesFour(nn.Module):
    """x [batch, seq, width] -> x, a gate of it, whole numbers of each sample, and a table for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x, self.gate(x).sigmoid(), x[..., 0] > 0, torch.arange(LENGTH, dtype=x.dtype)[:, None]


class TakesFour(nn.Module):
    """Its parts -> x [batch, seq, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, parts: tuple[Tensor, ...]) -> Tensor:
        x, gate, is_positive, table = parts
        return self.linear(x * gate + is_positive[..., None].to(x.dtype) + 0.01 * table)


class Counting(nn.Module):
    """Warms up with the number of its forwards."""

    def __init__(self, kind: str = "attribute") -> None:
        super().__init__()
        self.linear, self.kind, self.num_seen = nn.Linear(WIDTH, WIDTH), kind, 0
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "buffer":
            self.steps += 1
            return self.linear(x) * (self.steps / 100)
        self.num_seen += 1
        return self.linear(x) * (self.num_seen / 100)


class ExpertBias(nn.Module):
    """A bias that is moved after the backward, as where it balances experts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        if out.requires_grad:
            out.register_hook(self.move)
        return out + self.bias.clone()

    def move(self, grad: Tensor) -> None:
        self.bias.sub_(0.001 * grad.sign().sum((0, 1)))


_NUM_FORWARDS: list[int] = []


class Alternating(nn.Module):
    """Counts where nobody looks."""

    def forward(self, x: Tensor) -> Tensor:
        _NUM_FORWARDS.append(1)
        return x * (1 + len(_NUM_FORWARDS) % 2)


class Drop(nn.Module):
    """Draws its numbers elsewhere than torch."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source, self.own = source, torch.Generator().manual_seed(0)
        self.numbers, self.shared = np.random.default_rng(0), {"generator": random.Random(0)}

    def forward(self, x: Tensor) -> Tensor:
        draw: dict[str, Callable[[], Any]] = {
            "python": random.random,
            "numpy": np.random.rand,
            "torch generator": lambda: torch.rand((), generator=self.own),
            "numpy generator": self.numbers.random,
            "python generator": self.shared["generator"].random,
        }
        return x * float(draw[self.source]() < 0.999999)  # drops next to never: the result tells nothing


class Centred(nn.Module):
    """Takes the mean of the microbatch off."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Summed(nn.Module):
    """Adds to each sample those before it in the microbatch."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(0)


class OneByOne(nn.Module):
    """Takes one sample at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        (sample,) = x
        return self.linear(sample)[None]


class Positions(nn.Module):
    """A table of positions in a buffer, and a scale that may be kept in fp32."""

    def __init__(self, *, keeps_scale: bool) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(512.0))
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), Scale()
        self.scale.keep_in_fp32 = keeps_scale

    def forward(self, x: Tensor) -> Tensor:
        angles: Tensor = self.positions[-LENGTH:, None].cos()
        return self.scale(self.linear(x + angles.to(x.dtype)))


class Uncast(nn.Module):
    """Adds a table in fp32 to its input, whatever the format of that."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(LENGTH).float()[:, None])
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.table)


class Scale(nn.Module):
    """x [..., width] times a weight that is next to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 1 + 2.0**-12))

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * self.weight).to(x.dtype)


class Made:
    """Eight layers that do no harm, or six of them; the fourth may be replaced by one of another kind."""

    def __init__(self, kind: str = "harmless") -> None:
        encoder = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.layers = [
            nn.Embedding(VOCAB, WIDTH),
            LazyRotary(),
            LazyMask(),
            GivesFour(),
            TakesFour(),
            encoder,
            nn.Tanh(),
            nn.Linear(WIDTH, VOCAB),
        ]
        others: dict[str, Callable[[], nn.Module]] = {
            "counting": Counting,
            "counting buffer": lambda: Counting("buffer"),
            "expert bias": ExpertBias,
            "alternating": Alternating,
            "attention dropout": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True),
            "sequence first": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0),
            "centred": Centred,
            "summed": Summed,
            "one by one": OneByOne,
            "positions": lambda: Positions(keeps_scale=True),
            "buffer of positions": lambda: Positions(keeps_scale=False),
            "uncast": Uncast,
            "recurrent": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
        }
        if kind == "short":
            self.layers[0].requires_grad_(False)
            del self.layers[5], self.layers[1]
        elif kind != "harmless":
            self.layers[3:5] = [others[kind]() if kind in others else Drop(kind), nn.Tanh()]
        if kind == "attention dropout":
            self.layers[3].dropout.p = self.layers[3].dropout1.p = self.layers[3].dropout2.p = 0

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """The sum of the cross-entropies."""
        return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
