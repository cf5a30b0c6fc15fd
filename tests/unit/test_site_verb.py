"""`trireme site`: a site written from what the cluster and a person say, with stand-ins for both."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.base.errors import JobError, LauncherError
from launcher.cli.cluster import site, site_dialog
from launcher.cli.cluster.site_dialog import ask_person
from launcher.cli.main import main
from launcher.config.load import load
from launcher.contract.executor import SiteQuestion
from launcher_plugins.executors.slurm import executor as slurm
from launcher_plugins.executors.slurm import survey as slurm_survey
from launcher_plugins.executors.slurm.commands import CommandResult
from launcher_plugins.executors.slurm.survey import read_partitions, survey
from tests.helpers.configs import compose_sound

CONFIG = """\
Configuration data as of 2025-01-02T03:04:05
JobRequeue              = {requeue}
SelectType              = select/cons_tres
SLURM_VERSION           = 24.05.1
"""
PARTITIONS = """\
PartitionName=batch AllowAccounts=ALL Default=YES MaxTime=02:00:00 State=UP TotalNodes=4
PartitionName=gpu AllowAccounts=ALL Default=NO MaxTime=1-00:00:00 State=UP TotalNodes=12
PartitionName=old AllowAccounts=ALL Default=NO MaxTime=UNLIMITED State=DRAIN TotalNodes=1
PartitionName=mixed AllowAccounts=ALL Default=NO MaxTime=UNLIMITED State=UP TotalNodes=2"""
NODES = """\
batch|(null)|64|4
gpu|gpu:h100:8(S:0-1)|96+|10
gpu|gpu:a100:4(S:0-1)|64|2
mixed|gpu:a100:2(S:0),gpu:v100:6(S:1)|32|2"""


class Cluster:
    """Answers as Slurm does."""

    def __init__(self):
        self.config, self.partitions = CONFIG.format(requeue=1), PARTITIONS
        self.accounts = {"user": "physics", "associations": "maths|normal,high\nphysics|normal"}
        self.refusal, self.tried = "", []

    def __call__(self, words):
        command, *rest = words
        if command == "sbatch":
            self.tried.append(Path(words[-1]).read_text())
            return CommandResult(code=int(bool(self.refusal)), output="", error=self.refusal)
        if command == "sacctmgr":
            if self.accounts is None:
                return CommandResult(
                    code=1, output="", error="You are not running a supported accounting_storage plugin"
                )
            return CommandResult(code=0, output=self.accounts[rest[2]], error="")
        text = {"scontrol": self.config if rest[-1] == "config" else self.partitions, "sinfo": NODES}[command]
        return CommandResult(code=0, output=text, error="")


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    found = Cluster()
    monkeypatch.setattr(slurm_survey, "run_command", found)
    monkeypatch.setattr(slurm, "run_command", found)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    return found


def written(tmp_path, name):
    """The settings of a site file, without its head."""
    lines = (tmp_path / "trireme" / "site" / f"{name}.yaml").read_text().splitlines()
    return lines[lines.index(f"name: {name}") + 1 :]


def test_without_a_terminal_what_is_proposed_is_taken_and_the_site_is_known(cluster, tmp_path, capsys):
    assert main(["site", "init", "alps"]) == 0
    assert written(tmp_path, "alps") == [
        "account: physics",
        "partition: batch",
        'time_limit: "02:00:00"',
        "gpu_request: none",
    ]
    assert (
        "partition gpu: 12 nodes of 96 CPUs and 8 h100, jobs of at most 1-00:00:00\n"
        in capsys.readouterr().out
    )
    composed = compose_sound("quickstart", ["site=alps"])
    assert load(composed.values, composed.sources).site.account == "physics"


def test_answers_that_are_given_beforehand_lead_to_other_proposals(cluster, tmp_path):
    assert main(["site", "init", "alps", "partition=gpu", "site.account=maths", "memory_per_node=0"]) == 0
    assert written(tmp_path, "alps") == [
        "account: maths",
        "partition: gpu",
        'time_limit: "1-00:00:00"',
        'memory_per_node: "0"',
    ]


def test_nodes_with_several_kinds_of_gpu_need_a_choice(cluster, tmp_path, capsys):
    assert main(["site", "init", "alps", "partition=mixed"]) == 2
    assert capsys.readouterr().err == (
        "site.gpu_type=null: the cluster has no default. "
        "Give one of a100, v100: trireme site init alps gpu_type=a100\n"
    )
    assert main(["site", "init", "alps", "partition=mixed", "gpu_type=v100"]) == 0
    assert written(tmp_path, "alps") == [
        "account: physics",
        "partition: mixed",
        "gpu_request: gres_typed",
        "gpu_type: v100",
    ]


def test_without_accounting_nobody_is_asked_for_an_account(cluster, tmp_path):
    cluster.accounts = None
    main(["site", "init", "alps"])
    assert not [line for line in written(tmp_path, "alps") if line.startswith(("account", "qos"))]


def test_a_cluster_without_a_default_partition_needs_a_choice(cluster, capsys):
    cluster.partitions = PARTITIONS.replace("Default=YES", "Default=NO")
    assert main(["site", "init", "alps"]) == 2
    assert "Give one of batch, gpu, mixed: trireme site init alps partition=" in capsys.readouterr().err


def test_a_cluster_with_nothing_to_choose_from_leaves_it_to_slurm(cluster, tmp_path):
    cluster.partitions = PARTITIONS.replace("State=UP", "State=DOWN")
    assert main(["site", "init", "alps"]) == 0
    assert written(tmp_path, "alps") == ["account: physics", "gpu_request: none"]


def test_a_cluster_that_requeues_nothing_is_told(cluster, capsys):
    cluster.config = CONFIG.format(requeue=0)
    main(["site", "init", "alps"])
    assert (
        "No job is requeued here: recipes need executor.continuation=chain, or none.\n"
        in capsys.readouterr().out
    )


def test_every_wrong_answer_is_told_at_once_and_nothing_is_written(cluster, tmp_path, capsys):
    assert main(["site", "init", "alps", "partitoin=x", "modules=[a]", "name=b"]) == 2
    error = capsys.readouterr().err
    assert "site.partitoin=x: not a setting of a site. Did you mean partition?" in error
    assert "site.modules=[a]: holds several values. Leave it out, and add it to the file" in error
    assert "site.name=b: not a setting of a site" in error
    assert main(["site", "init", "alps", "time_limit=30", "cpus_per_rank=none"]) == 2
    error = capsys.readouterr().err
    assert "site.cpus_per_rank=none: must be" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("box", "a site of this name ships with Trireme. Choose another name."),
        ("../x", "a name holds small letters, digits, - and _."),
        ("Alps", "a name holds small letters, digits, - and _."),
    ],
)
def test_a_name_is_one_of_a_new_file(cluster, capsys, name, message):
    assert main(["site", "init", name]) == 2
    assert capsys.readouterr().err == f"site init {name}: {message}\n"


def test_a_site_is_never_written_over_another_one(cluster, tmp_path, capsys):
    out = tmp_path / "alps.yaml"
    assert main(["site", "init", "alps", "--out", str(out)]) == 0
    assert main(["site", "init", "alps", "--out", str(out)]) == 2
    assert f"--out {out}: the file already exists." in capsys.readouterr().err


def test_a_cluster_that_gives_no_answer_is_told(monkeypatch):
    away = CommandResult(code=1, output="", error="Unable to contact slurm controller")
    monkeypatch.setattr(slurm_survey, "run_command", lambda words: away)
    with pytest.raises(JobError, match="Slurm does not answer: Unable to contact slurm controller"):
        survey()


def test_partitions_that_take_no_job_are_left_out():
    assert [partition.name for partition in read_partitions(PARTITIONS, NODES)] == ["batch", "gpu", "mixed"]


@pytest.mark.parametrize("words", [[], ["look"], ["init"], ["check"]])
def test_the_verb_says_what_it_needs(words, capsys):
    assert main(["site", *words]) == 2
    assert "init" in capsys.readouterr().err or words == ["check"]


# The person


def asked(monkeypatch, question, *answers):
    queue = list(answers)

    def reply(prompt):
        if not queue:
            raise EOFError
        return queue.pop(0)

    monkeypatch.setattr(site_dialog, "input", reply, raising=False)
    return ask_person(question)


CHOICE = SiteQuestion(setting="partition", proposal="batch", choices=("batch", "gpu"), is_required=True)
OPEN = SiteQuestion(setting="memory_per_node", proposal="64G")


def test_a_person_chooses_takes_the_proposal_or_leaves_a_setting_out(monkeypatch):
    assert asked(monkeypatch, CHOICE, "gpu") == "gpu"
    assert asked(monkeypatch, CHOICE, "") == "batch"
    assert asked(monkeypatch, OPEN, " 128G ") == "128G"
    assert asked(monkeypatch, OPEN, "-") is None


def test_a_person_who_mistypes_is_asked_again(monkeypatch, capsys):
    assert asked(monkeypatch, CHOICE, "gpuu", "-", "gpu") == "gpu"
    assert capsys.readouterr().out == "Did you mean gpu?\nKnown: batch, gpu.\n"


def test_an_input_that_ends_writes_nothing(monkeypatch):
    with pytest.raises(LauncherError, match="the input ended before every question was answered"):
        asked(monkeypatch, CHOICE, "gpuu")


@pytest.fixture
def person(cluster, monkeypatch):
    """Gives the answers of a person at a terminal; an error among them is raised."""
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(site, "sys", SimpleNamespace(stdin=terminal, stdout=terminal))

    def answers(*queue):
        left = iter(queue)

        def reply(prompt):
            answer = next(left)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        monkeypatch.setattr(site_dialog, "input", reply, raising=False)

    return answers


def test_an_answer_that_cannot_be_is_asked_for_again_and_the_others_are_kept(person, tmp_path, capsys):
    person("gpu", "physics", "-", "soon", "gpus_per_node", "lots", "00:30:00", "64G")
    assert main(["site", "init", "alps"]) == 0
    out = capsys.readouterr().out
    assert "site.time_limit=soon: must be a time as Slurm takes it" in out
    assert "site.memory_per_node=lots: must be a whole number with K, M, G or T" in out
    assert written(tmp_path, "alps") == [
        "account: physics",
        "partition: gpu",
        'time_limit: "00:30:00"',
        'memory_per_node: "64G"',
    ]


@pytest.mark.parametrize(("end", "code"), [(KeyboardInterrupt(), 130), (EOFError(), 2)])
def test_questions_that_are_left_can_be_gone_on_with(person, tmp_path, capsys, end, code):
    person("gpu", "maths", "-", "", end)
    assert main(["site", "init", "alps"]) == code
    *_, last = capsys.readouterr().out.splitlines()
    told, _, command = last.partition(": ")
    assert told == "To go on with these answers"
    person("none", "")
    assert main(command.split()[1:]) == 0
    assert written(tmp_path, "alps")[:3] == ["account: maths", "partition: gpu", 'time_limit: "1-00:00:00"']


# The check


def test_a_site_is_checked_with_a_small_job_on_the_devices_that_it_has(cluster, capsys):
    main(["site", "init", "alps", "partition=gpu"])
    assert main(["site", "check", "alps"]) == 0
    (script,) = cluster.tried
    assert "#SBATCH --gpus-per-node=1\n" in script
    assert "#SBATCH --partition=gpu\n" in script
    assert "the scheduler accepts this job of quickstart with site=alps\n" in capsys.readouterr().out


def test_a_recipe_is_checked_as_it_is(cluster):
    assert main(["site", "check", "box", "quickstart", "cluster.devices_per_node=2"]) == 0
    assert "#SBATCH --ntasks-per-node=2\n" in cluster.tried[0]


def test_a_site_that_the_scheduler_refuses_names_the_setting(cluster, capsys):
    cluster.refusal = "Invalid qos specification"
    assert main(["site", "check", "box"]) == 2
    assert capsys.readouterr().err == "Slurm rejects the job: Invalid qos specification. Look at site.qos.\n"


def test_a_site_that_is_not_there_is_answered_with_those_that_are(cluster, capsys):
    main(["site", "init", "alps"])
    assert main(["site", "check", "alp"]) == 2
    assert "alps" in capsys.readouterr().err
