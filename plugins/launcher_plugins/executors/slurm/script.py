"""The batch script: what differs between jobs is generated here, the rest is copied from ``slurm/``.

What differs between starts, such as the rendezvous port, is computed when the script runs, so that a
requeued job needs no new script.

Source: the manual page sbatch(1), --array and "filename pattern".
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.base import resources
from launcher.base.units import counted
from launcher.contract.config import LaunchConfig
from launcher.contract.job import (
    EXECUTOR_LOG,
    LOCK,
    RENDEZVOUS_FILE,
    RENDEZVOUS_KEY,
    START_FILE,
    GroupRequest,
    JobRequest,
    JobScript,
    checkpoint_name,
)
from launcher_plugins.executors.slurm.continuation import SlurmConfig, checks_nodes, first_lead_s, saves
from launcher_plugins.executors.slurm.options import EXPORTED, NodeLayout, directives, quoted, role_directives
from launcher_plugins.executors.slurm.roles import HET_JOB, HetComponent

_DIRECTIVE = "#SBATCH --"
_OF_ONE_RUN = (f"{_DIRECTIVE}job-name=", f"{_DIRECTIVE}output=")
"""Directives that differ between the runs of an array."""
_NODE_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)
_NETWORKS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_OF_THE_RENDEZVOUS = frozenset((RENDEZVOUS_FILE, RENDEZVOUS_KEY, "MASTER_ADDR", "MASTER_PORT", *_NETWORKS))
"""Variables by which the ranks meet, one way or the other."""
_OF_THE_HOST = frozenset(("HOME", "PATH"))
"""Variables that have no meaning in a container."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Everything that the script depends on."""

    config: LaunchConfig
    request: JobRequest
    layout: NodeLayout
    """Nodes of the ranks on the cluster's devices."""
    needs: Mapping[str, float]
    """What each of these nodes has to have."""
    others: tuple[HetComponent, ...] = ()
    """Components for roles with nodes of their own."""

    @property
    def settings(self) -> SlurmConfig:
        """Those of the executor."""
        return self.config.executor.settings(SlurmConfig)

    @property
    def tasks_per_node(self) -> int:
        """srun starts every rank; torchrun is started once on a node, and starts the ranks itself."""
        return self.layout.ranks_per_node if self.settings.starter == "srun" else 1

    @property
    def variables(self) -> dict[str, str]:
        """Variables of every rank, except those of the site and of the rendezvous."""
        network = self.config.site.network_interface
        return {
            **(dict.fromkeys(_NETWORKS, network) if network else {}),
            **({"OMP_NUM_THREADS": "1"} if self.config.device.kind == "cpu" else {}),
            "PYTHONDONTWRITEBYTECODE": "1",  # the copy of the code is read-only
            "PYTHONSAFEPATH": "1",  # `python -m` must not find modules in the current folder first
            "PYTHONUNBUFFERED": "1",
        }


def script_text(batch: Batch) -> str:
    """The whole script. The same job gives the same bytes."""
    config, layout = batch.config, batch.layout
    nodes = counted(layout.num_nodes, "node")
    head = [
        "#!/bin/bash",
        f"# {config.name}: {layout.num_ranks} ranks on {nodes}, by {batch.settings.starter}.",
        *directives(config, layout, batch.request, tasks_per_node=batch.tasks_per_node),
        *(line for component in batch.others for line in _component_head(config, component)),
        "",
        *_settings(batch),
    ]
    return "".join(
        [
            *(f"{line}\n" for line in head),
            _body("start"),
            *(f"{line}\n" for line in _environment(batch)),
            _body("limit"),
            _body("continuation"),
            _body("nodes"),
            _body("rendezvous"),
            _body(batch.settings.starter),
            *([_body("het_step" if batch.others else "step")] if batch.settings.starter == "srun" else []),
        ]
    )


def _component_head(config: LaunchConfig, component: HetComponent) -> Iterator[str]:
    """The options of a further component of a heterogeneous job."""
    layout = component.layout
    ranks, nodes = counted(layout.num_ranks, "rank"), counted(layout.num_nodes, "further node")
    yield HET_JOB
    yield f"# {component.role}: {ranks} on {nodes}."
    yield from role_directives(config, component.site, component.layout)


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
    """The shell variables that the code in ``slurm/`` uses."""
    request, site, settings = batch.request, batch.config.site, batch.settings
    yield f"run={shlex.quote(request.run_dir)}"
    if site.group_access == "read":
        yield "umask 027"
    yield f"plan_sha256={request.plan_sha256}"
    yield f"python={shlex.quote(site.python or request.python)}"
    yield f"start={shlex.quote(request.code)}/{START_FILE}"
    if batch.config.run.notify or batch.config.run.prometheus:
        yield "is_followed=yes"
    yield f"starter={settings.starter}"
    yield f"continuation={settings.continuation}"
    yield f"max_starts={settings.max_starts}"
    yield f"max_node_failures={settings.max_node_failures}"
    yield f"max_restarts={settings.max_restarts}"
    yield f"saves={'yes' if saves(batch.config) else 'no'}"
    yield f"save_lead_s={first_lead_s(batch.config)}"
    yield f"lead_is_set={'no' if settings.save_lead_s is None else 'yes'}"
    yield f"last_checkpoint={checkpoint_name(batch.config.train.num_steps)}"
    yield f"nodes={batch.layout.num_nodes}"
    yield f"spare_nodes={batch.config.cluster.spare_nodes}"
    yield f"checks_nodes={'yes' if checks_nodes(batch.config) else 'no'}"
    yield f"excludes_nodes={'yes' if settings.exclude_bad_nodes else 'no'}"
    yield f"check_timeout_s={settings.check_timeout_s}"
    yield f"device={batch.config.device.kind}"
    yield f"needs=({_words(f'{name}={value}' for name, value in batch.needs.items())})"
    yield f"ranks_per_node={batch.layout.ranks_per_node}"
    yield f"components={1 + len(batch.others)}"
    yield f"host_suffix={shlex.quote(site.host_suffix)}"
    yield f"resume=({'--resume' if request.resume else ''})"
    cpus = site.cpus_per_rank
    if not batch.others:
        cpus = cpus and cpus * batch.layout.ranks_per_node // batch.tasks_per_node
        yield f"step=({_words(_step_options(batch, cpus))})"
        return
    every = [(batch.layout, cpus), *((each.layout, each.site.cpus_per_rank) for each in batch.others)]
    for number, (layout, cpus) in enumerate(every):
        nodes, ranks = f"--nodes={layout.num_nodes}", f"--ntasks={layout.num_ranks}"
        size = (nodes, ranks, f"--ntasks-per-node={layout.ranks_per_node}")
        yield f"step{number}=({_words([*size, *_step_options(batch, cpus)])})"
    yield f"ranks_of_component=({' '.join(str(layout.num_ranks) for layout, _ in every)})"


def _words(words: Iterable[str]) -> str:
    return " ".join(map(shlex.quote, words))


def _step_options(batch: Batch, cpus_per_task: int | None) -> Iterator[str]:
    site = batch.config.site
    if cpus_per_task:  # a step does not inherit it from its job
        yield f"--cpus-per-task={cpus_per_task}"
    if site.cpu_bind:
        yield f"--cpu-bind={site.cpu_bind}"
    if site.container_image:
        names = {*EXPORTED, *_OF_THE_RENDEZVOUS, LOCK, *batch.variables}
        names |= {"TMPDIR"} if site.scratch else set()
        names |= {*site.env, *site.node_env, *site.forward, *site.secrets}
        yield f"--container-image={site.container_image}"
        yield f"--container-mounts={','.join([*_own_mounts(batch.request), *site.container_mounts])}"
        # The image's value of a variable takes precedence, unless the variable is named here.
        yield f"--container-env={','.join(sorted(names - _OF_THE_HOST))}"


def _own_mounts(request: JobRequest) -> Iterator[str]:
    """The run directory, and the code of a sweep, which is beside it."""
    yield f"{request.run_dir}:{request.run_dir}"
    source = os.path.dirname(request.code)
    if source and not f"{source}/".startswith(f"{request.run_dir}/"):
        yield f"{source}:{source}"


def _environment(batch: Batch) -> Iterator[str]:
    """Variables of the ranks: the site's own come last, so that they take precedence."""
    site = batch.config.site
    yield ""
    if site.modules:
        yield "type module >/dev/null 2>&1 || . /etc/profile"
    for module in site.modules:
        failure = shlex.quote(f"cannot load the module {module}")
        yield f"module load {shlex.quote(module)} || fail {failure}"
    yield from site.setup
    if site.scratch:
        yield f"export TMPDIR={expandable(site.scratch)}"
    for variables in (batch.variables, site.env):
        yield from (f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items()))
    yield from (f"export {name}={expandable(value)}" for name, value in sorted(site.node_env.items()))


def array(scripts: Sequence[JobScript], request: GroupRequest) -> JobScript | None:
    """The submission of several jobs as the tasks of one job array: counted once by the queue's limits.

    Every task runs the script of its own run, so the array's script has only what sbatch reads.

    None where they do not all request the same, and where a run is several jobs or a heterogeneous one,
    which cannot be in an array.
    """
    heads = [[line for line in script.text.splitlines() if line.startswith(_DIRECTIVE)] for script in scripts]
    heads = [[line for line in head if not line.startswith(_OF_ONE_RUN)] for head in heads]
    is_several = any(HET_JOB in script.text or script.num_jobs > 1 for script in scripts)
    if is_several or any(head != heads[0] for head in heads):
        return None
    throttle = f"%{request.at_once}" if request.at_once else ""
    output = f"{request.folder}/".replace("%", "%%") + f"%a/{EXECUTOR_LOG}"
    lines = [
        "#!/bin/bash",
        f"# {request.name}: {len(scripts)} runs as the tasks of one array.",
        f"{_DIRECTIVE}job-name={quoted(request.name)}",
        f"{_DIRECTIVE}output={quoted(output)}",
        *heads[0],
        f"{_DIRECTIVE}array={_ranges(request.tasks)}{throttle}",
        f'exec /bin/bash {shlex.quote(request.folder)}/"$SLURM_ARRAY_TASK_ID"/job.sh',
    ]
    return JobScript(
        argv=("sbatch", "--parsable", request.script),
        environment={},
        run_dir=request.folder,
        text="\n".join(lines) + "\n",
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as sbatch takes them.

    >>> _ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ",".join("-".join(map(str, span)) for span in spans)
