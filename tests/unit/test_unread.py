"""Settings that nothing reads: refused where they are given, silent where they come with a group's file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.app.planning import make_plan
from launcher.app.request import Request
from launcher.app.sweep.planning import plan_sweep
from launcher.base import registry
from launcher.base.errors import PlanError
from launcher.contract.config import LaunchConfig
from launcher.contract.executor import Executor
from launcher.contract.strategy import Architecture, Parallel, Schedule
from launcher.plan.rules.unread import conditions
from launcher.typed.read import Condition, read_while
from tests.helpers.pretrained_folders import GPT_2

HEAD = "defaults: [/quickstart, _self_]\n"
PLACES: dict[Any, str] = {
    Executor: "executor",
    Architecture: "architecture",
    Schedule: "parallel.schedule_options",
}


def declared() -> list[tuple[tuple[str, ...], str, Condition]]:
    """Every condition of the schema and of the plugins that come with it: words that choose the plugin, the
    setting, and when it is read."""
    found: list[tuple[tuple[str, ...], str, Condition]] = [((), *item) for item in conditions(LaunchConfig)]
    for kind in (Executor, Architecture, Schedule, Parallel):
        for name in registry.own_plugins(kind.entry_group):
            if cls := getattr(registry.load(kind, name), "Config", None):
                choice = (
                    (f"{PLACES[kind]}={name}",) if kind is not Schedule else (f"parallel.schedule={name}",)
                )
                found += [(choice, *item) for item in conditions(cls, PLACES[kind])]
    return found


LLAMA = ("model=llama3_8b", "model.num_layers=4", "model.vocab_size=256", "model.hidden_size=64",
         "model.num_heads=8")  # fmt: skip
TWO_NODES = ("executor=slurm", "cluster.nodes=2", "cluster.devices_per_node=1")
ON: dict[str, tuple[str, ...]] = {
    "while model.family is llama": LLAMA,
    "unless train.checkpoint_interval is 0": ("train.checkpoint_interval=10",),
    "while site.group_access is read": ("site.group_access=read",),
    "unless train.init_from is null": ("train.init_from=run/checkpoints/step-00000040",),
    "unless parallel.dp is 1": ("parallel.dp=2",),
    "while optim.decay is wsd": ("optim.decay=wsd",),
    "unless precision.compute is fp32": ("precision=bf16",),
    "while device.kind is cuda": ("device=h100", "cluster=dgx_h100", "cluster.devices_per_node=2"),
    "where ranks are on several nodes": TWO_NODES,
    "where two of parallel.dp, tp and pp are above 1": ("parallel.dp=2",),
    "where batch.num_microbatches is no multiple of parallel.pp": (
        *("parallel=interleaved", "batch.num_microbatches=5", "batch.global_size=null"),
    ),
    "where batch.seq_length is above model.sliding_window": LLAMA,
    "unless run.notify is empty": ("run.notify=[cat]",),
    "where data.source is a list": ("data.source=[x]",),
    "where a pipeline stage has several ranks": ("parallel.dp=2",),
    "where alarms.spike or alarms.not_finite is skip": ("alarms.spike=skip",),
    "where alarms.spike or alarms.not_finite is rewind": (
        *("alarms.not_finite=rewind", "train.checkpoint_interval=10"),
    ),
}
"""Words under which a condition holds; none for what is so in the quickstart."""
OFF: dict[str, tuple[str, ...]] = {
    "unless model.family is custom": ("model=custom", "model.target=a.b:c"),
    "unless data.source is null": ("data=custom", "data.target=a.b:c"),
    "unless data.tokenizer is null": ("data.tokenizer=null",),
    "while data.eval_source is null": ("data.eval_source=x",),
    "unless optim.decay is constant": ("optim.decay=constant",),
    "unless train.eval_batches is 0": ("train.eval_batches=0",),
    "unless executor.continuation is none": ("executor.continuation=none",),
    "while executor.continuation is requeue": ("executor.continuation=none",),
    "while executor.check_nodes is true": ("executor.check_nodes=false",),
    "while train.init_from is null": ("train.init_from=x",),
    "while report.baseline is auto": ("report.baseline=none",),
    "where the job has one component": (
        *("architecture=parameter_server", "parallel.pp=1", "parallel.dp=2", "cluster.devices_per_node=2"),
        "+site.roles.server.ranks_per_node=1",
    ),
    "where several ranks share a node": TWO_NODES,
    "where batch.seq_length is above model.sliding_window": (*LLAMA, "batch.seq_length=3"),
    "where batch.num_microbatches is no multiple of parallel.pp": ("parallel=interleaved",),
    **{
        f"unless alarms.{name} is ignore": (f"alarms.{name}=ignore",)
        for name in ("spike", "slow_step", "slow_rank", "no_progress")
    },
}
"""Words under which it does not."""
VALUES = {
    "cluster.inter_node": "{latency_s: 1, bandwidth_bytes_per_s: 1}",
    "alarms.slow_rank": "end",
    "cluster.intra_node": "{latency_s: 1, bandwidth_bytes_per_s: 1}",
    "parallel.rank_order": "tp-dp-pp",
    "parallel.schedule_options.uneven_groups": "true",
    "data.cache_dir": "x",
    "data.weights": "[1]",
    "data.bin_format": "uint32",
    "data.end_of_document": "x",
    "data.eval_fraction": "0.25",
    "executor.check_nodes": "true",
    "site.gpu_type": "h100",
    "site.gpu_request": "gres",
    "model.tied_embeddings": "true",
    "model.dropout": "0.25",
    "model.path": "FOLDER",
    "model.attention_bias": "qkv",
    "model.qk_norm": "true",
    "model.rope_scaling": "{factor: 8, low_freq_factor: 1, high_freq_factor: 4, "
    "original_max_position_embeddings: 64}",
    "optim.min_lr_fraction": "0.25",
    "optim.decay_steps": "30",
    "train.async_checkpoint": "false",
    "train.keep_every": "30",
    "train.init_optimizer": "true",
    "precision.master_weights": "true",
    "executor.min_node_speed": "0.25",
    "executor.exclude_bad_nodes": "false",
}
"""What is given where a number does not do."""


def refused(path: str, words: Sequence[str], recipe: str = "quickstart") -> list[str]:
    """The faults of a setting."""
    try:
        make_plan(recipe, words)
    except PlanError as error:
        return [str(fault) for fault in error.faults if fault.path.startswith(path)]
    return []


@pytest.mark.parametrize(("choice", "path", "condition"), declared(), ids=lambda part: str(part)[:40])
def test_a_setting_is_refused_where_it_is_not_read_and_accepted_where_it_is(
    choice: tuple[str, ...], path: str, condition: Condition, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_2 | {"n_positions": 128}))
    key = condition.text.replace("``", "")
    given = f"{path}={VALUES.get(path, '3').replace('FOLDER', str(tmp_path))}"
    typed = ("site.gpu_request=gres_typed",) if path == "site.gpu_type" else ()
    off = [*choice, *OFF.get(key, ()), *typed]
    faults = refused(path, [*off, given])
    (cause, *others) = condition.paths
    rule = f"has no effect here: it is read {key}" if others else f"has no effect while {cause} is "
    assert faults and all(rule in fault for fault in faults)  # noqa: PT018
    on = [*choice, *ON.get(key, ()), *typed]
    assert not refused(path, [*on, given])
    if condition.neutral is not None:
        assert not refused(path, [*off, f"{path}={str(condition.neutral).lower()}"])


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return str(path)


def test_a_groups_file_may_set_what_nothing_reads(tmp_path: Path) -> None:
    write(tmp_path, "optim/flat.yaml", "defaults: [adamw, _self_]\ndecay: constant\nmin_lr_fraction: 0.3\n")
    ours = write(tmp_path, "ours.yaml", "defaults: [/quickstart, override /optim: flat, _self_]\n")
    planned = make_plan(ours, [])
    assert planned.plan.config.optim.min_lr_fraction == 0.3
    assert "has no effect" not in " ".join(planned.plan.notes)
    (fault,) = refused("optim", ["optim.min_lr_fraction=0.3"], ours)
    assert fault.endswith("[override optim.min_lr_fraction=0.3]")


def test_a_recipe_is_refused_with_its_line(tmp_path: Path) -> None:
    ours = write(tmp_path, "ours.yaml", f"{HEAD}train:\n  keep_checkpoints: 3\n")
    with pytest.raises(PlanError) as caught:
        make_plan(ours, [])
    assert str(caught.value) == (
        "train.keep_checkpoints=3: has no effect while train.checkpoint_interval is 0. Leave it out, or set "
        f"another train.checkpoint_interval. [{ours}:3]"
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["optim.decay=constant"], HEAD),
        ([], "defaults: [./first, _self_]\noptim: {decay: constant}\n"),
        (["optim=flat"], HEAD),
        ([], "defaults: [./first, override /optim: flat, _self_]\n"),
    ],
)
def test_what_a_later_recipe_or_an_override_takes_the_effect_of_is_noted(
    tmp_path: Path, words: list[str], text: str
) -> None:
    write(tmp_path, "optim/flat.yaml", "defaults: [adamw, _self_]\ndecay: constant\n")
    first = write(tmp_path, "first.yaml", f"{HEAD}optim: {{min_lr_fraction: 0.2}}\n")
    recipe = first if text == HEAD else write(tmp_path, "second.yaml", text.replace("./", ""))
    (note,) = (note for note in make_plan(recipe, words).plan.notes if "min_lr_fraction" in note)
    assert note == f"optim.min_lr_fraction=0.2: has no effect while optim.decay is constant. [{first}:2]"


def test_points_of_a_sweep_that_do_not_read_what_all_are_given_are_run_with_a_note() -> None:
    words = ("optim.min_lr_fraction=0.2", "precision.master_weights=true", "optim.decay=constant,cosine",
             "precision=fp32,bf16")  # fmt: skip
    planned = plan_sweep(Request(recipe="quickstart", overrides=words))
    noted = [
        tuple(
            name for name in ("min_lr_fraction", "master_weights") if f"{name}=" in " ".join(point.plan.notes)
        )
        for point in planned.points
    ]
    assert not planned.refused
    assert noted == [("min_lr_fraction", "master_weights"), ("min_lr_fraction",), ("master_weights",), ()]
    fixed = plan_sweep(
        Request(recipe="quickstart", overrides=(*words[:2], "optim.decay=constant", "seed=1,2"))
    )
    assert not fixed.points


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ("cluster.intra_node.latency_s=1 parallel.pp=1 parallel.dp=auto", "cluster.intra_node"),
        ("parallel.bucket_bytes=3 parallel.dp=auto", "parallel.bucket_bytes"),
        ("parallel.rank_order=tp-dp-pp parallel.dp=auto", "parallel.rank_order"),
        ("executor=slurm +site.roles.server.ranks_per_node=2", "site.roles.server.ranks_per_node"),
    ],
)
def test_what_is_not_read_is_refused_where_that_is_known_only_once_the_plan_is_made(
    words: str, path: str
) -> None:
    (fault,) = refused(path, words.split())
    assert "has no effect" in fault


def test_the_roles_of_a_site_are_silent_where_the_architecture_has_none(
    own_folder: Path, tmp_path: Path
) -> None:
    write(own_folder, "site/ours.yaml", "roles: {server: {ranks_per_node: 2}}\n")
    ours = write(tmp_path, "ours.yaml", "defaults: [/quickstart, override /site: ours, _self_]\n")
    assert "site.roles" not in " ".join(make_plan(ours, ["executor=slurm"]).plan.notes)


def test_links_are_read_where_a_role_has_nodes_of_its_own() -> None:
    words = ["executor=slurm", "architecture=parameter_server", "parallel.pp=1", "parallel.dp=2",
             "cluster.devices_per_node=2", "+site.roles.server.ranks_per_node=1"]  # fmt: skip
    assert not refused("cluster", [*words, "cluster.inter_node.latency_s=1"])


GPUS = (
    *("parallel.pp=1", "parallel.dp=4", "batch.global_size=8"),
    *("executor=slurm", "cluster.nodes=2", "cluster.devices_per_node=2"),
)


@pytest.mark.parametrize(
    ("words", "is_read"),
    [
        ((), False),
        (("architecture.reduce=hierarchical",), True),
        (("architecture=parameter_server",), True),
        (("parallel.dp=2", "parallel.tp=2"), True),
        (("parallel.dp=1", "parallel.tp=4"), True),  # what its messages would take inside a node is told
    ],
)
def test_the_link_inside_a_node_is_refused_where_every_message_goes_between_nodes(
    words: tuple[str, ...], is_read: bool
) -> None:
    faults = refused("cluster.intra_node", [*GPUS, *words, "cluster.intra_node.latency_s=3"])
    rule = "has no effect here: it is read where all ranks of a message share a node. Leave it out."
    assert [rule in fault for fault in faults] == ([] if is_read else [True])


@pytest.mark.parametrize(
    ("words", "unread"),
    [
        (("device.peak_flops.bf16=1e12",), "bf16"),
        (("device.peak_flops.fp32=1e12",), ""),
        (("device.peak_flops.bf16=1e12", "precision=bf16"), ""),
        (("device.peak_flops={fp32: 1e12, bf16: 2e12}",), ""),  # as a datasheet has them
        (("device.peak_flops={bf16: 1e12}",), "bf16"),
    ],
)
def test_a_peak_of_a_number_format_that_nothing_runs_in_is_refused(
    words: tuple[str, ...], unread: str
) -> None:
    faults = refused("device.peak_flops", words)
    rule = f"has no effect here: it is read where products of matrices run in {unread}"
    assert [rule in fault for fault in faults] == ([True] if unread else [])


def test_a_peak_that_an_override_takes_the_effect_of_is_noted(tmp_path: Path) -> None:
    recipe = tmp_path / "half.yaml"
    recipe.write_text(f"{HEAD}precision: {{compute: bf16}}\ndevice: {{peak_flops: {{bf16: 1e12}}}}\n")
    plan = make_plan(str(recipe), ["precision.compute=fp32"]).plan
    (note,) = (note for note in plan.notes if note.startswith("device.peak_flops.bf16"))
    assert "has no effect here" in note


def test_a_recipe_that_extends_nothing_sets_everything(tmp_path: Path) -> None:
    from launcher.config.save import dump

    config = make_plan("quickstart", ["optim.decay=constant"]).plan.config
    saved = write(tmp_path, "saved.yaml", dump(config))
    assert make_plan(saved, []).plan.config == config


def test_a_setting_without_its_condition_would_be_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal is that of the declaration: turned round, it says the opposite."""
    monkeypatch.setattr(
        "launcher.plan.rules.unread.conditions_of",
        lambda item: read_while("optim.decay", "constant")["read"] if item.name == "min_lr_fraction" else (),
    )
    assert not refused("optim", ["optim.decay=constant", "optim.min_lr_fraction=0.2"])
    assert refused("optim", ["optim.min_lr_fraction=0.2"])
    assert not refused("model", ["model.rope_theta=1"])
