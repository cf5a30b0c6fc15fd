"""Folders in Hugging Face's format: their files, and whether they are there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from launcher.config.schema import LaunchConfig
from launcher.errors import Fault

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
"""All tensors, or a list of several such files; the sizes."""


def initial_weights_faults(config: LaunchConfig) -> Iterator[Fault]:
    """A fault of a model to begin with that is not there, as far as that is seen from here."""
    given = config.train.init_from
    if given is None:
        return
    folder = Path(given).expanduser()
    found = {name for name in (WEIGHTS, INDEX, CONFIG) if os.path.isfile(folder / name)}
    if CONFIG not in found or len(found) == 1:
        missing = CONFIG if CONFIG not in found else f"{WEIGHTS}, and no {INDEX}"
        fix = "Give a folder that trireme export, or Hugging Face's own save_pretrained, has written."
        yield Fault("train.init_from", given, f"has no {missing}", fix)
