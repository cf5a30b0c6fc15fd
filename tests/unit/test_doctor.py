import socket
import sys

import pytest

from launcher.base.errors import LauncherError
from launcher.cli.cluster import doctor
from launcher.cli.cluster.doctor import Finding
from launcher.cli.main import main


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Makes commands on an otherwise empty PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(**scripts):
        for name, script in scripts.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)

    return make


def test_every_look_has_one_line(capsys):
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == list(doctor.LOOKS)
    assert all(line.split()[0] in ("ok", "none", "mend") for line in lines)


def test_the_exit_code_tells_whether_something_has_to_be_mended(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "LOOKS", {"a": lambda: Finding(verdict="none", text="absent")})
    assert doctor.run([]) == 0
    monkeypatch.setattr(doctor, "LOOKS", {"a": lambda: Finding(verdict="mend", text="do this")})
    assert doctor.run([]) == 1
    assert capsys.readouterr().out.splitlines()[1] == "mend  a          do this"


def test_words_are_refused():
    with pytest.raises(LauncherError, match=r"doctor takes no words, given quickstart"):
        doctor.run(["quickstart"])


def test_a_missing_package_comes_with_the_command_that_installs_it():
    finding = doctor.package("no-such-thing")
    assert finding == Finding(
        verdict="mend", text=f"not installed: {sys.executable} -m pip install no-such-thing"
    )


def test_an_installed_package_is_told_by_its_version():
    assert doctor.package("pytest") == Finding(verdict="ok", text=pytest.__version__)


def test_without_a_driver_there_is_no_device(commands):
    assert doctor.devices().verdict == "none"


def test_devices_that_torch_cannot_drive_have_to_be_mended(commands, monkeypatch):
    commands(**{"nvidia-smi": "echo NVIDIA H200; echo NVIDIA H200"})
    monkeypatch.setattr(doctor, "_CUDA_QUESTION", "print(0)")
    finding = doctor.devices()
    assert finding.verdict == "mend"
    assert finding.text.startswith("2 of 2 visible: NVIDIA H200; torch")


def test_only_visible_devices_count(commands, monkeypatch):
    commands(**{"nvidia-smi": "echo NVIDIA H200; echo NVIDIA H200"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8c1b")
    monkeypatch.setattr(doctor, "_CUDA_QUESTION", "print(1)")
    assert doctor.devices() == Finding(verdict="ok", text="1 of 2 visible: NVIDIA H200")


def test_a_driver_that_fails_counts_as_no_device(commands):
    commands(**{"nvidia-smi": "echo NVIDIA-SMI has failed; exit 9"})
    assert doctor.devices().verdict == "none"


def test_half_of_slurm_has_to_be_mended(commands):
    commands(sbatch="", srun="")
    finding = doctor.slurm()
    assert finding.verdict == "mend"
    assert "sbatch, srun; not found: squeue, scontrol, scancel, sinfo" in finding.text


def test_all_of_slurm_or_none_of_it_is_fine(commands):
    assert doctor.slurm().verdict == "none"
    commands(**dict.fromkeys(doctor._SLURM_COMMANDS, ""))
    assert doctor.slurm().verdict == "ok"


def test_commands_without_a_controller_are_no_slurm(commands):
    commands(**dict.fromkeys(doctor._SLURM_COMMANDS, "exit 1"))
    assert doctor.slurm() == Finding(
        verdict="none", text="Slurm's commands are here, and no controller answers them"
    )


def test_a_machine_without_ports_is_told(monkeypatch):
    def refuse(address):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert doctor.port().verdict == "mend"
    assert "Operation not permitted" in doctor.port().text
