"""Several jobs as one array of Slurm."""

from dataclasses import replace

import pytest

from launcher.contract.job import GroupRequest
from launcher_plugins.executors.slurm.executor import Slurm
from tests.helpers.objects import there
from tests.helpers.slurm_stage import REQUEST, TWO_BY_TWO

REQUESTED = GroupRequest(
    name="mine-sweep",
    folder="/runs/50% a;b/tasks",
    script="/runs/50% a;b/job-1.sh",
    tasks=(0, 1, 3),
    at_once=2,
)


def scripts(make_plan, *many):
    return [
        Slurm().render(make_plan(*words), replace(REQUEST, run_dir=f"/runs/{place}"))
        for place, words in enumerate(many)
    ]


def test_an_array_asks_for_what_each_of_its_jobs_asks_for_and_runs_the_script_of_each(make_plan):
    words = ((*TWO_BY_TWO, "site=box"), (*TWO_BY_TWO, "site=box", "seed=2", "name=other"))
    array = Slurm().group(scripts(make_plan, *words, words[0]), REQUESTED)
    assert there(array).argv == ("sbatch", "--parsable", "/runs/50% a;b/job-1.sh")
    assert there(array).text == (
        "#!/bin/bash\n"
        "# mine-sweep: 3 runs as the tasks of one array.\n"
        "#SBATCH --job-name=mine-sweep\n"
        '#SBATCH --output="/runs/50%% a;b/tasks/%a/logs/executor.log"\n'
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=2\n"
        "#SBATCH --time=00:10:00\n"
        "#SBATCH --partition=batch\n"
        "#SBATCH --requeue\n"
        "#SBATCH --open-mode=append\n"
        "#SBATCH --export=HOME,LANG,LOGNAME,PATH,USER\n"
        "#SBATCH --array=0-1,3%2\n"
        "exec /bin/bash '/runs/50% a;b/tasks'/\"$SLURM_ARRAY_TASK_ID\"/job.sh\n"
    )


@pytest.mark.parametrize(
    "other",
    [
        ("executor=slurm", "cluster.devices_per_node=4", "parallel.dp=2"),  # other nodes
        (*TWO_BY_TWO, "site.time_limit=01:00:00"),
        (*TWO_BY_TWO, "train.checkpoint_interval=5"),  # the signal ahead of the time limit
    ],
)
def test_jobs_that_do_not_ask_for_the_same_are_no_array(make_plan, other):
    assert Slurm().group(scripts(make_plan, TWO_BY_TWO, other), REQUESTED) is None


def test_chains_of_jobs_are_no_array(make_plan):
    chain = (*TWO_BY_TWO, "executor.continuation=chain", "train.checkpoint_interval=5")
    assert Slurm().group(scripts(make_plan, chain, chain), REQUESTED) is None


def test_the_code_of_a_sweep_is_mounted_into_the_container_of_each_run(make_plan):
    plan = make_plan(*TWO_BY_TWO, "site.container_image=/images/torch.sqsh")
    shared = replace(REQUEST, run_dir="/runs/s/0-pp_1", code="/runs/s/source/lib")
    text = Slurm().render(plan, shared).text
    assert "--container-mounts=/runs/s/0-pp_1:/runs/s/0-pp_1,/runs/s/source:/runs/s/source " in text
    own = replace(shared, code="/runs/s/0-pp_1/source/lib")
    assert "--container-mounts=/runs/s/0-pp_1:/runs/s/0-pp_1 " in Slurm().render(plan, own).text
