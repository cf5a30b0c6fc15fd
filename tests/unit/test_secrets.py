import pytest

from launcher.base.errors import JobError
from launcher.base.secrets import check_folder, check_text, secret_values

CANARY = b"canary-0123456789"


def test_named_variables_and_those_named_like_secrets_are_kept_out():
    environment = {"MINE": "canary-1", "HF_TOKEN": "canary-2", "SHORT_KEY": "abc", "HOME": "/home/user1"}
    assert secret_values(environment, ["MINE"]) == {"MINE": b"canary-1", "HF_TOKEN": b"canary-2"}


@pytest.mark.parametrize("environment", [{}, {"HF_TOKEN": ""}])
def test_a_secret_that_is_not_set_is_refused_before_anything_is_submitted(environment):
    with pytest.raises(JobError, match=r"^site\.secrets names HF_TOKEN, not set here\. .*: export HF_TOKEN="):
        secret_values(environment, ["HF_TOKEN"])


def test_a_file_with_a_secret_is_removed_and_named_without_the_value(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "notes.py").write_bytes(b"\xff key = '" + CANARY + b"'")
    (tmp_path / "good.py").write_text("pass\n")
    with pytest.raises(JobError, match=r"^inner/notes\.py would hold the value of HF_TOKEN\.") as caught:
        check_folder(tmp_path, {"HF_TOKEN": CANARY})
    assert CANARY.decode() not in str(caught.value)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["good.py"]


def test_a_path_with_a_secret_is_told_without_the_value(tmp_path):
    folder = tmp_path / f"name_{CANARY.decode()}"
    folder.mkdir()
    (folder / "plan.json").write_bytes(CANARY)
    with pytest.raises(JobError, match=r"^name_\*\*\*/plan\.json would hold the value of HF_TOKEN\."):
        check_folder(tmp_path, {"HF_TOKEN": CANARY})


def test_a_text_with_a_secret_is_refused():
    check_text("all is well", "the job script", {"HF_TOKEN": CANARY})
    with pytest.raises(JobError, match=r"the job script would hold .* site\.secrets=\[HF_TOKEN\]"):
        check_text(f"x={CANARY.decode()}", "the job script", {"HF_TOKEN": CANARY})
