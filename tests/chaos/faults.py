"""The faults of the chaos suite: what strikes a run, where, and how the run is to go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Place = Literal["local", "slurm"]
GoesOn = Literal["unharmed", "itself", "resume"]
INTERVAL = 10
NUM_STEPS = 60
SCRATCH = "/tmp/trireme-chaos-scratch"
"""A folder that is full on one of the nodes."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault."""

    name: str
    moment: str = "step"
    """Where the rank is when it strikes, a word of `tests.chaos.hooks`."""
    step: int = 25
    """The step from which on it strikes."""
    rank: int = 1
    shell: str = ""
    """What is done then, by the rank, which waits for it. PID is the rank, AGENT its parent, LAUNCHER that
    one's parent, RUN the run directory."""
    does: str = ""
    """A function of `tests.chaos.hooks`."""
    outside: str = ""
    """What is done by the suite once it struck; NODE is the node of the last rank, JOB the job."""
    slow_s: float = 0.0
    """How much longer each step takes in the start that is struck: ranks that are told to stop agree on that
    about once a second."""
    after: str = ""
    """What is done once all ranks have ended, ahead of the resume."""
    goes_on: GoesOn = "resume"
    """``unharmed``: the start that is struck trains to the end. ``itself``: the run is started again without
    anybody's help. ``resume``: it ends, and goes on with ``--resume``."""
    overrides: tuple[str, ...] = ()
    layout: tuple[str, ...] = ()
    """Settings that the run has which it is compared with, too."""
    places: tuple[Place, ...] = ("local",)
    on: Literal["", "full disk", "closed output", "two resumes"] = ""
    """What else is particular to it: a run root on a small disk, an output that nobody reads on, two resumes
    at once of which one is refused."""
    names: str = ""
    """A pattern of what the starts that were struck have to say."""
    forgets_data: bool = False
    is_sabotage: bool = False
    """Whether the run has to be found unequal."""


SERVERS = (
    *("cluster.devices_per_node=4", "parallel.pp=1", "parallel.dp=2"),
    *("architecture=parameter_server", "architecture.servers=2"),
)
"""Two workers, and two servers, which hold a shard each."""


def _kills() -> list[Fault]:
    both: tuple[Place, ...] = ("local", "slurm")
    resume = [
        Fault(name="rank 0 SIGKILL", rank=0, shell="kill -9 $PID", names="rank 0", places=both),
        Fault(name="rank 1 SIGKILL", shell="kill -9 $PID", names="rank 1", places=both),
        Fault(name="rank SIGKILL behind the first checkpoint", step=INTERVAL, shell="kill -9 $PID"),
        Fault(name="rank SIGTERM", shell="kill -TERM $PID", slow_s=0.1),
        Fault(name="rank SIGINT", shell="kill -INT $PID", slow_s=0.1),
        Fault(name="rank SIGSTOP", shell="kill -STOP $PID", overrides=("run.timeout_s=5",), names="rank 1"),
        Fault(name="all ranks SIGKILL", shell='pkill -9 -f "process.main $RUN/plan.json"'),
        Fault(name="torchrun SIGKILL", shell="kill -9 $AGENT"),
        Fault(name="torchrun SIGTERM", shell="kill -TERM $AGENT", slow_s=0.1),
        Fault(name="torchrun SIGINT", shell="kill -INT $AGENT", slow_s=0.1),
        Fault(name="launcher SIGKILL", shell="kill -9 $LAUNCHER", slow_s=0.1),
        Fault(name="launcher SIGTERM", shell="kill -TERM $LAUNCHER", slow_s=0.1),
        Fault(name="launcher SIGINT", shell="kill -INT $LAUNCHER", slow_s=0.1),
        Fault(name="launcher SIGHUP", shell="kill -HUP $LAUNCHER", slow_s=0.1),
        Fault(name="launcher SIGUSR1", shell="kill -USR1 $LAUNCHER", slow_s=0.1),
    ]
    at_the_end = [
        Fault(
            name=f"{whom} behind the last save",
            moment="renamed",
            rank=0,
            step=NUM_STEPS - 5,
            shell=f"kill {how}",
            goes_on="unharmed",
        )
        for whom, how in {"torchrun SIGTERM": "-TERM $AGENT", "rank SIGTERM": "-TERM $PID"}.items()
    ]
    back = "(sleep 2; kill -CONT $X) >/dev/null 2>&1 &"
    return [
        *resume,
        *at_the_end,
        Fault(
            name="launcher stopped for 2 s",
            shell="X=$LAUNCHER; kill -STOP $X; " + back,
            goes_on="unharmed",
            slow_s=0.1,
        ),
        Fault(
            name="torchrun stopped for 2 s",
            shell="X=$AGENT; kill -STOP $X; " + back,
            goes_on="unharmed",
            slow_s=0.1,
        ),
        Fault(
            name="rank stopped for 2 s",
            shell="X=$PID; (sleep 2; kill -CONT $X) & kill -STOP $X",
            goes_on="unharmed",
        ),
        Fault(
            name="rank SIGKILL, restarted",
            shell="kill -9 $PID",
            overrides=("executor.max_restarts=1",),
            goes_on="unharmed",
        ),
    ]


def _in_a_write() -> list[Fault]:
    kill = "kill -9 $PID"
    checkpoint = {
        "a shard": ("shard", 1),
        "a shard's index": ("index", 1),
        "the marker": ("marker", 0),
        "ahead of the rename": ("rename", 0),
        "behind the rename": ("renamed", 0),
        "ahead of the removal of the oldest": ("prune", 0),
    }
    fold = {"ahead of a window": "window", "behind its sums": "fold", "behind its rename": "folded"}
    return [
        *(
            Fault(name=f"SIGKILL in a checkpoint: {name}", moment=moment, rank=rank, step=28, shell=kill)
            for name, (moment, rank) in checkpoint.items()
        ),
        *(
            Fault(name=f"SIGKILL in the metrics: {name}", moment=moment, step=28, shell=kill)
            for name, moment in fold.items()
        ),
    ]


def _disks() -> list[Fault]:
    fill, free = "cat /dev/zero >$RUN/ballast 2>/dev/null", "rm -f $RUN/ballast"
    write = "printf X | dd status=none bs=1 conv=notrunc"
    newest = "cd $RUN/checkpoints; cd $(ls -d step-???????? | tail -n1)"
    return [
        Fault(
            name="disk full at a checkpoint",
            moment="shard",
            step=28,
            shell=fill,
            after=free,
            on="full disk",
            names="No space left",
        ),
        Fault(name="disk full at the metrics", shell=fill, after=free, on="full disk", names="No space left"),
        Fault(
            name="disk full at the log",
            moment="renamed",
            rank=0,
            step=28,
            shell=fill,
            after=free,
            on="full disk",
            names="No space left",
        ),
        Fault(
            name="disk full at one rank's index",
            moment="index",
            step=28,
            does="fill_disk",
            names="No space left",
        ),
        Fault(
            name="run directory moved",
            shell="mv $RUN $RUN.moved",
            slow_s=0.1,
            after="rm -rf $RUN; mv $RUN.moved $RUN",
        ),
        Fault(
            name="mount lost",
            shell="mv $RUN $RUN.moved; mkdir $RUN",
            slow_s=0.1,
            after="rm -rf $RUN; mv $RUN.moved $RUN",
        ),
        Fault(
            name="run directory read-only",
            shell="mount --bind $RUN $RUN && mount -o remount,bind,ro $RUN",
            after="umount $RUN",
            slow_s=0.1,
        ),
        *(
            Fault(
                name=f"newest checkpoint: {name}", step=35, shell="kill -9 $PID", after=f"{newest}; {damage}"
            )
            for name, damage in {
                "bytes of a shard": f"{write} of=shard-00000.safetensors seek=2000",
                "a shard cut": "truncate -s -10 shard-00001.safetensors",
                "a shard gone": "rm shard-00001.safetensors",
                "an index": f"{write} of=shard-00001.json seek=40",
                "the marker empty": ": >complete.json",
                "the marker gone": "rm complete.json",
            }.items()
        ),
        Fault(
            name="metrics cut",
            step=35,
            shell="kill -9 $PID",
            after="truncate -s -40 $RUN/metrics/rank-00001.jsonl",
        ),
        Fault(
            name="heartbeats and status gone",
            shell="kill -9 $PID",
            after="rm -rf $RUN/status.json $RUN/heartbeats",
        ),
    ]


def _others() -> list[Fault]:
    return [
        Fault(name="two resumes at once", shell="kill -9 $PID", on="two resumes"),
        Fault(name="output closed", on="closed output", goes_on="unharmed", slow_s=0.05),
        Fault(name="clock set back an hour", does="set_clock_back", goes_on="unharmed"),
        Fault(name="slow rank", slow_s=0.1, goes_on="unharmed"),
        Fault(name="weights that are not a number", does="spoil_weights", names="is not finite"),
        Fault(
            name="server SIGKILL",
            shell="kill -9 $(sed 's/.*\"pid\": \\([0-9]*\\).*/\\1/' $RUN/exit/rank-2.process)",
            layout=SERVERS,
            slow_s=0.1,
            names="rank 2",
        ),
        Fault(name="worker of servers SIGKILL", shell="kill -9 $PID", layout=SERVERS, names="rank 1"),
        Fault(name="out of memory", does="exhaust_memory", names="OutOfMemory|out of memory"),
        Fault(name="exception in the step", does="fail", names="an item of the user's is broken"),
        Fault(name="exception in the update", moment="apply", rank=0, does="fail", names="is broken"),
        Fault(name="exception at the start", moment="start", step=0, does="fail", names="is broken"),
        Fault(name="hang in a step", does="hang", overrides=("run.timeout_s=5",), names="rank 1"),
        Fault(
            name="hang in a save",
            moment="marker",
            rank=0,
            step=28,
            does="hang",
            overrides=("run.timeout_s=5",),
        ),
        Fault(name="connections cut", does="cut_network"),
        Fault(name="garbage to its ports", does="send_garbage", goes_on="unharmed"),
    ]


def _of_slurm() -> list[Fault]:
    where: tuple[Place, ...] = ("slurm",)
    return [
        Fault(name="scancel", outside="scancel $JOB", slow_s=0.1, places=where),
        Fault(
            name="scontrol requeue",
            outside="scontrol requeue $JOB",
            slow_s=0.1,
            goes_on="itself",
            places=where,
        ),
        Fault(
            name="job told to save",
            outside="scancel --batch --signal=USR1 $JOB",
            slow_s=0.1,
            goes_on="itself",
            places=where,
        ),
        Fault(name="step cancelled", outside="scancel $JOB.0", slow_s=0.1, places=where),
        Fault(
            name="node crash",
            outside='"$SLURM_CLUSTER" crash $NODE "$CLUSTER"',
            after='"$SLURM_CLUSTER" revive $NODE "$CLUSTER"',
            slow_s=0.1,
            goes_on="itself",
            places=where,
        ),
        Fault(
            name="bad node",
            outside=(
                'first=$(cat "$CLUSTER/run/namespace-$NODE.pid"); mkdir -p $SCRATCH; '
                "nsenter --mount --target=$(pgrep -P $first) mount -t tmpfs -o size=64k none $SCRATCH; "
                "scontrol requeue $JOB"
            ).replace("$SCRATCH", SCRATCH),
            slow_s=0.1,
            goes_on="itself",
            overrides=(f"site.scratch={SCRATCH}", "executor.min_node_speed=0.1"),
            names=r"is unfit: too little room for temporary files.*[\s\S]*does not get node\d again",
            places=where,
        ),
        Fault(
            name="preempted",
            outside="sbatch --partition=urgent --nodelist=$NODE --exclusive --output=/dev/null --wrap=true",
            slow_s=0.1,
            goes_on="itself",
            places=where,
        ),
        Fault(
            name="slurmctld restarted",
            outside='kill $(cat "$CLUSTER/run/slurmctld.pid"); sleep 1; PATH=$PATH:/usr/sbin slurmctld',
            slow_s=0.1,
            goes_on="unharmed",
            places=where,
        ),
        Fault(
            name="power cut of the cluster",
            outside='kill -9 $(cat "$CLUSTER/run/slurmctld.pid"); "$SLURM_CLUSTER" start "$CLUSTER"',
            slow_s=0.1,
            goes_on="itself",
            places=where,
        ),
        Fault(
            name="time limit",
            outside="scontrol update JobId=$JOB TimeLimit=1",
            slow_s=1.0,
            goes_on="itself",
            overrides=("executor.save_lead_s=20",),
            places=where,
        ),
    ]


SABOTAGE = (
    Fault(
        name="sabotage: a step without its update", does="skip_update", goes_on="unharmed", is_sabotage=True
    ),
    Fault(
        name="sabotage: data from the beginning", shell="kill -9 $PID", forgets_data=True, is_sabotage=True
    ),
)
"""Runs that must be found unequal."""
FAULTS = (*_kills(), *_in_a_write(), *_disks(), *_others(), *_of_slurm(), *SABOTAGE)
