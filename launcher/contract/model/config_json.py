"""The ``config.json`` of a model, as it is exported in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.contract.config import ModelConfig
from launcher.contract.model.config_reading import Described, described
from launcher.contract.model.formats import CONFIG, Format, format_of
from launcher.contract.model.sizes import Sizes, biting
from launcher.contract.model.tensors import supported_sizes
from launcher.typed.read import plain

ORIGINAL = "init_config.json"
"""In a run directory: that of the model that the training began with."""
_SETTINGS = (
    *("num_layers", "hidden_size", "num_heads", "vocab_size", "tied_embeddings", "norm_eps"),
    *("rope_theta", "rope_scaling", "attention_bias", "qk_norm", "sliding_window"),
)
"""Of a model, beside those that follow from others where they are null."""


def config_of(
    model: ModelConfig, seq_length: int, dtype: str, original: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The content of ``config.json``.

    ``dtype``: torch's name of the weights' number format. ``original``: the content for the model that the
    training began with; what the training did not change of it stays.

    Raises:
        JobError: when no format can hold such a model.
    """
    sizes, form = supported_sizes(model, seq_length), format_of(model, original)
    original = original if original is not None and original.get("model_type") == form.model_type else None
    values = effective(model, sizes)
    own: dict[str, Any] = {"model_type": form.model_type, "architectures": [form.architecture]}
    own |= {name: values[at] for name, at in form.settings.items()}
    own |= {"dtype": dtype, "torch_dtype": dtype}  # its name before release 5
    others = {"initializer_range": model.init_std, "bos_token_id": None, "eos_token_id": None}
    others |= {name: allowed[0] for name, allowed in form.fixed.items()}
    if model.family == "gpt":
        own |= {"n_positions": sizes.positions, "embd_pdrop": model.dropout, "resid_pdrop": model.dropout}
        others["attn_pdrop"] = 0.0
    else:
        own |= {**_rope_entries(model), **_attention_entries(model, form, sizes, original)}
        others |= {"attention_dropout": 0.0, "max_position_embeddings": seq_length}
    return {**(others if original is None else original), **own}


def effective(model: ModelConfig, sizes: Sizes) -> dict[str, Any]:
    """The settings that a file tells, with the sizes that follow from others."""
    resolved = {"num_kv_heads": sizes.num_kv_heads, "head_dim": sizes.head, "ffn_size": sizes.ffn}
    return {name: getattr(model, name) for name in _SETTINGS} | resolved


def _rope_entries(model: ModelConfig) -> dict[str, Any]:
    """Base and scaling where releases of transformers before 5 read them, and since."""
    scaling = None if model.rope_scaling is None else plain(model.rope_scaling)
    group = {**(scaling or {"rope_type": "default"}), "rope_theta": model.rope_theta}
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling, "rope_parameters": group}


def _attention_entries(
    model: ModelConfig, form: Format, sizes: Sizes, original: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Biases and window. A window of the original that gives the same samples the same logits stays."""
    entries: dict[str, Any] = {}
    if form.attention_bias is None:
        entries["attention_bias"] = model.attention_bias == "all"
    first = None if original is None else described(original, CONFIG, "")
    if isinstance(first, Described):
        window = first.settings.get("sliding_window")
        if biting(window, sizes.seq_length) == sizes.window:
            return entries
    if "use_sliding_window" in form.windows:
        is_used = model.sliding_window is not None
        entries |= {"use_sliding_window": is_used, "max_window_layers": 0, "layer_types": None}
    return entries | ({"sliding_window": model.sliding_window} if form.windows else {})
