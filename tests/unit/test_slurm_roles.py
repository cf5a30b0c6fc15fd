"""Roles with nodes of their own: components of one heterogeneous job, with consecutive ranks."""

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.app.planning import make_plan
from launcher.base.errors import ConfigError, PlanError
from launcher.contract.job import GroupRequest
from launcher.contract.site import RoleSite
from launcher.contract.strategy import RoleGroup
from launcher.plan.text import plan_text
from launcher.runs.render import render
from launcher_plugins.architectures.decentralized.plan import Decentralized
from launcher_plugins.executors.slurm.continuation import continuation_faults
from launcher_plugins.executors.slurm.executor import Slurm
from launcher_plugins.executors.slurm.state import rank_ends
from tests.helpers.slurm_stage import GOLDEN, REQUEST, TWO_BY_TWO, Stage

OWN_NODES = (*TWO_BY_TWO, "+site.roles.server.partition=cpu")
SERVERS = ("architecture=parameter_server", "parallel.pp=1")
FULL = (
    "site.partition=gpu",
    "site.account=physics",
    "site.time_limit=12:00:00",
    "site.cpus_per_rank=8",
    "train.checkpoint_interval=20",
    "+site.roles.server.ranks_per_node=2",
    "+site.roles.server.constraint=big",
    "+site.roles.server.cpus_per_rank=4",
    "+site.roles.server.memory_per_node=64G",
)


@pytest.fixture
def plan(monkeypatch):
    """Plans the quickstart with two servers beside its trainers."""
    trainers = Decentralized.roles
    servers = RoleGroup(name="server", num_ranks=2, trains=False)
    monkeypatch.setattr(Decentralized, "roles", lambda self, job: (*trainers(self, job), servers))
    return lambda *overrides: make_plan("quickstart", overrides).plan


def test_a_role_with_nodes_of_its_own_is_a_part_of_the_job(plan):
    text = Slurm().render(plan(*OWN_NODES, *FULL), REQUEST).text
    assert text == (GOLDEN / "het.sh").read_text()


def test_the_plan_says_that_a_run_which_can_lose_a_worker_cannot_lose_a_node():
    words = ("architecture=parameter_server", *TWO_BY_TWO, "parallel.dp=3", "parallel.pp=1")
    sizes = ("batch.global_size=12", "batch.micro_size=2")
    lost, kept = (
        make_plan("quickstart", (*words, *sizes, f"architecture.on_worker_loss={way}")).plan.notes
        for way in ("continue", "fail")
    )
    assert set(lost) - set(kept) > {
        "The others continue without a rank whose process ends; the failure of a node ends them all."
    }


def test_a_job_of_several_components_has_no_spare_nodes(plan):
    (fault,) = continuation_faults(plan(*OWN_NODES, "cluster.spare_nodes=1").config)
    assert str(fault) == (
        "cluster.spare_nodes=1: spare nodes take the place of those that fail the check of nodes, which a "
        "job of several components has not. Set cluster.spare_nodes=0."
    )


def test_without_nodes_of_its_own_a_role_is_on_the_devices_after_the_trainers(plan):
    together = plan(*TWO_BY_TWO, "cluster.devices_per_node=3")
    text = Slurm().render(together, REQUEST).text
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=3\n" in text
    assert "hetjob" not in text
    assert (together.num_nodes, together.num_cluster_ranks) == (2, 6)


def test_ranks_on_nodes_of_their_own_take_no_device_and_ask_for_none(plan):
    gpus = ("device=h100", "cluster=dgx_h100", "cluster.nodes=1", "parallel.dp=4", "precision=bf16")
    apart = plan("executor=slurm", *gpus, "+site.roles.server.partition=cpu")
    assert (apart.num_devices, apart.world_size, apart.num_nodes) == (8, 10, 3)
    first, second = Slurm().render(apart, REQUEST).text.split("#SBATCH hetjob\n")
    assert "#SBATCH --gpus-per-node=8\n" in first
    assert "--gpus" not in second
    assert "1 x 8 H100 SXM\n" in plan_text(apart)
    assert "2 more ranks: server, on 2 further nodes\n" in plan_text(apart)
    assert [note for note in apart.notes if "Role" in note] == [
        "Role server is on 2 further nodes of partition cpu, in one heterogeneous job (site.roles.server)."
    ]


def test_the_ranks_of_all_parts_have_one_range_and_one_rendezvous(plan, tmp_path):
    stage = Stage(tmp_path, plan(*OWN_NODES))
    hosts = {"SLURM_JOB_NODELIST_HET_GROUP_0": "node[7-8]", "SLURM_JOB_NODELIST_HET_GROUP_1": "cpu[1-2]"}
    told = stage.run(**hosts)
    assert [words[:4] for words in told] == [
        *([str(rank), str(rank % 2), "6", "node7:20041"] for rank in range(4)),
        *([str(rank), "0", "6", "node7:20041"] for rank in (4, 5)),
    ]
    assert "trireme: ranks from 4 on cpu[1-2]\n" in stage.done.stdout
    assert (stage.done.returncode, stage.done.stderr) == (0, "")


HALF_ENDED_SRUN = """#!/bin/bash
# A rank of the second part fails, and the first part goes on until its step is cancelled.
run=$(dirname "$(printf '%s\\n' "$@" | grep -m1 plan.json)")
echo 'srun: error: cpu1: task 0: Exited with exit code 17' >>"$run/logs/executor.log"
until grep -q '^--quiet 41.0 42.0$' "$CANCELLED"; do sleep 0.1; done
exit 17
"""


def test_a_part_that_outlives_the_failure_of_another_is_ended(plan, tmp_path):
    stage = Stage(tmp_path, plan(*OWN_NODES))
    stage.write("srun", HALF_ENDED_SRUN)
    stage.write("scancel", '#!/bin/bash\necho "$*" >>"$CANCELLED"\n')
    cancelled = tmp_path / "cancelled"
    cancelled.touch()
    hosts = {"SLURM_JOB_NODELIST_HET_GROUP_0": "node[7-8]", "SLURM_JOB_NODELIST_HET_GROUP_1": "cpu[1-2]"}
    jobs = {"SLURM_JOB_ID_HET_GROUP_0": "41", "SLURM_JOB_ID_HET_GROUP_1": "42"}
    stage.run(**hosts, **jobs, CANCELLED=str(cancelled))
    assert stage.done.returncode == 17
    assert cancelled.read_text() == "--quiet 41.0 42.0\n"


def test_trainers_on_one_node_meet_the_others_at_its_name(plan, tmp_path):
    one = ("executor=slurm", "cluster.devices_per_node=2", "+site.roles.server.partition=cpu")
    stage = Stage(tmp_path, plan(*one))
    stage.write("scontrol", '#!/bin/bash\n[ "$3" = node7 ] && echo node7\n')
    told = stage.run(SLURM_JOB_NUM_NODES="1", SLURM_JOB_NODELIST="node7")
    assert {words[3] for words in told} == {"node7:20041"}


def test_runs_of_several_parts_are_no_array(plan):
    request = GroupRequest(name="a", folder="/sweep", script="/sweep/array.sh", tasks=(0, 1))
    alike = [Slurm().render(plan(*OWN_NODES), REQUEST)] * 2
    assert Slurm().group(alike, request) is None
    alone = [Slurm().render(plan(*TWO_BY_TWO, "cluster.devices_per_node=3"), REQUEST)] * 2
    assert Slurm().group(alone, request) is not None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["+site.roles.servr.partition=cpu", "cluster.devices_per_node=3"],
            r"site\.roles\.servr=\.\.\.: the roles beside the trainers are server \(architecture\.name\)\. "
            r"Name server\.",
        ),
        (
            ["+site.roles.server.partition=cpu", "executor.starter=torchrun"],
            r"executor\.starter=torchrun: torchrun starts equal nodes.* Set executor\.starter=srun",
        ),
    ],
)
def test_parts_that_cannot_be_are_refused(plan, overrides, message):
    with pytest.raises(PlanError, match=message):
        render(plan(*TWO_BY_TWO, *overrides), Path(REQUEST.run_dir))


def test_ranks_that_do_not_fill_their_nodes_are_refused(plan, monkeypatch):
    three = RoleGroup(name="server", num_ranks=3, trains=False)
    with_two = Decentralized.roles
    monkeypatch.setattr(Decentralized, "roles", lambda self, job: (with_two(self, job)[0], three))
    message = r"site\.roles\.server\.ranks_per_node=2: 3 ranks do not fill whole nodes of 2\. .*per_node=1\."
    with pytest.raises(PlanError, match=message):
        render(plan(*OWN_NODES, "+site.roles.server.ranks_per_node=2"), Path(REQUEST.run_dir))


def test_a_site_may_have_nodes_for_roles_that_a_recipe_does_not_have(make_plan):
    plan = make_plan(*TWO_BY_TWO)
    site = replace(plan.config.site, roles={"server": RoleSite(partition="cpu")})
    text = Slurm().render(replace(plan, config=replace(plan.config, site=site)), REQUEST).text
    assert "hetjob" not in text


def test_the_memory_of_a_role_is_checked_as_that_of_the_site():
    with pytest.raises(
        ConfigError, match=r"site\.roles\.server\.memory_per_node=4 GB: must be a whole number"
    ):
        make_plan(
            "quickstart", ["architecture=parameter_server", "+site.roles.server.memory_per_node='4 GB'"]
        )


PARTS = "trireme: ranks from 0 on node[0-1]\n2026-01-02T03:04:05.678Z trireme: ranks from 4 on cpu[1-2]\n"


def test_the_first_failed_rank_of_a_further_part_is_counted_from_its_first():
    (end,) = rank_ends(f"{PARTS}srun: error: cpu2: task 1: Exited with exit code 17")
    assert (end.rank, end.exit_code) == (5, 17)
    (end,) = rank_ends(f"{PARTS}srun: error: node1: task 3: Killed")
    assert (end.rank, end.exit_code) == (3, -9)


def test_no_rank_is_blamed_where_parts_share_a_node():
    shared = "trireme: ranks from 0 on node0\ntrireme: ranks from 4 on node0\n"
    assert rank_ends(f"{shared}srun: error: node0: task 0: Exited with exit code 17") == []
