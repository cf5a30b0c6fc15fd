"""Real Slurm clusters of four virtual nodes for the tests of this folder."""

import os
import subprocess
from contextlib import contextmanager

import pytest

from tests.helpers.slurm_cluster import CLUSTER, Slurm

# Below 20000, where the rendezvous of jobs are; others for tests that run at the same time.
_FIRST_PORT = 10000 + os.getpid() % 500 * 20


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Starts a cluster of its own, and stops it at the end; gives the variables that reach it."""
    with _started(tmp_path_factory.mktemp("cluster"), first_port=_FIRST_PORT) as variables:
        yield variables


@pytest.fixture(scope="session")
def accounting_cluster(tmp_path_factory):
    """The same with accounts and qualities of service."""
    folder = tmp_path_factory.mktemp("accounting")
    with _started(folder, first_port=_FIRST_PORT + 10, CLUSTER_ACCOUNTING="yes") as variables:
        yield variables


@contextmanager
def _started(folder, *, first_port, **settings):
    folder.rmdir()
    environment = os.environ | {"CLUSTER_PORT": str(first_port)} | settings
    subprocess.run([CLUSTER, "start", folder], env=environment, check=True, timeout=120)
    try:
        yield {"SLURM_CONF": f"{folder}/etc/slurm.conf", "CLUSTER": str(folder)}
    finally:
        subprocess.run([CLUSTER, "stop", folder], check=True, timeout=60)


@pytest.fixture
def slurm(cluster, tmp_path):
    return Slurm(tmp_path, cluster)


@pytest.fixture
def slurm_with_accounts(accounting_cluster, tmp_path):
    return Slurm(tmp_path, accounting_cluster)
