from dataclasses import replace
from pathlib import Path

import pytest

from launcher.base.errors import PlanError
from launcher.contract.job import JobRequest
from launcher.runs.render import render
from launcher_plugins.executors.slurm.executor import Slurm
from launcher_plugins.executors.slurm.options import NodeLayout, directives, node_layout, quoted

REQUEST = JobRequest(run_dir="/runs/a", plan_sha256="5a" * 32, python="/venv/bin/python")
ON_H100 = ("executor=slurm", "device=h100", "cluster=dgx_h100", "parallel.dp=4")


def placed(config, world_size):
    place = node_layout(config, world_size)
    assert isinstance(place, NodeLayout), place
    return place


def lines(plan, tasks_per_node=8, **site):
    """The directives of a plan under some settings of the site."""
    config = replace(plan.config, site=replace(plan.config.site, **site))
    return directives(config, placed(config, plan.world_size), REQUEST, tasks_per_node=tasks_per_node)


@pytest.mark.parametrize(
    ("site", "line"),
    [
        ({}, "#SBATCH --gpus-per-node=8"),
        ({"gpu_request": "gres"}, "#SBATCH --gres=gpu:8"),
        ({"gpu_request": "gres_typed", "gpu_type": "h100"}, "#SBATCH --gres=gpu:h100:8"),
    ],
)
def test_gpus_are_asked_for_in_the_way_of_the_site(make_plan, site, line):
    found = lines(make_plan(*ON_H100), **site)
    assert [asked for asked in found if "gpu" in asked or "gres" in asked] == [line]


def test_a_site_that_gives_whole_nodes_is_asked_for_no_gpu(make_plan):
    assert not [line for line in lines(make_plan(*ON_H100), gpu_request="none") if "gpu" in line]


def test_ranks_on_the_cpu_ask_for_no_gpu(make_plan):
    plan = make_plan("executor=slurm", "cluster.devices_per_node=2")
    assert not [line for line in lines(plan) if "gpu" in line or "gres" in line]


def test_what_the_site_does_not_set_is_left_to_slurm(make_plan):
    found = " ".join(lines(make_plan(*ON_H100)))
    assert not [name for name in ("--mem", "--time", "--partition", "--cpus-per-task") if name in found]


def test_a_task_that_starts_a_whole_node_gets_the_processors_of_all_its_ranks(make_plan):
    plan = make_plan(*ON_H100)
    assert "#SBATCH --cpus-per-task=4" in lines(plan, 8, cpus_per_rank=4)
    assert "#SBATCH --cpus-per-task=32" in lines(plan, 1, cpus_per_rank=4)


def test_an_option_that_is_false_is_left_out_and_never_written_as_text(make_plan):
    found = lines(make_plan(*ON_H100), options={"exclusive": True, "hold": False, "nice": "10"})
    assert found[-2:] == ["#SBATCH --exclusive", "#SBATCH --nice=10"]


def test_a_percent_sign_in_the_run_directory_stands_for_itself(make_plan):
    plan = make_plan(*ON_H100)
    request = replace(REQUEST, run_dir="/runs/100%j")
    found = directives(plan.config, placed(plan.config, 8), request, tasks_per_node=8)
    assert "#SBATCH --output=/runs/100%%j/logs/executor.log" in found


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("gpu,long", "gpu,long"),
        ("a b", '"a b"'),
        ("it's", '"it\'s"'),
        ('say "hi"', '"say \\"hi\\""'),
        ("C:\\x", '"C:\\\\x"'),
        ("a # b $HOME `id`", '"a # b $HOME `id`"'),
        ("é", '"é"'),
        ("", '""'),
    ],
)
def test_a_value_is_quoted_as_sbatch_reads_it(text, written):
    assert quoted(text) == written


def test_ranks_that_fill_fewer_nodes_than_asked_for_are_refused(make_plan):
    plan = make_plan("executor=slurm", "cluster.nodes=2")
    with pytest.raises(
        PlanError,
        match=r"cluster\.nodes=2: 2 ranks fill 1 node of 8 .* Set cluster\.nodes=1, or cluster\.dev\w+=1\.",
    ):
        render(plan, Path(REQUEST.run_dir))


def test_ranks_that_do_not_fill_whole_nodes_are_refused(make_plan):
    plan = make_plan("executor=slurm", "cluster.nodes=2", "cluster.devices_per_node=3", "parallel.dp=2")
    with pytest.raises(
        PlanError,
        match=r"cluster\.devices_per_node=3: 4 ranks do not fill .* of 3 devices\. Set cluster\.dev\w+=2\.",
    ):
        render(plan, Path(REQUEST.run_dir))


@pytest.mark.parametrize(
    ("options", "after", "line"),
    [
        ({}, "7", "#SBATCH --dependency=afterany:7"),
        ({}, "7,8", "#SBATCH --dependency=afterany:7:8"),
        ({"dependency": "singleton"}, "7", "#SBATCH --dependency=singleton,afterany:7"),
    ],
)
def test_a_job_waits_for_another_one_beside_what_the_site_has_it_wait_for(make_plan, options, after, line):
    plan = make_plan(*ON_H100)
    config = replace(plan.config, site=replace(plan.config.site, options=options))
    request = replace(REQUEST, after=after)
    assert line in directives(config, placed(config, 8), request, tasks_per_node=8)


def test_the_plan_says_where_the_ranks_meet(make_plan):
    words = ("executor=slurm", "cluster.nodes=2", "cluster.devices_per_node=1")
    notes = make_plan(*words, "site.host_suffix=i", "site.network_interface=ib0").notes
    assert "The ranks rendezvous at the first node's name followed by i (site.host_suffix)." in notes
    assert "gloo and NCCL use the interface ib0 (site.network_interface)." in notes


def test_every_fault_is_told_at_once(make_plan):
    plan = make_plan("executor=slurm", "cluster.nodes=2", "+site.options.nodes=4")
    with pytest.raises(PlanError, match=r"^3 faults:"):
        render(plan, Path("/runs/\\"))


def test_a_plan_that_slurm_would_not_start_can_still_be_read(make_plan):
    (note,) = [
        text for text in make_plan("executor=slurm", "cluster.nodes=2").notes if "cannot be started" in text
    ]
    assert note.startswith(
        "Planned, but it cannot be started like this: cluster.nodes=2: 2 ranks fill 1 node"
    )


def test_any_option_of_sbatch_can_be_given_and_none_is_dropped(make_plan):
    given = (
        "site.nodelist='node[01-03]'",
        "site.reservation=r",
        "+site.options.switches='1@00:10:00'",
        "+site.options.a-plugins-own=yes",
    )
    text = Slurm().render(make_plan("executor=slurm", *given), REQUEST).text
    asked = ['--nodelist="node[01-03]"', "--reservation=r", "--switches=1@00:10:00", "--a-plugins-own=yes"]
    assert [option for option in asked if f"#SBATCH {option}\n" not in text] == []
