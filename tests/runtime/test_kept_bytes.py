"""What the plan says that a forward keeps, against what autograd keeps: the whole model on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from launcher.contract.config import FusionConfig
from launcher.plan.build import build
from launcher.plan.cost.memory import saved_activation_bytes
from launcher.runtime.data.microbatches import Microbatch
from launcher.runtime.model.build import build_chunks
from tests.helpers.configs import FP32, MIXED, job_shape, launch_config
from tests.helpers.contexts import make_context

MICRO, SEQ = 2, 64
SIZES = {"hidden_size": 128, "num_layers": 3, "num_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt"},
    "llama": {"family": "llama"},
    "llama with biases and norms of heads": {
        "family": "llama",
        "num_kv_heads": 2,
        "attention_bias": "all",
        "qk_norm": True,
    },
    "llama with a window": {"family": "llama", "num_kv_heads": 2, "sliding_window": 9},
    "llama with wide heads": {"family": "llama", "num_kv_heads": 2, "head_dim": 48},
}


def measured_bytes(config) -> int:
    """Bytes of all distinct storages that one forward of the whole model leaves for its backward."""
    (chunk,) = build_chunks(make_context(build(config)))
    parameters = {param.untyped_storage().data_ptr() for param in chunk.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    tokens = torch.zeros(MICRO, SEQ, dtype=torch.int64)
    batch = Microbatch(
        inputs=tokens, targets=tokens, samples=torch.arange(MICRO), num_targets=tokens.numel(), step=0
    )
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        chunk(None, batch)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize(("dropout", "attention"), [(0.0, "fused"), (0.1, "fused"), (0.0, "plain")])
@pytest.mark.parametrize("precision", [FP32, MIXED], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_keeps_what_was_predicted(family, precision, dropout, attention, recompute):
    config = launch_config(
        model={**SIZES, **FAMILIES[family], "dropout": dropout},
        batch={"micro_size": MICRO, "seq_length": SEQ},
        parallel={"recompute": recompute},
        precision=precision,
        device={"kind": "cpu"},
        fusion=FusionConfig(attention=attention),
    )
    job = job_shape(config)
    predicted = saved_activation_bytes(job, job.stages[0])
    predicted += job.model.num_mask_elements * job.compute_bytes
    assert measured_bytes(config) == pytest.approx(predicted, rel=0.03)
