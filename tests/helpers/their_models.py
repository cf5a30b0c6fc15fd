"""Models that the transformers library makes, saves, computes and trains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from launcher.contract.config import LaunchConfig
from launcher.contract.optim.rates import learning_rate
from launcher_plugins.optimizers.adamw import AdamWConfig

Batches = Sequence[tuple[Tensor, Tensor]]
"""Inputs and targets of the microbatches of a step."""


def saved_by_them(folder: Path, entries: dict[str, Any], *, std: float = 0.4, **saved: Any) -> Path:
    """Random weights, saved beside the file as it is given."""
    torch.manual_seed(3)
    given = json.loads(json.dumps(entries))
    made: Any = AutoModelForCausalLM
    model = made.from_config(AutoConfig.for_model(**given), dtype=torch.float32)
    for param in model.parameters():
        nn.init.normal_(param, std=std)
    model.save_pretrained(folder, **saved)
    (folder / "config.json").write_text(json.dumps(entries))
    return folder


def their_logits(folder: Path, tokens: Tensor) -> Tensor:
    """What a folder's model makes of tokens [batch, seq]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits: Tensor = model(tokens).logits
    return logits


def trained_by_them(
    folder: Path, steps: Sequence[Batches], config: LaunchConfig
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of some steps with torch's AdamW, and the weights after them by their names."""
    optim, own, losses = config.optim, config.optim.settings(AdamWConfig), []
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # in eval mode: no dropout
    params = list(model.parameters())
    decayed = [param for param in params if param.dim() > 1]
    others = [param for param in params if param.dim() <= 1]
    groups = [
        {"params": decayed, "weight_decay": optim.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=own.betas, eps=own.eps)
    for step, batches in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(optim, step, config.train.num_steps)
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        loss: Any = nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(params, optim.clip_norm or torch.inf)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}
