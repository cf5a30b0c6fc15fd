import socket
import sys

import pytest

from launcher.base.errors import LauncherError
from launcher.cli.cluster import doctor
from launcher.cli.cluster.doctor import Check
from launcher.cli.main import main, run_verb


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
    assert [line.split()[1] for line in lines] == list(doctor.CHECKS)
    assert all(line.split()[0] in ("ok", "none", "fix") for line in lines)


def test_the_exit_code_tells_whether_something_has_to_be_fixed(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", {"a": lambda: Check("none", "absent")})
    assert run_verb("doctor", []) == 0
    monkeypatch.setattr(doctor, "CHECKS", {"a": lambda: Check("fix", "do this")})
    assert run_verb("doctor", []) == 1
    assert capsys.readouterr().out.splitlines()[1] == "fix   a          do this"


def test_words_are_refused():
    with pytest.raises(LauncherError, match=r"doctor takes no words, given quickstart"):
        run_verb("doctor", ["quickstart"])


def test_a_missing_package_comes_with_the_command_that_installs_it():
    check = doctor.package("no-such-thing")
    assert check == Check("fix", f"not installed: {sys.executable} -m pip install no-such-thing")


def test_an_installed_package_is_told_by_its_version():
    assert doctor.package("pytest") == Check("ok", pytest.__version__)


def test_without_a_driver_there_is_no_device(commands):
    assert doctor.devices().status == "none"


def test_devices_that_torch_cannot_drive_have_to_be_fixed(commands, monkeypatch):
    commands(**{"nvidia-smi": "echo NVIDIA H200; echo NVIDIA H200"})
    monkeypatch.setattr(doctor, "_CUDA_DEVICES", "print(0)")
    check = doctor.devices()
    assert check.status == "fix"
    assert check.text.startswith("2 of 2 visible: NVIDIA H200; torch")


def test_only_visible_devices_count(commands, monkeypatch):
    commands(**{"nvidia-smi": "echo NVIDIA H200; echo NVIDIA H200"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8c1b")
    monkeypatch.setattr(doctor, "_CUDA_DEVICES", "print(1)")
    assert doctor.devices() == Check("ok", "1 of 2 visible: NVIDIA H200")


def test_a_driver_that_fails_counts_as_no_device(commands):
    commands(**{"nvidia-smi": "echo NVIDIA-SMI has failed; exit 9"})
    assert doctor.devices().status == "none"


def test_half_of_slurm_has_to_be_fixed(commands):
    commands(sbatch="", srun="")
    check = doctor.slurm()
    assert check.status == "fix"
    assert "sbatch, srun; not found: squeue, scontrol, scancel, sinfo" in check.text


def test_all_of_slurm_or_none_of_it_is_fine(commands):
    assert doctor.slurm().status == "none"
    commands(**dict.fromkeys(doctor._SLURM_COMMANDS, ""))
    assert doctor.slurm().status == "ok"


def test_commands_without_a_controller_are_no_slurm(commands):
    commands(**dict.fromkeys(doctor._SLURM_COMMANDS, "exit 1"))
    assert doctor.slurm() == Check("none", "Slurm's commands are installed, but no controller answers")


def test_a_machine_without_ports_is_told(monkeypatch):
    def refuse(address):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert doctor.port().status == "fix"
    assert "Operation not permitted" in doctor.port().text
