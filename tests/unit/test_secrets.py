import pytest

from launcher.base import secrets
from launcher.base.errors import JobError
from launcher.base.secrets import check_file, check_text, secret_values

CANARY = b"canary-0123456789"


def test_named_variables_and_those_named_like_secrets_are_kept_out():
    environment = {"MINE": "canary-1", "HF_TOKEN": "canary-2", "SHORT_KEY": "abc", "HOME": "/home/user1"}
    assert secret_values(environment, ["MINE"]) == {"MINE": b"canary-1", "HF_TOKEN": b"canary-2"}


@pytest.mark.parametrize("environment", [{}, {"HF_TOKEN": ""}])
def test_a_secret_that_is_not_set_is_refused_before_anything_is_submitted(environment):
    with pytest.raises(JobError, match=r"^site\.secrets names HF_TOKEN, not set here\. .*: export HF_TOKEN="):
        secret_values(environment, ["HF_TOKEN"])


def test_a_file_with_a_secret_is_refused_and_stays_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(secrets, "_PIECE_BYTES", 10)
    file = tmp_path / "notes.py"
    file.write_bytes(b"\xff key = '" + CANARY + b"'")
    with pytest.raises(JobError, match=r"^inner/notes\.py would hold the value of HF_TOKEN\.") as caught:
        check_file(file, "inner/notes.py", {"HF_TOKEN": CANARY, "OTHER": b"x" * 20})
    assert CANARY.decode() not in str(caught.value)
    assert CANARY in file.read_bytes()
    check_file(file, "it", {"HF_TOKEN": CANARY + b"-other"})


def test_a_password_in_a_url_is_a_secret_whatever_the_variable_is_called():
    proxy = "http://me:abc@proxy:80"
    assert secret_values({"HTTP_PROXY": proxy, "NO_PROXY": "http://proxy:80"}, []) == {
        "HTTP_PROXY": proxy.encode()
    }


def test_a_text_with_a_secret_is_refused():
    check_text("all is well", "the job script", {"HF_TOKEN": CANARY})
    with pytest.raises(JobError, match=r"the job script would hold .* site\.secrets=\[HF_TOKEN\]"):
        check_text(f"x={CANARY.decode()}", "the job script", {"HF_TOKEN": CANARY})
