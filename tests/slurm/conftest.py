"""A real Slurm cluster of four virtual nodes for the tests of this folder."""

import os
import subprocess

import pytest

from tests.slurm.harness import CLUSTER, Slurm


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Starts a cluster of its own, and stops it at the end; gives the variables that reach it."""
    folder = tmp_path_factory.mktemp("cluster")
    folder.rmdir()
    # Below 20000, where the rendezvous of jobs are; another one for tests that run at the same time.
    settings = os.environ | {"CLUSTER_PORT": str(10000 + os.getpid() % 1000 * 10)}
    subprocess.run([CLUSTER, "start", folder], env=settings, check=True, timeout=120)
    try:
        yield {"SLURM_CONF": f"{folder}/etc/slurm.conf", "CLUSTER": str(folder)}
    finally:
        subprocess.run([CLUSTER, "stop", folder], check=True, timeout=60)


@pytest.fixture
def slurm(cluster, tmp_path):
    return Slurm(tmp_path, cluster)
