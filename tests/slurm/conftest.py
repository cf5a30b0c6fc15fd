"""A real Slurm cluster of four virtual nodes for the tests of this folder."""

import os
import subprocess
from pathlib import Path

import pytest

CLUSTER = Path(__file__).resolve().parents[2] / "slurm" / "cluster"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Starts a cluster of its own, and stops it at the end; gives the variables that reach it."""
    folder = tmp_path_factory.mktemp("cluster")
    folder.rmdir()
    settings = os.environ | {"CLUSTER_PORT": "17100"}
    subprocess.run([CLUSTER, "start", folder], env=settings, check=True, timeout=120)
    try:
        yield {"SLURM_CONF": f"{folder}/etc/slurm.conf"}
    finally:
        subprocess.run([CLUSTER, "stop", folder], check=True, timeout=60)
