"""What ``site.options`` may give to sbatch: which options, with which values, and which of them together.

Source: the manual page sbatch(1), Slurm 22.05 to 24.11.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from launcher.base.errors import LEFT_OUT, Fault, LauncherError, left_out, nearest
from launcher.contract.config import LaunchConfig
from launcher.contract.site import SiteConfig, time_s
from launcher_plugins.executors.slurm.continuation import SlurmConfig, first_lead_s
from launcher_plugins.executors.slurm.nodelist import expand

OWN_SETTINGS = {
    "account": "site.account",
    "partition": "site.partition",
    "qos": "site.qos",
    "reservation": "site.reservation",
    "constraint": "site.constraint",
    "nodelist": "site.nodelist",
    "nodefile": "site.nodelist",
    "exclude": "site.exclude",
    "time": "site.time_limit",
    "mem": "site.memory_per_node",
    "cpus-per-task": "site.cpus_per_rank",
    "tres-per-task": "site.cpus_per_rank",
    "cpu-bind": "site.cpu_bind",
    "gpus-per-node": "site.gpu_request",
    "gpus-per-socket": "site.gpu_request",
    "gres": "site.gpu_request",
    "export": "site.forward",
    "nodes": "cluster.nodes",
    "ntasks": "cluster.nodes",
    "ntasks-per-node": "cluster.devices_per_node",
    "tasks-per-node": "cluster.devices_per_node",
    "ntasks-per-gpu": "cluster.devices_per_node",
    "ntasks-per-tres": "cluster.devices_per_node",
    "gpus": "cluster.devices_per_node",
    "gpus-per-task": "cluster.devices_per_node",
    "job-name": "name",
    "container": "site.container_image",
    "container-id": "site.container_image",
    "container-image": "site.container_image",
    "container-env": "site.env",
    "container-mounts": "site.container_mounts",
    "requeue": "executor.continuation",
    "no-requeue": "executor.continuation",
    "kill-on-invalid-dep": "executor.continuation",
    "signal": "executor.save_lead_s",
}
"""Options that have a setting of their own, or would contradict it."""
NOT_ALLOWED = {
    **dict.fromkeys(
        ("gpu-bind", "tres-bind"),
        "hides devices from their ranks, which choose by LOCAL_RANK among all of the node",
    ),
    **dict.fromkeys(("help", "usage", "version", "test-only"), "would submit nothing"),
    **dict.fromkeys(("output", "error"), "would keep the job's output out of the run directory"),
    **dict.fromkeys(
        ("cluster", "clusters"), "would send the job where its state is not asked for: set SLURM_CONF instead"
    ),
    "array": "starts several jobs, and a run is one",
    "wrap": "would replace the script",
    "open-mode": "would lose the output of the start before when a job is requeued",
    "export-file": "would bring variables that site.forward does not list",
    "parsable": "is given already",
    "quiet": "would hide the id of the job",
    "wait": "would block: use trireme wait",
    "distribution": "would put ranks on other nodes than the plan does",
    "no-kill": "would keep a job that has lost a node, and cannot go on, from being started again",
}
_SWITCHES = {"yes": True, "on": True, "no": False, "off": False}
"""What is given for an option that takes no value, and what it means."""


@dataclass(frozen=True)
class Value:
    """What an option takes."""

    pattern: str
    """Of the whole text, in small or capital letters."""
    rule: str
    example: str
    is_optional: bool = False
    """Whether the option can stand alone."""

    def allows(self, given: str | bool) -> bool:
        """Whether sbatch takes it."""
        if isinstance(given, bool):
            return not given or self.is_optional or not self.pattern
        return bool(self.pattern and re.fullmatch(self.pattern, given, re.IGNORECASE))

    def meaning(self, given: str | bool) -> str | bool | None:
        """The value that says what a refused one means; None where that is not known."""
        if self.example == "true":
            return _SWITCHES.get(str(given).lower())
        unspaced = re.sub(r" +(?!\d)", "", str(given))  # digits would join
        return unspaced if given is not True and self.allows(unspaced) else None


def _list_of(words: str, *, separator: str = ",") -> str:
    return rf"(?:{words})(?:{separator}(?:{words}))*"


def _each(names: str, value: Value) -> dict[str, Value]:
    return dict.fromkeys(names.split(), value)


_JOB = r"\d+(?:_(?:\d+|\*))?(?:\+\d+)?"
_TIMES = r"(?:\d+-)?\d+(?::[0-5]?\d){0,2}"
_DAY = r"\d{4}-\d\d?-\d\d?|\d{4}(?:\d\d)?|\d\d?/\d\d?(?:/\d\d)?|\d\d?\.\d\d?(?:\.\d\d)?|today|tomorrow"
_HOUR = r"\d\d?:\d\d(?::\d\d)?(?: ?[ap]m)?|midnight|noon|fika|teatime"
_FLAG = Value("", "takes no value", "true")
_TEXT = Value(".+", "needs a value", "TEXT")
_PYXIS = Value(".+", "needs a value, or none", "true", is_optional=True)
_COUNT = Value(r"[1-9]\d*", "must be a whole number of at least 1", "1")
_SIZE = Value(r"\d+(?:[kmgt]b?)?", "must be a whole number with K, M, G or T (M where none is given)", "4G")
_LENGTH = Value(_TIMES, "must be a time as sbatch takes it: minutes, HH:MM:SS or D-HH:MM:SS", "01:00:00")
_MOMENT = Value(
    rf"now(?:[+-]\d+(?:seconds?|minutes?|hours?|days?|weeks?)?)?|(?:{_DAY})(?:[t -](?:{_HOUR}))?|{_HOUR}",
    "must be a time of day, a date, or now+COUNT with a unit",
    "2030-01-31T16:00:00",
)
_RLIMITS = "(?-i:ALL|NONE|AS|CORE|CPU|DATA|FSIZE|MEMLOCK|NOFILE|NPROC|RSS|STACK)"
_EVENTS = "none|begin|end|fail|requeue|all|invalid_depend|stage_out|time_limit(?:_(?:50|80|90))?|array_tasks"
_MEMORY = "none|no|local|rank|sort|nosort|prefer|p|quiet|q|verbose|v|(?:map|mask)_mem:[0-9a-fx,*]+"
_SPEED = r"[1-9]\d*|low|medium|high|highm1"
_GOVERNORS = "conservative|ondemand|performance|powersave|schedutil|userspace"
_SOURCES = "energy|lustre|network|task"
PASSED_ON: Mapping[str, Value] = {
    **_each("contiguous hold ignore-pbs overcommit oversubscribe reboot spread-job", _FLAG),
    **_each("stepmgr use-min-nodes verbose", _FLAG),
    **_each("batch bb bbf chdir cluster-constraint comment context extra gid input", _TEXT),
    **_each("licenses mail-user mcs-label network power prefer uid wckey", _TEXT),
    **_each("container-entrypoint container-mount-home container-name container-readonly", _PYXIS),
    **_each("container-remap-root container-save container-workdir container-writable", _PYXIS),
    **_each("no-container-entrypoint no-container-mount-home no-container-remap-root", _PYXIS),
    **_each("cores-per-socket cpus-per-gpu mincpus ntasks-per-core ntasks-per-socket", _COUNT),
    **_each("segment sockets-per-node thread-spec threads-per-core", _COUNT),
    **_each("mem-per-cpu mem-per-gpu tmp", _SIZE),
    **_each("delay-boot time-min", _LENGTH),
    "begin": _MOMENT,
    "deadline": replace(_MOMENT, pattern=rf"(?!now$|now-){_MOMENT.pattern}", example="now+2days"),
    "acctg-freq": Value(
        r"\d+|" + _list_of(r"(?:task|energy|network|filesystem)=\d+"),
        "must be SECONDS, or TYPE=SECONDS",
        "30",
    ),
    "core-spec": Value(r"\d+", "must be a whole number", "1"),
    "cpu-freq": Value(
        rf"(?:{_SPEED}|{_GOVERNORS})(?:-(?:{_SPEED})(?::(?:{_GOVERNORS}))?)?",
        "must be MIN, or MIN-MAX",
        "high",
    ),
    "dependency": Value(
        _list_of(rf"singleton|(?:after(?:any|ok|notok|corr|burstbuffer)?:)?{_JOB}(?::{_JOB})*"),
        "must be TYPE:JOB, several divided by commas, as the launcher adds jobs of its own",
        "afterok:123",
    ),
    "exclusive": Value(
        "user|mcs|topo", "takes no value, or one of user, mcs and topo", "true", is_optional=True
    ),
    "extra-node-info": Value(r"(?:\d+|\*)(?::(?:\d+|\*)){0,2}", "must be SOCKETS:CORES:THREADS", "2:16:1"),
    "get-user-env": Value(r"\d+[sl]?|[sl]", "takes seconds, S or L, or no value", "true", is_optional=True),
    "gpu-freq": Value(
        _list_of(rf"(?:memory=)?(?:{_SPEED})|verbose"), "must be low, medium, high or MHz", "medium"
    ),
    "gres-flags": Value(
        _list_of("(?:disable|enforce)-binding|(?:multiple|one)-tasks?-per-sharing|allow-task-sharing"),
        "must be disable-binding or enforce-binding",
        "enforce-binding",
    ),
    "hint": Value(
        "(?:compute|memory)_bound|(?:no)?multithread",
        "must be compute_bound, memory_bound, multithread or nomultithread",
        "nomultithread",
    ),
    "mail-type": Value(
        _list_of(_EVENTS), "must be BEGIN, END, FAIL and others of sbatch's --mail-type", "END,FAIL"
    ),
    "mem-bind": Value(_list_of(_MEMORY), "must be what sbatch's --mem-bind takes", "local"),
    "nice": Value(r"-?\d{1,9}", "must be a whole number", "100", is_optional=True),
    "oom-kill-step": Value("[01]", "must be 0 or 1", "1", is_optional=True),
    "priority": Value(r"\d{1,10}|top", "must be a whole number, or TOP", "100"),
    "profile": Value(rf"all|none|{_list_of(_SOURCES)}", "must be all, none or some of " + _SOURCES, "task"),
    "propagate": Value(
        _list_of(_RLIMITS), "must be names of limits, such as NOFILE", "true", is_optional=True
    ),
    "resv-ports": Value(r"\d+", "must be a whole number", "true", is_optional=True),
    "switches": Value(rf"[1-9]\d*(?:@{_TIMES})?", "must be COUNT, or COUNT@TIME", "1@00:10:00"),
    "wait-all-nodes": Value("[01]", "must be 0 or 1", "1"),
}
"""The other options of sbatch, and those of pyxis."""
KNOWN = OWN_SETTINGS.keys() | NOT_ALLOWED.keys() | PASSED_ON.keys()
"""Every option of sbatch, to recognize mistyped ones."""
EXCLUDING = (
    ("mem-per-cpu", "mem-per-gpu"),
    ("core-spec", "thread-spec"),
    ("exclusive", "oversubscribe"),
    ("hint", "ntasks-per-core"),
    ("hint", "threads-per-core"),
    ("hint", "extra-node-info"),
    ("extra-node-info", "ntasks-per-core"),
    ("extra-node-info", "threads-per-core"),
)
"""Options that exclude each other."""
BESIDE = {
    "mem-per-cpu": "site.memory_per_node",
    "mem-per-gpu": "site.memory_per_node",
    "cpus-per-gpu": "site.cpus_per_rank",
    "hint": "site.cpu_bind",
}
"""Options that exclude a setting."""
_OPTION = re.compile(r"[a-z][a-z0-9-]*")


def option_faults(site: SiteConfig) -> Iterator[Fault]:
    """Faults of ``site.options``, each by itself: options with a setting of their own, mistyped names, and
    values that sbatch does not take.

    A name that is not plainly a mistyped one is passed on: a site's SPANK plugins add options.
    """
    for name, value in site.options.items():
        path = f"site.options.{name}"
        if not _OPTION.fullmatch(name):
            rule = "is not an option's name: small letters, digits and dashes, none in front"
            right = name.strip("-").replace("_", "-").lower()
            yield Fault(path, value, rule, f"Write {right}.", ways=(_renamed(name, right, value),))
        elif name in OWN_SETTINGS:
            rule = f"is set by {OWN_SETTINGS[name]} and cannot be given here too"
            fix = f"Set {OWN_SETTINGS[name]}, and remove {path}."
            yield Fault(path, value, rule, fix, ways=({path: LEFT_OUT},))
        elif name in NOT_ALLOWED:
            yield left_out(path, value, f"--{name} {NOT_ALLOWED[name]}")
        elif name in PASSED_ON:
            if not (takes := PASSED_ON[name]).allows(value):
                meant = takes.meaning(value)
                ways = () if meant is None else ({path: meant},)
                fix = "" if ways else f"Write it like {takes.example}."
                yield Fault(path, value, takes.rule, fix, ways=ways)
        elif match := _meant(name):
            rule, fix = "sbatch has no such option", f"Did you mean {match}?"
            yield Fault(path, value, rule, fix, ways=(_renamed(name, match, value),))


def _meant(name: str) -> str | None:
    """The option that a name begins, as sbatch completes it, or from which a typing error made it: one letter
    that is wrong, missing or too many, transposed letters, or other dashes."""
    if begun := next((known for known in sorted(KNOWN) if known.startswith(name)), None):
        return begun
    known = nearest(name, KNOWN)
    given, right = name.replace("-", ""), (known or "").replace("-", "")
    is_mistyped = sorted(given) == sorted(right) or any(
        given[:at] == right[:at]
        and (given[at + 1 :] in (right[at:], right[at + 1 :]) or given[at:] == right[at + 1 :])
        for at in range(len(right) + 1)
    )
    return known if is_mistyped else None


def _renamed(name: str, other: str, value: str | int | bool) -> Mapping[str, str | int | bool]:
    """A change to an option of another name with the same value."""
    return {f"site.options.{name}": LEFT_OUT, f"site.options.{other}": value}


def clash_faults(config: LaunchConfig, *, asks_for_devices: bool) -> Iterator[Fault]:
    """Options that exclude each other, or contradict other settings; a binding per task, where one task
    starts all ranks of a node."""
    site = config.site
    given = {name: value for name, value in site.options.items() if value is not False}
    for first, second in EXCLUDING:
        if first in given and second in given:
            rule = f"excludes site.options.{first}"
            path = f"site.options.{second}"
            ways = tuple({f"site.options.{name}": LEFT_OUT} for name in (second, first))
            yield Fault(path, given[second], rule, "Remove one of them.", ways=ways)
    for name, setting in BESIDE.items():
        other = getattr(site, setting.removeprefix("site."))
        if name in given and other is not None:
            path, fix = f"site.options.{name}", f"Remove it, or set {setting}=null."
            without = {setting: None}
            rule = f"excludes {setting}={other}"
            yield Fault(path, given[name], rule, fix, ways=({path: LEFT_OUT}, without))
    for name in ("cpus-per-gpu", "mem-per-gpu"):
        if name in given and not asks_for_devices:
            rule = "is counted per GPU, and the job asks for none (site.gpu_request, device.kind)"
            yield left_out(f"site.options.{name}", given[name], rule)
    if "batch" in given and site.constraint is None:
        rule = "must be a part of site.constraint, which is null"
        fix, ways = "Set site.constraint, or remove it.", ({"site.options.batch": LEFT_OUT},)
        yield Fault("site.options.batch", given["batch"], rule, fix, ways=ways)
    yield from _shortest_time_faults(config)
    binding = site.cpu_bind or ""
    if config.executor.settings(SlurmConfig).starter == "torchrun" and re.search("rank|map|mask", binding):
        rule = "binds each task to a processor, and executor.starter=torchrun has one task for a whole node"
        ways = ({"site.cpu_bind": "cores"}, {"executor.starter": "srun"})
        yield Fault("site.cpu_bind", binding, rule, ways=ways)


def _shortest_time_faults(config: LaunchConfig) -> Iterator[Fault]:
    """A time-min, to which Slurm may shorten the time limit, that is longer, or leaves no time to train."""
    site, lead_s = config.site, first_lead_s(config)
    given = site.options.get("time-min")
    shortest_s = time_s(str(given))
    if shortest_s is None:
        return
    if shortest_s > site.time_limit_s:
        rule, fix = f"is longer than site.time_limit={site.time_limit}", "Give a shorter time."
        yield Fault("site.options.time-min", given, rule, fix)
    if shortest_s <= lead_s:
        rule = f"the ranks might be asked to stop as they start, since executor.save_lead_s is {lead_s}"
        yield Fault(
            "site.options.time-min", given, rule, "Give a longer time, or a smaller executor.save_lead_s."
        )


def node_faults(site: SiteConfig, num_nodes: int) -> Iterator[Fault]:
    """Lists of nodes that are none, contradict each other, or name more nodes than the job has."""
    names: dict[str, tuple[str, ...]] = {}
    for setting in ("nodelist", "exclude"):
        text = getattr(site, setting)
        try:
            names[setting] = expand(text) if text is not None else ()
        except LauncherError as error:
            rule, _, fix = str(error).removeprefix(f"{text!r} ").rpartition(". ")
            yield Fault(f"site.{setting}", text, rule, fix)
    listed, excluded = names.get("nodelist", ()), names.get("exclude", ())
    if both := sorted({*listed} & {*excluded}):
        rule = f"names {', '.join(both[:3])}, which site.exclude names, too"
        yield Fault("site.nodelist", site.nodelist, rule, "Remove it from one of them.")
    if len({*listed}) < len(listed):
        yield Fault("site.nodelist", site.nodelist, "names a node twice", "Name it once.")
    if len(listed) > num_nodes:
        rule = f"a job includes all of the {len(listed)} nodes, and cluster.nodes={num_nodes}"
        yield Fault("site.nodelist", site.nodelist, rule, f"Name {num_nodes} of them, or fewer.")
