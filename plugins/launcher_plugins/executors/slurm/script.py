"""The batch script: what differs from job to job is written here, the rest comes from ``slurm/``.

What differs from start to start, such as the port of the rendezvous, the script computes when it
runs, so that a requeued job needs no new one.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from launcher.base import resources
from launcher.base.units import counted
from launcher.contract.config import LaunchConfig
from launcher.contract.job import JobRequest
from launcher_plugins.executors.slurm.life import SlurmConfig, saves, settings_of
from launcher_plugins.executors.slurm.options import EXPORTED, Layout, directives, role_directives
from launcher_plugins.executors.slurm.roles import HET_JOB, Part

_NODE_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)
_OF_THE_HOST = frozenset(("HOME", "PATH"))
"""Variables that mean nothing inside of a container."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Everything that the script depends on."""

    config: LaunchConfig
    request: JobRequest
    place: Layout
    """Of the ranks on the cluster's devices."""
    others: tuple[Part, ...] = ()
    """Of the roles with nodes of their own."""

    @property
    def settings(self) -> SlurmConfig:
        """Those of the executor."""
        return settings_of(self.config)

    @property
    def tasks_per_node(self) -> int:
        """srun starts every rank; torchrun is started once on a node, and starts the ranks itself."""
        return self.place.ranks_per_node if self.settings.starter == "srun" else 1

    @property
    def variables(self) -> dict[str, str]:
        """Variables of every rank beside those of the site and of the rendezvous."""
        network = self.config.site.network_interface
        return {
            **({"GLOO_SOCKET_IFNAME": network, "NCCL_SOCKET_IFNAME": network} if network else {}),
            **({"OMP_NUM_THREADS": "1"} if self.config.device.kind == "cpu" else {}),
            "PYTHONDONTWRITEBYTECODE": "1",  # the copy of the code is read-only
            "PYTHONSAFEPATH": "1",  # `python -m` must not find modules in the current folder first
            "PYTHONUNBUFFERED": "1",
        }


def script_text(batch: Batch) -> str:
    """The whole script. The same job gives the same bytes."""
    config, place = batch.config, batch.place
    ranks, nodes = place.num_nodes * place.ranks_per_node, counted(place.num_nodes, "node")
    head = [
        "#!/bin/bash",
        f"# {config.name}: {ranks} ranks on {nodes}, by {batch.settings.starter}.",
        *directives(config, place, batch.request, tasks_per_node=batch.tasks_per_node),
        *(line for part in batch.others for line in _part_head(config, part)),
        "",
        *_settings(batch),
    ]
    return "".join(
        [
            *(f"{line}\n" for line in head),
            _body("start"),
            *(f"{line}\n" for line in _environment(batch)),
            _body("rendezvous"),
            _body("life"),
            _body(batch.settings.starter),
            *([_body("het_step" if batch.others else "step")] if batch.settings.starter == "srun" else []),
        ]
    )


def _part_head(config: LaunchConfig, part: Part) -> Iterator[str]:
    """What a further part of a heterogeneous job asks for."""
    ranks = part.place.num_nodes * part.place.ranks_per_node
    yield HET_JOB
    yield f"# {part.role}: {counted(ranks, 'rank')} on {counted(part.place.num_nodes, 'further node')}."
    yield from role_directives(config, part.site, part.place)


def expandable(text: str) -> str:
    r"""A bash word in which ``$NAME`` and ``${NAME}`` are expanded, and nothing else is.

    >>> print(expandable("/opt/x:$LD_LIBRARY_PATH `id` $(id)"))
    "/opt/x:${LD_LIBRARY_PATH-} \`id\` \$(id)"
    """
    words, position = [], 0
    for match in _NODE_VARIABLE.finditer(text):
        words += [_escaped(text[position : match.start()]), f"${{{match[1] or match[2]}-}}"]
        position = match.end()
    return '"' + "".join([*words, _escaped(text[position:])]) + '"'


def _escaped(text: str) -> str:
    return re.sub(r'([\\"$`])', r"\\\1", text)


def _body(name: str) -> str:
    return (resources.folder("slurm") / f"{name}.sh").read_text(encoding="utf-8")


def _settings(batch: Batch) -> Iterator[str]:
    """The shell variables that the bodies in ``slurm/`` use."""
    request, site, settings = batch.request, batch.config.site, batch.settings
    yield f"run={shlex.quote(request.run_dir)}"
    yield f"plan_sha256={request.plan_sha256}"
    yield f"python={shlex.quote(site.python or request.python)}"
    yield f"starter={settings.starter}"
    yield f"continuation={settings.continuation}"
    yield f"max_starts={settings.max_starts}"
    yield f"max_restarts={settings.max_restarts}"
    yield f"saves={'yes' if saves(batch.config) else 'no'}"
    yield f"nodes={batch.place.num_nodes}"
    yield f"ranks_per_node={batch.place.ranks_per_node}"
    yield f"parts={1 + len(batch.others)}"
    yield f"host_suffix={shlex.quote(site.host_suffix)}"
    yield f"resume=({'--resume' if request.resume else ''})"
    cpus = batch.config.site.cpus_per_rank
    if not batch.others:
        cpus = cpus and cpus * batch.place.ranks_per_node // batch.tasks_per_node
        yield f"step=({_words(_step_options(batch, cpus))})"
        return
    every = [(batch.place, cpus), *((part.place, part.site.cpus_per_rank) for part in batch.others)]
    for number, (place, cpus) in enumerate(every):
        yield f"step{number}=({_words([*_size_options(place), *_step_options(batch, cpus)])})"
    yield f"ranks_of_part=({' '.join(str(place.num_nodes * place.ranks_per_node) for place, _ in every)})"


def _words(words: Iterable[str]) -> str:
    return " ".join(map(shlex.quote, words))


def _size_options(place: Layout) -> Iterator[str]:
    yield f"--nodes={place.num_nodes}"
    yield f"--ntasks={place.num_nodes * place.ranks_per_node}"
    yield f"--ntasks-per-node={place.ranks_per_node}"


def _step_options(batch: Batch, cpus_per_task: int | None) -> Iterator[str]:
    site = batch.config.site
    if cpus_per_task:  # a step does not take it over from its job
        yield f"--cpus-per-task={cpus_per_task}"
    if site.cpu_bind:
        yield f"--cpu-bind={site.cpu_bind}"
    if site.container_image:
        names = {*EXPORTED, "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", *batch.variables}
        names |= {"TMPDIR"} if site.scratch else set()
        names |= {*site.env, *site.node_env, *site.forward, *site.secrets}
        yield f"--container-image={site.container_image}"
        yield f"--container-mounts={','.join([*_own_mounts(batch.request), *site.container_mounts])}"
        # A variable that the image sets too has the image's value, unless it is named here.
        yield f"--container-env={','.join(sorted(names - _OF_THE_HOST))}"


def _own_mounts(request: JobRequest) -> Iterator[str]:
    """The run directory, and the code of a sweep, which is beside it."""
    yield f"{request.run_dir}:{request.run_dir}"
    source = os.path.dirname(request.code)
    if source and not f"{source}/".startswith(f"{request.run_dir}/"):
        yield f"{source}:{source}"


def _environment(batch: Batch) -> Iterator[str]:
    """Variables of the ranks: the site's own come last, so that they count."""
    site = batch.config.site
    yield ""
    if site.modules:
        yield "type module >/dev/null 2>&1 || . /etc/profile"
    for module in site.modules:
        failure = shlex.quote(f"cannot load the module {module}")
        yield f"module load {shlex.quote(module)} || fail {failure}"
    yield from site.setup
    if batch.request.code:  # before what modules may have put there
        yield f"export PYTHONPATH={shlex.quote(batch.request.code)}${{PYTHONPATH:+:$PYTHONPATH}}"
    if site.scratch:
        yield f"export TMPDIR={expandable(site.scratch)}"
    for variables in (batch.variables, site.env):
        yield from (f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items()))
    yield from (f"export {name}={expandable(value)}" for name, value in sorted(site.node_env.items()))
