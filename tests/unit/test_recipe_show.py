import re
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.base import resources
from launcher.base.errors import ConfigError, LauncherError
from launcher.cli.main import run_verb
from launcher.config.recipes import description, find, shipped


def test_ls_prints_one_line_with_a_description_for_each_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb("recipe", ["ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(shipped())
    assert all(re.fullmatch(r"\w+ +[A-Z]\S.*\.", line) for line in lines)


def test_ls_imports_neither_hydra_nor_yaml_nor_torch() -> None:
    code = (
        "import sys; from launcher.cli.main import run_verb; run_verb('recipe', ['ls']);"
        "print({'hydra', 'omegaconf', 'yaml', 'torch'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "set()"


def test_show_prints_each_value_with_its_origin(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb("recipe", ["show", "quickstart", "parallel.tp=2", "optim.lr=1e-5"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^  tp: 2 +# override parallel\.tp=2$", out, re.MULTILINE)
    assert re.search(r"^  lr: 1\.0e-05 +# override optim\.lr=1e-5$", out, re.MULTILINE)
    assert re.search(r"^  pp: 2 +# recipes/quickstart\.yaml:\d+$", out, re.MULTILINE)
    assert re.search(r"^  num_layers: 4 +# conf/model/tiny\.yaml:\d+$", out, re.MULTILINE)
    assert re.search(r"^    latency_s: 5\.0e-05 +# conf/cluster/local_cpu\.yaml:\d+$", out, re.MULTILINE)


def test_show_aligns_the_origins(capsys: pytest.CaptureFixture[str]) -> None:
    run_verb("recipe", ["show"])
    columns = {line.index("  # ") for line in capsys.readouterr().out.splitlines() if "  # " in line}
    assert len(columns) == 1


def test_show_prints_a_recipe_with_faults_before_it_refuses_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        ConfigError, match=r"parallel\.tp=0: must be a whole number of at least 1\. Write 1\."
    ):
        run_verb("recipe", ["show", "quickstart", "parallel.tp=0"])
    assert "tp: 0" in capsys.readouterr().out


def test_show_prints_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["+data.options.api_key=abc123secret", "model.options={token: abc123secret}"]
    with pytest.raises(ConfigError, match=r"data\.options\.api_key=\*\*\*: looks like a secret") as caught:
        run_verb("recipe", ["show", "quickstart", *words])
    out = capsys.readouterr().out
    assert re.search(r'^    api_key: "\*\*\*" +# override \+data\.options\.api_key=\*\*\*$', out, re.M)
    assert re.search(r'^    token: "\*\*\*" +# override model\.options=\{token: \*\*\*\}$', out, re.M)
    assert "abc123" not in str(caught.value)


def test_show_prints_no_control_character(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="holds a control character"):
        run_verb("recipe", ["show", "quickstart", "run.dir='a\x1b[31m\x7f'"])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x7f" not in out


def test_show_names_a_file_that_hides_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quickstart.yaml").write_text("seed: 1\n")
    run_verb("recipe", ["show", "quickstart"])
    assert "./quickstart.yaml is not; give ./quickstart.yaml for that one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "recipe: known are ls and show."),
        (["lss"], "recipe lss: known are ls and show. Did you mean ls?"),
        (["foo"], "recipe foo: known are ls and show."),
        (["ls", "x"], "recipe ls takes no more words, given 'x'."),
    ],
)
def test_other_words_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(LauncherError, match=re.escape(message)):
        run_verb("recipe", words)


def test_help_names_only_shipped_recipes_in_its_examples(capsys: pytest.CaptureFixture[str]) -> None:
    run_verb("recipe", ["--help"])
    examples = re.findall(r"^  trireme recipe show ([a-z0-9_]+)", capsys.readouterr().out, re.MULTILINE)
    assert examples
    assert set(examples) <= set(shipped())


@pytest.mark.parametrize(
    ("text", "expected"), [("# A line.\nx: 1\n", "A line."), ("#\n", ""), ("x: 1\n", ""), ("", "")]
)
def test_description_is_the_first_comment_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    assert description(path) == expected


def test_path_in_the_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "ours.yaml").touch()
    assert find("~/ours.yaml").path == tmp_path / "ours.yaml"


def test_shipped_name_finds_its_file() -> None:
    assert find("quickstart").path == resources.folder("recipes") / "quickstart.yaml"
