"""The batch script: golden bytes, and what it does when it runs with stand-ins for Slurm's commands."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.base.errors import PlanError
from launcher.contract.job import START_FILE
from launcher.runs.render import render
from launcher_plugins.executors.slurm.executor import Slurm
from launcher_plugins.executors.slurm.script import expandable
from tests.helpers.slurm_stage import CHECKOUT, GOLDEN, REQUEST, TWO_BY_TWO, Stage

ONE_BY_TWO = ("executor=slurm", "cluster.devices_per_node=2", "executor.check_nodes=false")
SITE = (
    "site.account=physics",
    "site.qos=high",
    "site.partition='gpu,long'",
    "site.constraint='a100&nvlink'",
    "site.nodelist='node[01-03]'",
    "site.exclude='node[07,09]'",
    "site.time_limit=1-12:30:00",
    "site.memory_per_node=0",
    "site.cpus_per_rank=8",
    "site.cpu_bind=cores",
    "site.scratch='/scratch/$USER/$SLURM_JOB_ID'",
    "+site.options.comment='50% of \"it\" # $HOME'",
    "+site.options.exclusive=true",
    "+site.options.hold=false",
    "site.modules=[cuda/12.4]",
    "site.setup=['ulimit -l unlimited']",
    "+site.env.NCCL_DEBUG='IN$FO'",
    "+site.node_env.LD_LIBRARY_PATH='/opt/efa/lib:$LD_LIBRARY_PATH'",
    "site.forward=[HF_HOME]",
    "site.secrets=[WANDB_API_KEY]",
    "site.container_image=/images/torch.sqsh",
    "site.container_mounts=['/data:/data:ro']",
    "site.host_suffix=i",
    "site.network_interface=ib0",
)
LLAMA = (
    *("executor=slurm", "executor.starter=torchrun", "executor.continuation=chain"),
    *("device=h100", "cluster=dgx_h100", "cluster.nodes=2", "train.checkpoint_interval=20"),
)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("srun", (*TWO_BY_TWO, "site=box")),
        ("torchrun", (*LLAMA, "parallel.dp=8")),
        ("full_site", (*TWO_BY_TWO, *SITE)),
        ("one_node", ("executor=slurm", "cluster.devices_per_node=2")),
    ],
)
def test_the_script_is_the_golden_one(make_plan, name, overrides):
    text = Slurm().render(make_plan(*overrides), REQUEST).text
    assert text == (GOLDEN / f"{name}.sh").read_text()


def test_rendering_does_not_depend_on_the_environment(make_plan, monkeypatch):
    plan = make_plan(*TWO_BY_TWO)
    before = Slurm().render(plan, REQUEST)
    for name in ("SLURM_JOB_ID", "SLURM_CPU_BIND", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "7")
    assert Slurm().render(plan, REQUEST) == before


def test_a_started_run_goes_on_only_when_asked_to(make_plan):
    plan = make_plan(*TWO_BY_TWO)
    assert "resume=()" in Slurm().render(plan, REQUEST).text
    assert "resume=(--resume)" in Slurm().render(plan, replace(REQUEST, resume=True)).text


# Running it


@pytest.fixture
def stage(make_plan, tmp_path):
    def prepare(*overrides):
        return Stage(tmp_path, make_plan(*overrides))

    return prepare


def test_every_rank_has_its_own_place_and_the_same_rendezvous(stage):
    two = stage(*TWO_BY_TWO)
    told = two.run()
    plan = str(two.run_dir / "plan.json")
    assert [words[:5] for words in told] == [
        [str(rank), str(rank % 2), "4", "node7:20041", "unset"] for rank in range(4)
    ]
    assert told[0][5:] == [
        f"{CHECKOUT}/{START_FILE}",
        "launcher.runtime.process.main",
        plan,
        "--sha256",
        "5a" * 32,
    ]
    assert (two.done.returncode, two.record()) == (0, '{"job": "41", "exit_code": 0}\n')


def test_torchrun_is_started_once_a_node_with_the_nodes_number(stage):
    told = stage(*TWO_BY_TWO, "executor.starter=torchrun").run(SLURM_RESTART_COUNT="2")
    assert len(told) == 2
    words = told[1][5:]
    assert words[:4] == [f"{CHECKOUT}/{START_FILE}", "torch.distributed.run", "--node-rank=1", "--nnodes=2"]
    assert {"--rdzv-id=41.2", "--master-addr=node7", "--master-port=22059"} <= set(words)


def test_a_restart_has_another_port_and_another_rendezvous(stage):
    two = stage(*TWO_BY_TWO)
    two.run(RANK_CODE="1")
    told = two.run(SLURM_RESTART_COUNT="1")
    assert told[-1][3] == "node7:21050"
    assert "trireme: job 41, restart 1, by srun: rendezvous 41.1 at node7:21050\n" in two.done.stdout


def test_a_port_that_is_taken_is_passed_over_for_all_ranks(stage):
    with socket.create_server(("127.0.0.1", 20041)):
        told = stage(*TWO_BY_TWO).run()
    assert {words[3] for words in told} == {"node7:23042"}


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_is_bound_and_silent_is_passed_over_too(stage, address):
    with socket.socket() as silent:
        silent.bind((address, 20041))
        told = stage(*TWO_BY_TWO).run()
    assert {words[3] for words in told} == {"node7:23042"}


def test_without_an_interpreter_on_the_node_a_port_that_answers_is_passed_over(stage):
    two = stage(*TWO_BY_TWO, "site.python=/only/in/the/container")
    with socket.create_server(("127.0.0.1", 20041)):
        two.run()
    assert "at node7:23042\n" in two.done.stdout


def test_ports_lie_between_the_privileged_and_the_ephemeral_ones(stage):
    two = stage(*TWO_BY_TWO)
    starts = [{"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": "99"} for job in ("1", "11999", "67043328")]
    told = [two.run(RANK_CODE="1", **start)[-1] for start in starts]
    ports = [int(words[3].partition(":")[2]) for words in told]
    assert all(20000 <= port < 32000 for port in ports)
    assert len(set(ports)) == 3


def test_a_requeued_job_goes_on_from_its_checkpoint_in_the_same_directory(stage):
    two = stage(*TWO_BY_TWO)
    assert "--resume" not in two.run(RANK_CODE="1")[-1]
    (two.run_dir / "exit" / "rank-1.json").write_text("{}")
    assert "--resume" not in two.run(SLURM_RESTART_COUNT="1", RANK_CODE="1")[-1]
    assert (two.run_dir / "exit.41.0" / "rank-1.json").exists()
    assert not (two.run_dir / "exit" / "rank-1.json").exists()
    (two.run_dir / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert two.run(SLURM_RESTART_COUNT="2")[-1][-1] == "--resume"


def test_the_exit_code_of_the_ranks_is_that_of_the_job(stage):
    two = stage(*TWO_BY_TWO)
    two.run(RANK_CODE="17")
    assert (two.done.returncode, two.record()) == (17, '{"job": "41", "exit_code": 17}\n')


def test_without_scontrol_the_node_list_is_read_by_the_launcher(stage):
    two = stage(*TWO_BY_TWO)
    two.write("scontrol", "#!/bin/bash\nexit 127\n")
    told = two.run(SLURM_JOB_NODELIST="rack1-[08,09]")
    assert {words[3] for words in told} == {"rack1-08:20041"}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"SLURM_JOB_NODELIST": "node[7-"},
            "cannot resolve the rendezvous host from the node list 'node[7-'",
        ),
        ({"SLURM_JOB_NODELIST": "node[7-9]"}, "the node list 'node[7-9]' does not name 2 nodes"),
        ({"SLURM_JOB_NODELIST": "localhost,b"}, "other nodes cannot reach the rendezvous host localhost"),
        ({"SLURM_JOB_NODELIST": "127.0.0.1,b"}, "other nodes cannot reach the rendezvous host 127.0.0.1"),
        ({"SLURM_JOB_NUM_NODES": "3"}, "the plan needs 2 nodes, and Slurm gave 3"),
    ],
)
def test_a_rendezvous_that_would_split_the_job_is_refused(stage, variables, message):
    two = stage(*TWO_BY_TWO)
    two.write("scontrol", "#!/bin/bash\nexit 127\n")
    assert two.run(**variables) == []
    assert (two.done.returncode, two.record()) == (1, '{"job": "41", "exit_code": 1}\n')
    assert f"trireme: {message}\n" in two.done.stderr


def test_where_srun_was_called_is_never_the_rendezvous(stage):
    assert stage(*TWO_BY_TWO).run(SLURM_LAUNCH_NODE_IPADDR="10.9.9.9")[0][3] == "node7:20041"


def test_a_second_network_is_reached_by_its_own_names(stage):
    assert stage(*TWO_BY_TWO, "site.host_suffix=i").run()[0][3] == "node7i:20041"


ONE_NODE = {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node[7-"}


@pytest.mark.parametrize("starter", ["srun", "torchrun"])
def test_the_ranks_of_one_node_meet_in_a_file_that_is_new_at_every_start(stage, starter):
    one = stage(*ONE_BY_TWO, f"executor.starter={starter}")
    place = one.run_dir / "rendezvous"
    place.write_text("of an earlier start")
    (told, *_) = one.run(**ONE_NODE)
    assert told[3] == ":"
    assert place.read_text() == ""
    assert f"rendezvous 41.0 in {place}\n" in one.done.stdout
    if starter == "torchrun":
        assert "--rdzv-backend=trireme-one-host" in told
        assert not [word for word in told if "master" in word]


def test_one_node_whose_files_cannot_be_locked_needs_no_name_to_be_resolved(stage):
    one = stage(*ONE_BY_TWO)
    one.write("flock", "#!/bin/bash\necho 'Function not implemented' >&2\nexit 66\n")
    told = one.run(**ONE_NODE)
    assert [words[3] for words in told] == ["127.0.0.1:20041"] * 2


@pytest.mark.parametrize(
    "value", ["a b", "it's", 'say "hi"', "$HOME `id` $(id)", "é ☃", "back\\slash", "#1", "%j"]
)
def test_a_literal_variable_reaches_the_ranks_as_it_was_written(stage, value):
    two = stage(*TWO_BY_TWO)
    site = replace(two.plan.config.site, env={"EXTRA": value})
    two.plan = replace(two.plan, config=replace(two.plan.config, site=site))
    assert two.run()[0][4] == value


def test_a_variable_of_several_lines_reaches_the_ranks_whole(stage):
    two = stage(*TWO_BY_TWO)
    two.write("python", '#!/bin/bash\nprintf %s "$EXTRA" >"$TOLD"\n')
    site = replace(two.plan.config.site, env={"EXTRA": "a\nb\n'c'"})
    two.plan = replace(two.plan, config=replace(two.plan.config, site=site))
    two.run()
    assert (two.folder / "told").read_text() == "a\nb\n'c'"


def test_a_node_variable_is_expanded_on_the_node_and_runs_nothing(stage):
    two = stage(*TWO_BY_TWO)
    site = replace(two.plan.config.site, node_env={"EXTRA": "/opt/x:$GIVEN:${NOT_GIVEN} `id` $(id) \\ \"'"})
    two.plan = replace(two.plan, config=replace(two.plan.config, site=site))
    assert two.run(GIVEN="/usr/lib")[0][4] == "/opt/x:/usr/lib: `id` $(id) \\ \"'"


HOSTILE = (
    "a 0",
    'a"=0"',
    "a'; touch owned; '",
    "$(touch owned)",
    "`touch owned`",
    "a&b>owned",
    "-rf",
    "~",
    "é ☃",
    "%j",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_directory_of_any_name_is_one_word_and_runs_nothing(stage, name):
    two = stage(*TWO_BY_TWO)
    two.run_dir = two.run_dir / name
    two.run_dir.mkdir()
    assert {words[7] for words in two.run()} == {str(two.run_dir / "plan.json")}
    assert two.done.stderr == ""
    assert not [path for path in two.folder.rglob("*owned*") if path != two.run_dir]


def test_the_scratch_folder_is_made_and_is_where_the_ranks_put_temporary_files(stage, tmp_path):
    two = stage(
        *TWO_BY_TWO, "+site.node_env.EXTRA='$TMPDIR'", f"site.scratch='{tmp_path}/scratch of $SLURM_JOB_ID'"
    )
    assert two.run()[0][4] == f"{tmp_path}/scratch of 41"
    assert (tmp_path / "scratch of 41").is_dir()


def test_ranks_do_not_start_where_the_scratch_folder_cannot_be_made(stage, tmp_path):
    (tmp_path / "file").touch()
    two = stage(*TWO_BY_TWO, f"site.scratch={tmp_path}/file/scratch")
    assert two.run() == []
    assert two.done.returncode == 1


def test_a_module_that_does_not_load_ends_the_job(stage):
    two = stage(*TWO_BY_TWO, "site.modules=['cuda 12']", "site.setup=['EXTRA=set']")
    assert two.run(**{"BASH_FUNC_module%%": '() { echo "$*"; return 1; }'}) == []
    assert two.done.stderr == "trireme: cannot load the module cuda 12\n"
    assert "load cuda 12\n" in two.done.stdout


def test_text_without_a_variable_is_only_quoted():
    assert expandable('100% "$" \\') == '"100% \\"\\$\\" \\\\"'


# Refusals


@pytest.mark.parametrize("run_dir", ["/runs/a\\b", "/runs/a\nb"])
def test_a_directory_that_slurm_cannot_write_to_is_refused(make_plan, run_dir):
    with pytest.raises(
        PlanError, match=r"run\.dir='/runs/a.*backslash or a control character\. Set run\.dir"
    ):
        render(make_plan(*TWO_BY_TWO), Path(run_dir))


def test_a_directory_that_cannot_be_mounted_is_refused(make_plan):
    plan = make_plan(*TWO_BY_TWO, "site.container_image=a.sqsh")
    with pytest.raises(PlanError, match=r"run\.dir=/runs/a:b: a path that is mounted .* or a colon"):
        render(plan, Path("/runs/a:b"))
