"""Every setting does something wherever it can be given, or is refused there.

Each is changed, in configurations that differ in what they read: the plan changes, or the job, or a rank
reads it as it trains; or the change is refused since it would do nothing.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from launcher.app.lifecycle import prepared
from launcher.app.planning import plan_inputs
from launcher.app.preflight import executor_faults
from launcher.base.errors import ConfigError
from launcher.base.registry import resolve
from launcher.config.load import load
from launcher.config.paths import changed, value_at, walk
from launcher.config.rules import rule_faults
from launcher.contract.config import LaunchConfig
from launcher.contract.model.rope import RopeScaling
from launcher.contract.optim.config import GroupConfig
from launcher.contract.plan import Plan
from launcher.contract.site import RoleSite
from launcher.plan.build import build
from launcher.plan.text import plan_text
from launcher.runs.render import executor_of
from launcher.runs.store import RunDirectory
from launcher.runtime.process.rank import make_context
from launcher.runtime.train.loop import train
from launcher.typed.read import Source, plain
from tests.helpers.configs import SMALL_RUN, compose_sound
from tests.helpers.contexts import CPU
from tests.helpers.pretrained_folders import GPT_2, write_folder
from tests.helpers.ranks import run_ranks
from tests.helpers.run_folders import make_folders
from tests.helpers.settings import other_values, settings_of

COPIES = ("dataclasses.py", "typed/read.py", "config/paths.py", "rules.py", "rules/checks.py", "/unread.py")
"""Code that reads settings only to copy, compare or check them."""
LABELS = {"model.name", "precision.name", "device.name", "cluster.name", "site.name"}
"""What only the reader of a plan sees."""
JUDGED = {
    *("device.memory_bytes", "cluster.devices_per_node", "cluster.allow_idle_devices"),
    *("batch.num_microbatches", "parallel.dp", "parallel.schedule_options.uneven_groups"),
    *("train.init_optimizer", "executor.check_nodes"),
}
"""What decides whether a job is planned, and may change nothing else."""
ELSEWHERE = {
    *("name", "model.path", "run.dir", "run.root", "run.timeout_s", "run.start_timeout_s"),
    *("run.notify", "run.notify_timeout_s", "run.prometheus"),
    *("data.name", "report.baseline", "report.warmup_steps", "site.is_one_machine"),
    *("site.group_access", "site.group"),
    *("device.measured_in", "device.memory_check", "optim.name", "data.tokenizer"),
    *("architecture.name", "executor.name", "parallel.plugins", "parallel.schedule_options"),
    "data.options",
}
"""What names and watches the process around the training; what the report reads; what is read before a plan
is made, or where a rank does not fit; what has one value; plugins, which come with options of their own; and
what the process reads that makes a user's dataset; who else may read the files."""
HERE = RunDirectory(Path("/somewhere"))
ROOTS = (str(Path(__file__).parent / "user_models"),)
SMALL = " ".join(word for word in SMALL_RUN if not word.startswith("train."))
BEGINS = f"data=text data.source=TEXT data.cache_dir=FOLDER train.num_steps=3 optim.warmup_steps=1 {SMALL}"
"""Words of every context but that of an own model."""
GPT = "parallel.pp=1 model.hidden_size=16 model.num_heads=4 model.max_position_embeddings=32"
"""The model of `GPT_2`."""
LLAMA = "model=llama3_8b model.vocab_size=256 model.num_kv_heads=1 model.ffn_size=32"
CUDA = "executor=slurm device=h100 cluster=dgx_h100 model.hidden_size=1024 batch.seq_length=512"
CONTEXTS = {
    "one rank": """
        parallel.pp=1 train.eval_batches=1 train.checkpoint_interval=2
        alarms.spike=skip alarms.not_finite=rewind
    """,
    "Llama": f"parallel.pp=1 {LLAMA}",
    "weights of a folder": f"{GPT} train.init_from=FOLDER/gpt2",
    "a blend": """
        parallel.pp=1 data.source=[TEXT,TEXT] data.weights=[1,1] data.eval_source=TEXT
    """,
    "several ranks": """
        parallel.dp=2 batch.global_size=8
        train.eval_batches=0 optim.decay=constant report.warmup_steps=2
    """,
    "gossip": "parallel.dp=2 parallel.pp=1 architecture=gossip optim.decay=wsd",
    "servers": """
        parallel.dp=2 parallel.pp=1 architecture=parameter_server
        architecture.mode=bounded architecture.staleness=1
        architecture.compression=top_k architecture.top_k_fraction=0.1
    """,
    "an own model": """
        model=custom model.target=own_layers:Made +model.options.kind=harmless
        data=custom data.target=own_layers:Copy batch.seq_length=8
        parallel.pp=1 batch.global_size=4 batch.micro_size=1
        train.num_steps=3 train.eval_batches=2 optim.warmup_steps=1 report.warmup_steps=1
    """,
    "servers of their own": """
        parallel.dp=2 parallel.pp=1 architecture=parameter_server
        executor=slurm cluster.devices_per_node=2 +site.roles.server.ranks_per_node=1
    """,
    "two nodes": """
        parallel.dp=4 parallel.pp=1 architecture.reduce=hierarchical
        executor=slurm cluster.nodes=2 cluster.devices_per_node=2 site=box
        site.time_limit=1:00:00 train.checkpoint_interval=2
    """,
    "two nodes, one sum": """
        parallel.dp=4 parallel.pp=1 executor=slurm cluster.nodes=2 cluster.devices_per_node=2
    """,
    "GPUs": f"""
        {CUDA} precision=bf16 parallel=interleaved parallel.dp=4 parallel.tp=1 model.num_layers=8
        batch.global_size=20 parallel.schedule_options.uneven_groups=true train.init_from=FOLDER/gpt2
        site.container_image=x site.gpu_request=gres_typed site.gpu_type=h100
    """,
    "ZeRO": f"""
        {CUDA} cluster.nodes=2 cluster.allow_idle_devices=true batch.global_size=16
        parallel.dp=auto parallel.tp=2 parallel.pp=1 parallel.zero_stage=1
    """,
}
"""Overrides of the quickstart."""
TRAINED_AS = {
    "servers of their own": "servers",
    "two nodes": "one rank",
    "two nodes, one sum": "one rank",
    "GPUs": "one rank",
    "ZeRO": "one rank",
}
"""Of those that are not trained here, one whose ranks read what theirs would."""
VALUES: dict[str, tuple[Any, ...]] = {
    "batch.seq_length": (8,),
    "cluster.nodes": (1, 3),
    "data.weights": ((1.0, 3.0),),
    "device.memory_bytes": (1,),
    "device.peak_flops": ({"fp32": 1e9, "bf16": 1e9},),
    "model.max_position_embeddings": (512,),
    "model.options": ({"kind": "centred"},),
    "model.rope_scaling": (
        RopeScaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
        ),
    ),
    "optim.betas": ((0.8, 0.9),),
    "optim.decay_steps": (50,),
    "optim.groups": ({"head": GroupConfig(names=("*",), lr_factor=0.5)},),
    "parallel.layers_per_stage": ((1, 1), (2, 0)),
    "parallel.rank_order": ("tp-dp-pp", "dp-pp-tp"),
    "parallel.recompute": ("full",),
    "parallel.schedule": ("gpipe", "zb_h1"),
    "parallel.zero_options": ({"log_level": "info"},),
    "train.keep_every": (2,),
    "site.container_mounts": (("/a:/b",),),
    "site.cpu_bind": ("sockets",),
    "site.env": ({"A": "1"},),
    "site.forward": (("A",),),
    "site.memory_per_node": ("64G",),
    "site.modules": (("x",),),
    "site.node_env": ({"A": "1"},),
    "site.nodelist": ("node[01-02]",),
    "site.options": ({"mail-type": "END"},),
    "site.roles": ({"server": RoleSite(ranks_per_node=1, cpus_per_rank=3)},),
    "site.secrets": (("A",),),
    "site.setup": (("x",),),
    "site.time_limit": ("02:00:00",),
}
"""Values where those of the type alone do not do."""


# What the ranks read


def recorded(classes: set[type], work: Callable[[], Any]) -> set[tuple[str, str]]:
    """The classes and names of the settings that are read meanwhile."""
    seen: set[tuple[str, str]] = set()

    def get(self: Any, name: str) -> Any:
        if name in type(self).__dataclass_fields__:
            caller = sys._getframe(1).f_code.co_filename
            if not any(part in caller for part in COPIES):
                seen.add((type(self).__name__, name))
        return object.__getattribute__(self, name)

    with pytest.MonkeyPatch.context() as patch:
        for cls in classes:
            patch.setattr(cls, "__getattribute__", get, raising=False)
        work()
    return seen


def work_of(rank: int, plan: Plan, folder: Path) -> set[tuple[str, str]]:
    """The settings that were read as a rank did its work."""
    make_folders(folder)
    sys.path[:0] = plan.source_roots
    role = plan.rank(rank).role
    work = resolve(role.serve) if role.serve else train
    classes = {cls for _, _, cls in settings_of(plan.config)}
    return recorded(classes, lambda: work(make_context(plan.rank(rank), CPU), folder, resume=False))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("settings")
    (found / "text.txt").write_text("all work and no play " * 400)
    write_folder(found / "gpt2", GPT_2, load_words(f"{BEGINS} {GPT}", found))
    return found


@cache
def config_of(name: str, folder: Path) -> LaunchConfig:
    """The configuration of a context, with what is open left open."""
    words = CONTEXTS[name]
    return load_words(words if "data=custom" in words else f"{BEGINS} {words}", folder)


def load_words(words: str, folder: Path) -> LaunchConfig:
    """The configuration of the quickstart under overrides."""
    words = words.replace("TEXT", str(folder / "text.txt")).replace("FOLDER", str(folder))
    composed = compose_sound("quickstart", words.split())
    return load(composed.values, composed.sources)


def planned(config: LaunchConfig, path: str = "", inputs: Any = None) -> Plan:
    """The plan of a configuration of which one setting was given.

    Raises:
        ConfigError: when it is refused, by the planning or at the start.
    """
    given = Source(where=f"override {path}", is_given=True, layer=1)
    sources = {inner: given for inner, _ in walk(plain(value_at(config, path)), path)} if path else {}
    if faults := [
        *rule_faults({item.name: getattr(config, item.name) for item in dataclasses.fields(config)})
    ]:
        raise ConfigError(faults)
    plan = build(config, sources, inputs=inputs or plan_inputs(config, ROOTS), source_roots=ROOTS)
    is_local = executor_of(plan).is_local
    if faults := executor_faults(prepared(plan, HERE), is_here=is_local):
        raise ConfigError(faults)
    return plan


@cache
def read_by_ranks(name: str, folder: Path) -> set[tuple[str, str]]:
    """What the ranks of a context read that is trained."""
    plan = planned(config_of(name, folder))
    return set().union(*run_ranks(plan.world_size, work_of, plan, folder / name))


# What a change changes


@dataclass(frozen=True, kw_only=True)
class Effects:
    """Which settings of a context do what."""

    all: set[str] = field(default_factory=set)
    some: set[str] = field(default_factory=set)
    """Those with an effect."""
    none: set[str] = field(default_factory=set)
    """Those without one that can be given all the same."""


def outcome(plan: Plan) -> dict[str, Any]:
    """What is done by a plan: its predictions, what each rank does, and the job; none of it an echo of the
    settings."""
    values = plain(plan)
    for echo in ("config", "mesh", "plugins"):
        del values[echo]
    del values["schedule"]["name"]
    script = re.sub(r"\b[0-9a-f]{64}\b", "HASH", json.dumps(plain(prepared(plan, HERE).script)))
    ranks = [plain(plan.rank(rank).coordinates) for rank in range(plan.world_size)]
    return {**values, "ranks": ranks, "script": script}


@cache
def effects(name: str, folder: Path) -> Effects:
    """What each setting of a context does, of which others were given."""
    config = config_of(name, folder)
    inputs = plan_inputs(config, ROOTS)
    plan = planned(config, inputs=inputs)
    before, read = outcome(plan), read_by_ranks(TRAINED_AS.get(name, name), folder)

    def verdict(path: str, cls: type, other: Any) -> str:
        try:
            new = planned(changed(config, {path: other}), path, inputs)
        except ConfigError as error:
            is_unread = any("has no effect" in fault.allowed for fault in error.faults)
            return "unread" if is_unread else "refused"
        is_shown = path in LABELS and plan_text(new) != plan_text(plan)
        is_read = (cls.__name__, path.rpartition(".")[2]) in read
        return "changed" if is_shown or is_read or outcome(new) != before else "silent"

    found = Effects()
    for path, kind, cls in settings_of(config):
        if path in ELSEWHERE:
            continue
        value, verdicts = value_at(config, path), set[str]()
        given = (other for other in VALUES.get(path, ()) if other != value)
        for other in (*given, *other_values(kind, value)):
            verdicts.add(verdict(path, cls, other))
            if "changed" in verdicts:
                break
        found.all.add(path)
        if "changed" in verdicts or (path in JUDGED and "refused" in verdicts):
            found.some.add(path)
        elif "silent" in verdicts and "unread" not in verdicts and path not in JUDGED:
            found.none.add(path)
    return found


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_setting_that_would_do_nothing_is_refused(name: str, folder: Path) -> None:
    assert effects(name, folder).none == set()


def test_every_setting_does_something_somewhere(folder: Path) -> None:
    found = [effects(name, folder) for name in CONTEXTS]
    assert set().union(*(one.all for one in found)) == set().union(*(one.some for one in found))


def test_a_setting_that_is_not_declared_to_be_unread_would_be_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.plan.rules.unread.conditions_of", lambda item: ())
    found = effects.__wrapped__
    assert found("several ranks", folder).none >= {
        *("model.rope_theta", "train.keep_checkpoints", "optim.min_lr_fraction"),
        "cluster.inter_node.latency_s",
    }
    assert "parallel.rank_order" in found("weights of a folder", folder).none
    monkeypatch.setattr("launcher.plan.build.unread_links", lambda *job: ())
    assert "cluster.intra_node.latency_s" in found("two nodes, one sum", folder).none


def test_a_setting_that_no_rank_reads_would_be_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = read_by_ranks("one rank", folder) - {("AdamWConfig", "eps")}
    monkeypatch.setattr(f"{__name__}.read_by_ranks", lambda name, folder: read)
    assert effects.__wrapped__("one rank", folder).none == {"optim.eps"}
