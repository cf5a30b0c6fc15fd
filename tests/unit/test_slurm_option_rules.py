"""What may be given in site.options: every option of sbatch, its values, and what excludes it."""

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.base.errors import PlanError
from launcher.contract.site import SiteConfig
from launcher.runs.render import render
from launcher_plugins.executors.slurm.executor import Slurm
from launcher_plugins.executors.slurm.option_rules import (
    NOT_ALLOWED,
    OWN_SETTINGS,
    PASSED_ON,
    node_faults,
    option_faults,
)
from tests.helpers.slurm_stage import REQUEST

SLURM = ("executor=slurm", "cluster.devices_per_node=2")
SBATCH = [
    "account",
    "acctg-freq",
    "array",
    "batch",
    "bb",
    "bbf",
    "begin",
    "chdir",
    "cluster",
    "cluster-constraint",
    "clusters",
    "comment",
    "constraint",
    "container",
    "container-id",
    "context",
    "contiguous",
    "core-spec",
    "cores-per-socket",
    "cpu-freq",
    "cpus-per-gpu",
    "cpus-per-task",
    "deadline",
    "delay-boot",
    "dependency",
    "distribution",
    "error",
    "exclude",
    "exclusive",
    "export",
    "export-file",
    "extra",
    "extra-node-info",
    "get-user-env",
    "gid",
    "gpu-bind",
    "gpu-freq",
    "gpus",
    "gpus-per-node",
    "gpus-per-socket",
    "gpus-per-task",
    "gres",
    "gres-flags",
    "help",
    "hint",
    "hold",
    "ignore-pbs",
    "input",
    "job-name",
    "kill-on-invalid-dep",
    "licenses",
    "mail-type",
    "mail-user",
    "mcs-label",
    "mem",
    "mem-bind",
    "mem-per-cpu",
    "mem-per-gpu",
    "mincpus",
    "network",
    "nice",
    "no-kill",
    "no-requeue",
    "nodefile",
    "nodelist",
    "nodes",
    "ntasks",
    "ntasks-per-core",
    "ntasks-per-gpu",
    "ntasks-per-node",
    "ntasks-per-socket",
    "ntasks-per-tres",
    "oom-kill-step",
    "open-mode",
    "output",
    "overcommit",
    "oversubscribe",
    "parsable",
    "partition",
    "power",
    "prefer",
    "priority",
    "profile",
    "propagate",
    "qos",
    "quiet",
    "reboot",
    "requeue",
    "reservation",
    "resv-ports",
    "segment",
    "signal",
    "sockets-per-node",
    "spread-job",
    "stepmgr",
    "switches",
    "tasks-per-node",
    "test-only",
    "thread-spec",
    "threads-per-core",
    "time",
    "time-min",
    "tmp",
    "tres-bind",
    "tres-per-task",
    "uid",
    "usage",
    "use-min-nodes",
    "verbose",
    "version",
    "wait",
    "wait-all-nodes",
    "wckey",
    "wrap",
]
"""Of Slurm 22.05 to 24.11."""


def told(**options):
    return [str(fault) for fault in option_faults(replace(SiteConfig(), options=options))]


def refused(make_plan, *words):
    """What is wrong with a plan for Slurm."""
    with pytest.raises(PlanError) as raised:
        render(make_plan(*SLURM, *words), Path(REQUEST.run_dir))
    return str(raised.value)


def test_every_option_of_sbatch_is_set_by_a_setting_or_refused_or_passed_on():
    ours = [*OWN_SETTINGS, *NOT_ALLOWED, *PASSED_ON]
    of_pyxis = [name for name in ours if "container-" in name and name != "container-id"]
    assert sorted(ours) == sorted([*SBATCH, "cpu-bind", *of_pyxis])


def test_an_option_of_pyxis_is_no_mistyped_one():
    assert told(**{"container-writable": True, "container-workdir": "/work"}) == []
    (fault,) = told(**{"container-env": "A"})
    assert fault.endswith("Set site.env, and remove site.options.container-env.")


@pytest.mark.parametrize("name", PASSED_ON)
def test_the_example_of_an_option_can_be_given_and_what_it_does_not_take_cannot(name):
    takes = PASSED_ON[name]
    assert told(**{name: True if takes.example == "true" else takes.example}) == []
    assert told(**{name: False}) == []
    wrong = "" if takes.pattern == ".+" else "soon?"
    (fault,) = told(**{name: wrong})
    shown = wrong or '""'
    assert fault == f"site.options.{name}={shown}: {takes.rule}. Write it like {takes.example}."


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("begin", "now+1hour"),
        ("begin", "2026-01-20T12:34:00"),
        ("begin", "16:00"),
        ("begin", "01/20/26-4:30 PM"),
        ("dependency", "singleton"),
        ("dependency", "afterok:20:21_3,afterany:23"),
        ("dependency", "after:20+5"),
        ("exclusive", "user"),
        ("get-user-env", "10L"),
        ("mail-type", "end,TIME_LIMIT_90"),
        ("mem-bind", "quiet,map_mem:0,1"),
        ("nice", "-5"),
        ("cpu-freq", "low-high:OnDemand"),
        ("propagate", "NOFILE,STACK"),
        ("switches", "1@3-00"),
        ("time-min", "2-12:30"),
        ("tmp", "100GB"),
        ("mem-per-cpu", "4gb"),
        ("acctg-freq", "task=30,energy=5"),
    ],
)
def test_a_value_is_taken_in_every_form_that_sbatch_takes(name, value):
    assert told(**{name: value}) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("contiguous", "yes"),
        ("mem-per-cpu", "4 GB"),
        ("mincpus", "0"),
        ("mail-type", "END,DONE"),
        ("time-min", "1h"),
        ("begin", "later"),
        ("dependency", "afterok:1?afterok:2"),
        ("dependency", "after everything"),
        ("exclusive", "no"),
    ],
)
def test_a_value_that_sbatch_does_not_take_is_refused(name, value):
    (fault,) = told(**{name: value})
    assert fault.startswith(f"site.options.{name}={value}: ")


@pytest.mark.parametrize(
    ("name", "whole"), [("part", "partition"), ("tasks", "tasks-per-node"), ("w", "wait")]
)
def test_the_beginning_of_a_name_is_refused_as_sbatch_takes_it_for_the_name(name, whole):
    assert told(**{name: "x"}) == [f"site.options.{name}=x: sbatch has no such option. Did you mean {whole}?"]


def test_an_option_that_needs_a_value_does_not_stand_alone():
    (fault,) = told(**{"mail-type": True})
    assert fault.endswith("Write it like END,FAIL.")


@pytest.mark.parametrize(
    ("name", "value", "way"),
    [
        ("contiguous", "yes", True),
        ("exclusive", "No", False),
        ("mem-per-cpu", "4 GB", "4GB"),
        ("mail-type", "END, FAIL", "END,FAIL"),
        ("dependency", "afterok:1?afterany:2", None),
        ("dependency", "afterok:1 2", None),
        ("mem-per-cpu", "4 GiB", None),
        ("comment", True, None),
        ("oom-kill-step", "no", None),
    ],
)
def test_another_value_is_advised_only_where_it_means_the_same(name, value, way):
    (fault,) = option_faults(replace(SiteConfig(), options={name: value}))
    assert fault.ways == (() if way is None else ({f"site.options.{name}": way},))
    assert ("Write it like" in str(fault)) == (way is None)
    if way is not None:
        assert told(**{name: way}) == []


def test_what_hides_the_id_of_the_job_or_its_state_is_refused():
    quiet, clusters = told(quiet=True, clusters="other")
    assert "--quiet would hide the id of the job. Remove site.options.quiet." in quiet
    assert "--clusters would send the job where its state is not asked for: set SLURM_CONF" in clusters


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("tres-per-task", "site.cpus_per_rank"),
        ("ntasks-per-gpu", "cluster.devices_per_node"),
        ("tasks-per-node", "cluster.devices_per_node"),
        ("nodefile", "site.nodelist"),
        ("container", "site.container_image"),
    ],
)
def test_an_option_that_would_contradict_the_plan_names_the_setting(name, setting):
    (fault,) = told(**{name: "1"})
    assert fault.endswith(f"Set {setting}, and remove site.options.{name}.")


@pytest.mark.parametrize("name", ["gpu-bind", "tres-bind"])
def test_a_binding_that_hides_devices_is_refused(name):
    (fault,) = told(**{name: "closest"})
    assert fault.startswith(f"site.options.{name}=closest: --{name} hides devices from their ranks")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("+site.options.mem-per-cpu=1G", "site.memory_per_node=64G"),
            "site.options.mem-per-cpu=1G: excludes site.memory_per_node=64G. Remove it, or set "
            "site.memory_per_node=null.",
        ),
        (
            ("+site.options.mem-per-cpu=1G", "+site.options.mem-per-gpu=1G", "device.kind=cuda"),
            "site.options.mem-per-gpu=1G: excludes site.options.mem-per-cpu. Remove one of them.",
        ),
        (
            ("+site.options.cpus-per-gpu=4", "site.cpus_per_rank=4", "device.kind=cuda"),
            "site.options.cpus-per-gpu=4: excludes site.cpus_per_rank=4.",
        ),
        (
            ("+site.options.hint=nomultithread", "site.cpu_bind=cores"),
            "site.options.hint=nomultithread: excludes site.cpu_bind=cores.",
        ),
        (
            ("+site.options.cpus-per-gpu=4",),
            "site.options.cpus-per-gpu=4: is counted per GPU, and the job asks for none",
        ),
        (("+site.options.batch=fast",), "site.options.batch=fast: must be a part of site.constraint"),
        (
            ("+site.options.time-min=20", "site.time_limit=00:10:00"),
            "site.options.time-min=20: is longer than site.time_limit=00:10:00. Give a shorter time.",
        ),
        (
            ("+site.options.time-min=2", "train.checkpoint_interval=10"),
            "site.options.time-min=2: the ranks might be asked to stop as they start, since "
            "executor.save_lead_s is 120.",
        ),
    ],
)
def test_what_excludes_each_other_is_refused(make_plan, words, message):
    assert message in refused(make_plan, *words)


def test_an_option_beside_a_setting_that_is_not_set_is_passed_on(make_plan):
    words = ("+site.options.mem-per-cpu=1G", "+site.options.hint=nomultithread", "+site.options.time-min=5")
    text = Slurm().render(make_plan(*SLURM, *words), REQUEST).text
    assert "#SBATCH --mem-per-cpu=1G\n" in text
    assert "#SBATCH --hint=nomultithread\n" in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"nodelist": "node[3-1]"},
            "site.nodelist=node[3-1]: is no list of nodes ('3-1' is no rising range with one width). Give "
            "names and ranges, such as node[01-03,07],gpu1.",
        ),
        ({"exclude": "node[1"}, "site.exclude=node[1: is no list of nodes (at '[1'). Give names"),
        ({"nodelist": "/etc/hosts"}, "site.nodelist=/etc/hosts: is no list of nodes"),
        (
            {"nodelist": "a,b", "exclude": "b,c"},
            "site.nodelist=a,b: names b, which site.exclude names, too. Remove it from one of them.",
        ),
        ({"nodelist": "a,a"}, "site.nodelist=a,a: names a node twice. Name it once."),
        (
            {"nodelist": "a[1-3]"},
            "site.nodelist=a[1-3]: a job includes all of the 3 nodes, and cluster.nodes=2. Name 2 of them",
        ),
    ],
)
def test_a_list_of_nodes_that_slurm_refuses_is_refused(settings, message):
    (fault,) = node_faults(replace(SiteConfig(), **settings), 2)
    assert str(fault).startswith(message)


def test_nodes_are_checked_with_the_plan(make_plan):
    assert "site.nodelist=node[3-1]: is no list" in refused(make_plan, "site.nodelist='node[3-1]'")


def test_a_mistyped_option_is_refused_with_the_nearest_one():
    assert told(**{"mail-tpye": "END"}) == [
        "site.options.mail-tpye=END: sbatch has no such option. Did you mean mail-type?"
    ]


@pytest.mark.parametrize(
    "name", ["zfs-snapshot", "ear-cpufreq", "ear-policy", "gpufreq-min", "job-names-file"]
)
def test_an_option_of_a_sites_own_plugin_is_passed_on(name):
    assert told(**{name: "yes"}) == []


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("mail-typ3", "mail-type"),
        ("mailtype", "mail-type"),
        ("mail-ttype", "mail-type"),
        ("mal-type", "mail-type"),
        ("cpu-ferq", "cpu-freq"),
        ("cpuspertask", "cpus-per-task"),
    ],
)
def test_a_typing_error_is_told_from_another_name(name, right):
    (fault,) = told(**{name: "x"})
    assert fault.endswith(f"Did you mean {right}?")


def test_an_option_that_follows_from_a_setting_names_it():
    assert told(nodes="4") == [
        "site.options.nodes=4: is set by cluster.nodes and cannot be given here too. "
        "Set cluster.nodes, and remove site.options.nodes."
    ]


@pytest.mark.parametrize("name", ["requeue", "no-requeue", "kill-on-invalid-dep"])
def test_only_one_setting_says_who_starts_the_run_again(name):
    (fault,) = told(**{name: True})
    assert fault.endswith(f"Set executor.continuation, and remove site.options.{name}.")


def test_an_option_that_breaks_the_job_says_why():
    (fault,) = told(**{"gpu-bind": "closest"})
    assert fault.startswith("site.options.gpu-bind=closest: --gpu-bind hides devices from their ranks")


@pytest.mark.parametrize("name", ["--mail-type", "mail_type", "a;b"])
def test_what_is_no_option_name_is_refused(name):
    (fault,) = told(**{name: "x"})
    assert "small letters, digits and dashes, none in front" in fault


@pytest.mark.parametrize("binding", ["rank", "map_cpu:0,1", "quiet,mask_cpu:0x3"])
def test_a_task_for_a_whole_node_is_not_bound_to_one_processor(make_plan, binding):
    words = ("executor=slurm", "cluster.devices_per_node=2", f"site.cpu_bind='{binding}'")
    assert "#SBATCH" in Slurm().render(make_plan(*words), REQUEST).text
    with pytest.raises(
        PlanError, match=r"site\.cpu_bind=.* one task for a whole node\. Set site\.cpu_bind=cores"
    ):
        render(make_plan(*words, "executor.starter=torchrun"), Path(REQUEST.run_dir))
