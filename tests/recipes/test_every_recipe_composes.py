from pathlib import Path

import pytest

from launcher.app.sweep.grid import SECTION
from launcher.base import resources
from launcher.cli.main import main
from launcher.config.compose import compose
from launcher.config.load import load
from launcher.config.recipes import description, shipped
from launcher.contract.config import LaunchConfig
from tests.helpers.configs import compose_sound

RECIPES = sorted(shipped())
MAX_LINES = 40


def loaded(name: str, *words: str) -> LaunchConfig:
    is_sweep = SECTION in compose(name).values
    composed = compose_sound(name, [*words, *([f"~{SECTION}"] if is_sweep else [])])
    return load(composed.values, composed.sources)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_composes_and_loads(name: str) -> None:
    assert loaded(name).name == name


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_short_and_described(name: str) -> None:
    path = shipped()[name]
    assert len(path.read_text().splitlines()) <= MAX_LINES
    assert description(path).endswith(".")


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_trains_whole_layers_with_whole_microbatches(name: str) -> None:
    config = loaded(name)
    parallel, batch = config.parallel, config.batch
    num_devices = config.cluster.nodes * config.cluster.devices_per_node
    dp = num_devices // (parallel.tp * parallel.pp) if parallel.dp == "auto" else parallel.dp
    num_stages = parallel.pp * parallel.num_chunks
    model = config.model
    num_layers = model.options["num_layers"] if model.family == "custom" else model.num_layers
    assert num_layers is not None
    if isinstance(parallel.layers_per_stage, tuple):
        assert len(parallel.layers_per_stage) == num_stages
        assert sum(parallel.layers_per_stage) == num_layers
    else:
        assert num_layers % num_stages == 0
    assert batch.global_size is not None
    assert batch.micro_size is not None
    assert batch.global_size % (batch.micro_size * dp) == 0
    num_ranks = dp * parallel.tp * parallel.pp
    assert num_ranks == num_devices or (config.cluster.allow_idle_devices and num_ranks < num_devices)


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (resources.folder("conf") / group).glob("*.yaml"))


GROUPS = sorted(path.name for path in Path(resources.folder("conf")).iterdir() if path.is_dir())
NEEDED = {
    "data=text": ["data.source=x.txt"],
    "data=custom": ["data.target=a.b:c"],
    "model=custom": ["model.target=a.b:c"],
    "model=gpt": ["model.num_layers=2", "model.hidden_size=8", "model.num_heads=2", "model.vocab_size=256"],
}
NEEDED["model=llama"] = NEEDED["model=gpt"]
NEEDED["batch=default"] = ["batch.seq_length=64"]


@pytest.mark.parametrize("choice", [f"{group}={name}" for group in GROUPS for name in choices(group)])
def test_every_choice_of_every_group_loads(choice: str) -> None:
    assert loaded("quickstart", choice, *NEEDED.get(choice, []))


def test_trillion_parameter_recipe_is_the_published_one() -> None:
    config = loaded("gpt_1t_3072xa100")
    parallel, batch, model = config.parallel, config.batch, config.model
    assert (parallel.tp, parallel.pp, parallel.dp, parallel.schedule) == (8, 64, 6, "1f1b")
    assert (batch.micro_size, batch.global_size, batch.seq_length) == (1, 3072, 2048)
    assert (model.num_layers, model.hidden_size, model.num_heads, model.vocab_size) == (
        128,
        25600,
        160,
        51200,
    )
    assert (config.precision.compute, parallel.recompute) == ("fp16", "full")
    assert config.cluster.nodes * config.cluster.devices_per_node == 3072
    assert config.device.peak_flops["fp16"] == 312e12


def test_405b_recipe_has_every_layer() -> None:
    config = loaded("llama3_405b_16384xh100")
    assert isinstance(config.parallel.layers_per_stage, tuple)
    assert sum(config.parallel.layers_per_stage) == config.model.num_layers == 126
    assert config.cluster.nodes * config.cluster.devices_per_node == 16384


def test_the_claims_of_pipelines_can_be_run_but_for_the_one_that_needs_too_much_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["sweep", "run", "pipeline_claims", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "\n8 can run" in output
    assert "\n1 refused\n  1  device.memory_bytes=256000000: a rank of pp_rank 0 needs 271 MB" in output
    assert "points: schedule=gpipe num_kept=128\n" in output
