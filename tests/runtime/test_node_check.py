"""The check of a node: what it measures, alone and with its neighbours."""

import functools
import socket
import time

import pytest
import torch

from launcher.base import machine
from launcher.runtime.measure import node_check
from tests.helpers.ranks import run_ranks

ALONE = ("--device", "cpu", "--meet", "127.0.0.1:1", "--num-nodes", "1", "--limit-s", "60")
NODE = ("--node", "n0", "--index", "0")


def figures(text):
    return {figure: float(value) for _, figure, value in (line.split(" ") for line in text.splitlines())}


def test_a_node_tells_what_it_has_and_how_fast_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # of this process, and it forks
    assert node_check.main(["--run", str(tmp_path), *ALONE, *NODE]) == 0
    told = figures(capsys.readouterr().out)
    assert list(told) == ["index", "memory_bytes", "disk_bytes", "scratch_bytes", "matmul_flops"]
    assert told["memory_bytes"] == pytest.approx(machine.free_memory_bytes(), rel=0.5)
    assert told["disk_bytes"] == pytest.approx(machine.free_disk_bytes(str(tmp_path)), rel=0.5)
    assert 1e7 < told["matmul_flops"] < 1e14


def test_a_slower_matmul_is_told_as_one(monkeypatch):
    device = torch.device("cpu")
    usual = node_check.matmul_flops(device)
    true = torch.Tensor.__matmul__

    def slowed(one, other):
        time.sleep(0.1)
        return true(one, other)

    monkeypatch.setattr(torch.Tensor, "__matmul__", slowed)
    assert node_check.matmul_flops(device) < 2 * 512**3 / 0.1 < usual


def test_the_visible_gpus_of_a_node_are_counted(tmp_path, capsys, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/bash\nprintf 'H100\\nH100\\nH100\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    monkeypatch.setattr(node_check, "_speeds", lambda *_: ())
    node_check.main(["--run", str(tmp_path), *ALONE, *NODE, "--device", "cuda"])
    assert figures(capsys.readouterr().out)["devices"] == 2


@functools.cache
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def links(rank, port, num_nodes, absent):
    """What a node tells of its link to the next one; the absent ones do not come."""
    if rank == absent:
        return {}
    words = ("--device", "cpu", "--meet", f"127.0.0.1:{port}", "--num-nodes", str(num_nodes))
    parser = [*words, "--limit-s", "0", "--node", f"n{rank}", "--index", str(rank), "--run", "/"]
    return dict(node_check.links(node_check.parsed(parser), torch.device("cpu"), time.monotonic() + 3))


def test_neighbours_exchange_data_and_the_lower_one_tells_how_fast():
    told = run_ranks(3, links, free_port(), 3, None)
    assert [list(each) for each in told] == [["link_bytes_per_s"], ["link_bytes_per_s"], []]
    assert all(1e5 < each["link_bytes_per_s"] < 1e12 for each in told[:2])


def test_a_neighbour_that_does_not_come_is_told_by_what_is_missing():
    assert [list(each) for each in run_ranks(3, links, free_port(), 3, 2)] == [["link_bytes_per_s"], [], []]
