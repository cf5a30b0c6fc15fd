"""What of a training its baseline repeats: the first steps, at the same learning rates."""

from __future__ import annotations

from dataclasses import replace

from launcher.contract.config import LaunchConfig
from launcher.contract.model.checkpoint import baseline_end


def of_baseline(config: LaunchConfig) -> LaunchConfig:
    """The training, ended after `ReportConfig.num_baseline_steps`; the same one where it is no longer.

    The learning rates stay those of the whole training.
    """
    train, optim = config.train, config.optim
    num_steps = min(train.num_steps, baseline_end(config))
    if num_steps == train.num_steps:
        return config
    if optim.decay != "constant" and train.num_steps > optim.warmup_steps:  # else it grows to the end
        optim = replace(optim, decay_steps=optim.decay_steps or train.num_steps)
    return replace(config, train=replace(train, num_steps=num_steps), optim=optim)
