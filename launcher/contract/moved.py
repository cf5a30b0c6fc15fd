"""Stored plans as they are written now: runs made before are read and resumed."""

from __future__ import annotations

from typing import Any

_ARCHITECTURES, _PARALLEL = "launcher_plugins.architectures", "launcher_plugins.parallel"
_MOVED = {
    "launcher.runtime.bench_collectives": "launcher.runtime.measure.collectives",
    "launcher.runtime.rank": "launcher.runtime.process.rank",
    "launcher.runtime.slow_device": "launcher.runtime.model.simulated_device",
    "launcher.runtime.model.slow_device": "launcher.runtime.model.simulated_device",
    f"{_ARCHITECTURES}.decentralized": f"{_ARCHITECTURES}.decentralized.plan",
    f"{_ARCHITECTURES}.decentralized_runtime": f"{_ARCHITECTURES}.decentralized.runtime",
    f"{_ARCHITECTURES}.gossip": f"{_ARCHITECTURES}.gossip.plan",
    f"{_ARCHITECTURES}.gossip_runtime": f"{_ARCHITECTURES}.gossip.runtime",
    f"{_ARCHITECTURES}.parameter_server": f"{_ARCHITECTURES}.parameter_server.plan",
    f"{_ARCHITECTURES}.parameter_server_runtime": f"{_ARCHITECTURES}.parameter_server.runtime.worker",
    f"{_ARCHITECTURES}.parameter_server_serve_runtime": f"{_ARCHITECTURES}.parameter_server.runtime.server",
    f"{_PARALLEL}.data": f"{_PARALLEL}.data.plan",
    f"{_PARALLEL}.data_runtime": f"{_PARALLEL}.data.runtime",
    f"{_PARALLEL}.pipeline": f"{_PARALLEL}.pipeline.plan",
    f"{_PARALLEL}.pipeline_runtime": f"{_PARALLEL}.pipeline.runtime",
    f"{_PARALLEL}.tensor": f"{_PARALLEL}.tensor.plan",
    f"{_PARALLEL}.tensor_runtime": f"{_PARALLEL}.tensor.runtime.layers",
    f"{_PARALLEL}.zero": f"{_PARALLEL}.zero.plan",
    f"{_PARALLEL}.zero_runtime": f"{_PARALLEL}.zero.runtime.update",
    "launcher_plugins.executors.slurm": "launcher_plugins.executors.slurm.executor",
}
_EXCHANGE_OF = "parameter_server"
"""The plugin whose section of a plan was a field ``exchange``."""


def upgraded(values: dict[str, Any]) -> dict[str, Any]:
    """A stored plan of the present version with what older launchers wrote in other places, under other
    names, or not at all."""
    plan: dict[str, Any] = with_current_names(values)
    memory = plan.get("memory")
    for ranks in memory if isinstance(memory, list) else ():
        if isinstance(ranks, dict):
            ranks.pop("states_by_zero_stage", None)
            if "kept_bytes" in ranks:
                ranks["persistent_bytes"] = ranks.pop("kept_bytes")
    if "exchange" not in plan:
        return plan
    exchange, parallel = plan.pop("exchange"), plan["config"]["parallel"]
    section = {"plugin": _EXCHANGE_OF, "title": "", "lines": [], "values": exchange}
    plan["sections"] = [section] if exchange else []
    plan["num_update_copies"] = 1 if parallel["zero_stage"] else parallel["dp"]
    del plan["batch"]["padded_vocab_size"]
    return plan


def with_current_names(value: Any) -> Any:
    """A stored value with every ``package.module:attribute`` in it as it is called now.

    >>> with_current_names({"program": "launcher.runtime.rank:run"})
    {'program': 'launcher.runtime.process.rank:run'}
    """
    if isinstance(value, dict):
        return {key: with_current_names(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_current_names(item) for item in value]
    if not isinstance(value, str):
        return value
    module, colon, attribute = value.partition(":")
    return f"{_MOVED[module]}:{attribute}" if colon and module in _MOVED else value
