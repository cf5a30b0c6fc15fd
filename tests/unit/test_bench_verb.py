"""`trireme bench collectives` around its ranks: what is asked of them, what is refused, what is written."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from launcher.app.bench import MEASURED_GROUPS
from launcher.app.planning import make_plan
from launcher.base.errors import LauncherError
from launcher.bench.link_file import cluster_text
from launcher.bench.placements import default_sizes, placements, world_size
from launcher.bench.plot import svg_text
from launcher.bench.tables import json_text, result_text
from launcher.cli.main import main
from launcher.cli.verbs import VERBS
from launcher.contract.bench import OPERATIONS, NotMeasured
from tests.helpers.bench_results import BANDWIDTH, LATENCY_S, SIZES, result
from tests.helpers.configs import launch_config

LACKING = NotMeasured(
    operation="all_to_all", link="intra_node", num_ranks=2, reason="gloo has none", is_wrong=False
)


def cluster(nodes, devices):
    return launch_config(cluster={"nodes": nodes, "devices_per_node": devices}).cluster


def refused(capsys, *words):
    assert main(["bench", *words]) == 2
    return capsys.readouterr().err


# Groups


def test_groups_over_nodes_leave_no_device_out_and_work_at_once():
    found = placements(cluster(2, 4), [2, 4, 8])
    assert [(p.link, p.groups) for p in found] == [
        ("intra_node", ((0, 1),)),
        ("intra_node", ((0, 1, 2, 3),)),
        ("inter_node", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("inter_node", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("inter_node", (tuple(range(8)),)),
    ]


@pytest.mark.parametrize(
    ("nodes", "devices", "cores", "sizes"),
    [
        (1, 8, None, (2, 4, 8)),
        (1, 8, 5, (2, 4)),
        (1, 8, 1, (2,)),
        (3, 4, None, (2, 3, 4, 12)),
        (2, 1, None, (2,)),
    ],
)
def test_default_groups_are_powers_of_two_one_of_each_node_and_all(nodes, devices, cores, sizes):
    assert default_sizes(cluster(nodes, devices), cores) == sizes
    assert placements(cluster(nodes, devices), sizes)


def test_all_ranks_of_several_nodes_are_started():
    assert world_size(cluster(1, 8), [2, 4]) == 4
    assert world_size(cluster(2, 4), [2]) == 8


def test_a_size_that_no_link_connects_is_refused():
    text = (
        "--ranks 5: the cluster has 2 nodes of 4 devices. Give from 2 to 4 inside a node, or a multiple of 2"
    )
    with pytest.raises(LauncherError, match=text):
        placements(cluster(2, 4), [5])


# Words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "bench: known is collectives.\n"),
        (["collective"], "bench collective: known is collectives. Did you mean collectives?\n"),
        (["collectives", "quickstart"], "bench collectives takes no recipe, given 'quickstart': it trains "),
        (
            ["collectives", "--sizes", "4XB"],
            "--sizes 4XB: '4XB' is no size. Write bytes, 64KB, 1MB or 1MiB.\n",
        ),
        (
            ["collectives", "--ranks", "1"],
            "--ranks 1: give whole numbers of at least 2, such as --ranks 2,4.\n",
        ),
        (
            ["collectives", "--ranks", "9"],
            "--ranks 9: the cluster has 1 node of 8 devices. Give from 2 to 8, or ",
        ),
        (
            ["collectives", "--plot", "a.png"],
            "--plot a.png: the plot is an SVG picture. Give a name ending in ",
        ),
        (["collectives", "--json", "no/a.json"], "--json no/a.json: there is no folder no. Make it first.\n"),
        (
            ["collectives", "--save", "A b"],
            "--save A b: give a name of small letters, digits, - and _, or such",
        ),
        (
            ["collectives", "--save", "dgx_h100"],
            "--save dgx_h100: a cluster of this name ships with Trireme.",
        ),
        (["collectives", "site=box"], "site.name=box: has no effect on a run on this machine, where nothing"),
        (["collectives", "cluster.nodes=2"], "executor.name=torchrun: starts ranks on this machine only"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *words)
    assert list(tmp_path.iterdir()) == []


def test_settings_of_a_training_have_no_effect_and_are_refused_all_at_once(capsys):
    text = refused(capsys, "collectives", "parallel.tp=2", "model=gpt2_124m", "cluster.nodes=1")
    assert "parallel.tp=2: has no effect here: what is measured depends on cluster, device, executor" in text
    assert "model=gpt2_124m: has no effect here" in text
    assert "cluster.nodes" not in text


def test_files_that_are_there_are_not_written_over(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    mine = tmp_path / "trireme" / "cluster" / "mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.touch()
    Path("a.json").touch()
    assert "already exists" in refused(capsys, "collectives", "--json", "a.json")
    assert "already exists" in refused(capsys, "collectives", "--save", "mine")


# What is shown


def test_the_tables_show_times_bandwidths_lines_and_what_is_missing():
    text = result_text(result(not_measured=(LACKING,)))
    assert "2 ranks inside a node: time of one operation" in text
    assert re.search(r"\n  all_reduce +41 us +302 us +4\.23 ms\n", text)
    assert "all_to_all, 2 ranks inside a node: gloo has none" in text
    assert "inside a node  20 us ± 0 us  4.00 GB/s ± 0 B/s  0% (0%)" in text


def test_one_size_shows_bandwidths_and_no_line():
    text = result_text(result(sizes=(4096,)))
    assert "none: a fit needs two sizes of an operation that plans use" in text


def test_the_json_holds_every_number():
    document = json.loads(json_text(result()))
    assert len(document["measurements"]) == len(OPERATIONS) * len(SIZES) * 2
    assert len(document["operations"]) == len(OPERATIONS) * 2
    assert document["links"]["intra_node"]["latency_s"] == pytest.approx(LATENCY_S)
    assert document["result"]["hostnames"] == ["one"]


def test_the_plot_is_a_picture_with_a_line_for_every_operation_in_every_panel():
    picture = ET.fromstring(svg_text(result()))
    names = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert [names.count(operation) for operation in OPERATIONS] == [2] * len(OPERATIONS)
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}polyline"))) == 2 * len(OPERATIONS)


# What is saved


def test_a_plan_counts_with_a_saved_cluster(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    words = ("parallel.pp=1", "parallel.dp=4", "parallel.bucket_bytes=1000000000")
    assumed = make_plan("quickstart", words).plan
    saved = tmp_path / "trireme" / "cluster" / "mine.yaml"
    saved.parent.mkdir(parents=True)
    saved.write_text(cluster_text("mine", assumed.config.cluster, result(), "2025-01-02"))
    plan = make_plan("quickstart", (*words, "cluster=mine")).plan
    before, after = (next(r for r in p.traffic if r.purpose == "gradients") for p in (assumed, plan))
    assert after.time_s == pytest.approx(6 * LATENCY_S + after.sent_bytes / BANDWIDTH, rel=1e-3)
    assert after.time_s < before.time_s / 1.5
    assert plan.schedule.step_s < assumed.schedule.step_s
    assert plan.config.cluster.inter_node == assumed.config.cluster.inter_node
    assert "# between nodes: not measured, as in local_cpu" in saved.read_text()


def test_no_cluster_is_saved_from_sizes_that_tell_no_bandwidth():
    with pytest.raises(LauncherError, match=r"these sizes do not determine a bandwidth\. Give"):
        cluster_text("mine", cluster(1, 8), result(sizes=(4096,)), "2025-01-02")


def test_sizes_that_tell_no_bandwidth_are_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "collectives", "--sizes", "4KB", "--save", "links.yaml"]) == 2
    assert "--save: these sizes do not determine a bandwidth. Give several" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_settings_that_are_completed_are_those_that_a_measurement_depends_on():
    assert VERBS["bench"].groups == MEASURED_GROUPS
