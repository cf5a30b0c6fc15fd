"""A user's own model and data: a small convolutional network on scikit-learn's handwritten digits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional


@dataclass
class DigitsModel:
    """Layers in order, and the loss of what the last one gives."""

    layers: list[nn.Module]

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Scores [batch, 10] and classes [batch] -> sum of the cross-entropies."""
        return functional.cross_entropy(output, targets, reduction="sum")


def build(channels: int = 8) -> DigitsModel:
    """Images [batch, 1, 8, 8] -> scores [batch, 10]."""
    return DigitsModel(
        layers=[
            nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.ReLU()),
            nn.Sequential(nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Flatten(), nn.Linear(32 * channels, 32), nn.ReLU()),
            nn.Linear(32, 10),
        ]
    )


class Digits:
    """1,797 images with their classes."""

    def __init__(self) -> None:
        images, classes = load_digits(return_X_y=True)
        self._images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        self._classes = torch.tensor(classes, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._images[index], self._classes[index]
