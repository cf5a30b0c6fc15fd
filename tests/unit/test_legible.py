"""What a fault shows: never a secret, never a control character, never a screenful."""

import pytest

from launcher.base.errors import Fault, nearest
from launcher.base.redaction import hide_secrets, shortened

SECRET = "abc123secret"


@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        (
            Fault(
                "env", {"WANDB_API_KEY": SECRET}, "not a setting here", "", f"override +env.HF_TOKEN={SECRET}"
            ),
            "env={'WANDB_API_KEY': '***'}: not a setting here. [override +env.HF_TOKEN=***]",
        ),
        (Fault("data.options.api_key", SECRET, "no", ""), "data.options.api_key=***: no."),
        (Fault("model.options.password.x", 7, "no", ""), "model.options.password.x=***: no."),
        (
            Fault(
                "model.options", "{token: abc123secret}", "no", f"Give 'model.options.token=\"{SECRET} x\"'."
            ),
            "model.options={token: ***}: no. Give 'model.options.token=***'.",
        ),
        (Fault("data.options", [{"secret": [SECRET]}], "no", ""), "data.options=[{'secret': '***'}]: no."),
    ],
)
def test_a_fault_shows_no_value_of_a_setting_that_names_a_secret(fault, shown):
    assert str(fault) == shown


@pytest.mark.parametrize(
    "text",
    [
        "data.options.eos_token=</s>: must be text",
        "model.num_kv_heads=3: must divide num_heads = 8",
        "site.secrets=[HF_TOKEN]",
        "export WANDB_API_KEY=...",
        "data.options.api_key=***: looks like a secret",
    ],
)
def test_what_is_no_secret_is_shown(text):
    assert hide_secrets(text) == text


def test_the_sentence_around_a_secret_stays():
    assert hide_secrets("unknown flag --env.HF_TOKEN=abc123. Known: --out.") == (
        "unknown flag --env.HF_TOKEN=***. Known: --out."
    )


def test_a_fault_cannot_write_to_the_terminal():
    fault = Fault("run.dir", "a\x1b[31m\rb\nc\u202e", "no", "Write 'a\x07'.", "override run.dir=\x1b[2J")
    assert str(fault) == r"run.dir=a\x1b[31m\rb\nc\u202e: no. Write 'a\x07'. [override run.dir=\x1b[2J]"


@pytest.mark.parametrize(("given", "shown"), [("", '""'), (None, "null"), ((1, 2), "[1, 2]"), (0, "0")])
def test_a_value_is_shown_as_it_is_written(given, shown):
    assert str(Fault("name", given, "no", "")) == f"name={shown}: no."


def test_a_long_value_shows_its_beginning_and_its_end():
    fault = str(
        Fault("run.dir", "/lustre/" + "x" * 10_000 + "/mine", "no", "", "override run.dir=" + "y" * 999)
    )
    assert fault.startswith("run.dir=/lustre/xxx")
    assert "xxx.../xxx" not in fault
    assert "xxx...xxx" in fault
    assert "x/mine: no. [override run.dir=yyy" in fault
    assert len(fault) < 230


def test_a_value_of_a_hundred_characters_is_whole():
    assert shortened("x" * 100) == "x" * 100
    assert len(shortened("x" * 101)) == 100


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("1F1B", "1f1b"), ("BF16", "bf16"), ("gpu", None), ("rnu", "run"),
        ("bf61", "bf16"), ("zb-h1", "zb_h1"),
    ],
)  # fmt: skip
def test_the_nearest_name_is_near_whatever_its_case(name, match):
    assert nearest(name, ["1f1b", "bf16", "fp16", "cpu", "run", "zb_h1"]) == match
