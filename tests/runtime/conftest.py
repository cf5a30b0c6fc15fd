"""What tests of the runtime share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def deepspeed_in_parent() -> None:
    """DeepSpeed, imported before any rank is forked: each of them would take seconds for it."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.runtime.zero.muon import muon_optimizer  # every optimizer asks for it, and it is slow

    assert muon_optimizer


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for what is compiled, which all tests share; the compiler itself is imported once."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        import torch._inductor.compile_fx  # noqa: F401 (forked ranks would each take seconds for it)

        yield folder


@pytest.fixture
def user_models(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user's modules, which can be imported as from a recipe beside them."""
    pytest.importorskip("sklearn", reason="scikit-learn ships the digits")
    folder = Path(__file__).parent / "user_models"
    monkeypatch.syspath_prepend(folder)
    return folder
