"""Ranks in containers, on a real Slurm with a plugin of our own in the place of pyxis."""

import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.needs("slurm"), pytest.mark.needs("spank")]


@pytest.fixture
def slurm(slurm, tmp_path):
    """A cluster whose srun knows the options of containers; without them it does what it always does."""
    plugin = Path(slurm.environment["CLUSTER"]) / "pyxis.so"
    source = Path(__file__).with_name("pyxis.c")
    subprocess.run(["gcc", "-Wall", "-shared", "-fPIC", "-o", plugin, source], check=True)
    (plugin.parent / "etc" / "plugstack.conf").write_text(f"required {plugin}\n")
    yield slurm
    (plugin.parent / "etc" / "plugstack.conf").unlink()


@pytest.fixture
def image(tmp_path):
    """An image with variables of its own, some of which the job sets, too."""
    path = tmp_path / "torch.sqsh"
    path.write_text(
        "NCCL_DEBUG=WARN\nMASTER_ADDR=nowhere\nPYTHONUNBUFFERED=no\nPATH=/image/bin:/usr/bin:/bin\n"
    )
    return path


def test_variables_of_the_job_reach_the_ranks_whatever_the_image_sets(slurm, image):
    words = (f"site.container_image={image}", "+site.env.NCCL_DEBUG=INFO", "site.forward=[FROM_HERE]")
    slurm.environment["FROM_HERE"] = "here"
    does = 'echo "$NCCL_DEBUG $FROM_HERE $PYTHONUNBUFFERED $PATH" >>"$run/variables"'
    run, _ = slurm.submit(does, *words)
    slurm.trireme("wait", "run")
    assert set((run / "variables").read_text().splitlines()) == {"INFO here 1 /image/bin:/usr/bin:/bin"}
    ((_, address),) = slurm.rendezvous()
    assert {told[4] for told in slurm.told()} == {address}


def test_a_mount_that_is_not_there_fails_the_job_with_what_the_plugin_says(slurm, image, tmp_path):
    words = (f"site.container_image={image}", f"site.container_mounts=['{tmp_path}/absent:/data']")
    slurm.submit("true", *words)
    assert f"no {tmp_path}/absent to mount" in slurm.trireme("wait", "run", code=1)
