"""Messages of a step, counted by hand for small jobs."""

from __future__ import annotations

import pytest

from launcher.base.arithmetic import ring_share, ring_steps
from launcher.plan.build import build
from tests.helpers.configs import MIXED, job_shape, launch_config

HIDDEN, SEQ, VOCAB, LAYERS = 64, 32, 256, 4


def rows(config, pp_rank=0):
    """(operation, count, bytes of one message) by what the rows of a rank carry; sums over operations."""
    return {
        (row.purpose, row.operation): (row.count, row.message_bytes)
        for row in build(config).traffic
        if row.pp_rank == pp_rank
    }


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(num_ranks):
    parts = [ring_share(operation, num_ranks) for operation in ("reduce_scatter", "all_gather")]
    assert ring_share("all_reduce", num_ranks) == pytest.approx(sum(parts))
    assert ring_steps("all_reduce", num_ranks) == 2 * ring_steps("all_gather", num_ranks)


@pytest.mark.parametrize(
    ("operation", "sent", "steps"),
    [
        ("all_reduce", 1500, 6),
        ("reduce_scatter", 750, 3),
        ("all_gather", 750, 3),
        ("all_to_all", 750, 3),
        ("broadcast", 1000, 3),
        ("send_recv", 1000, 1),
    ],
)
def test_ring_volumes_on_four_ranks(operation, sent, steps):
    assert 1000 * ring_share(operation, 4) == sent
    assert ring_steps(operation, 4) == steps
    assert ring_share(operation, 1) == 0
    assert ring_steps(operation, 1) == 0


def test_one_rank_sends_nothing():
    assert build(launch_config()).traffic == ()


def test_data_parallelism_sums_every_gradient_once_in_buckets():
    config = launch_config(parallel={"dp": 2, "bucket_bytes": 100_000})
    plan = build(config)
    gradients = plan.traffic[0]
    total = plan.num_parameters * 4
    assert gradients.count == -(-total // 100_000)
    assert total <= gradients.count * gradients.message_bytes < total + gradients.count
    assert gradients.sent_bytes == pytest.approx(total, abs=gradients.count)  # 2 (n-1)/n = 1
    assert gradients.overlappable


def test_tensor_parallelism_sums_twice_per_layer_each_way_and_at_the_ends():
    found = rows(launch_config(batch={"global_size": 6, "micro_size": 2}, parallel={"tp": 2}))
    m, message = 3, 2 * SEQ * HIDDEN * 4
    assert found["layers", "all_reduce"] == (4 * LAYERS * m, message)
    assert found["embedding", "all_reduce"] == (m, message)
    assert found["head", "all_reduce"] == (m, message)
    assert found["largest logit", "all_reduce"] == (m, 2 * SEQ * 4)
    assert found["sums of the loss", "all_reduce"] == (m, 2 * 2 * SEQ * 4)
    assert found["gradient norm", "all_reduce"] == (1, 4)
    assert len(found) == 6


def test_sequence_parallelism_moves_the_same_bytes_and_gathers_each_input_once_more():
    whole = {"tp": 4}
    split = {**whole, "sequence_parallel": True}
    volumes = []
    for parallel in (whole, split, {**split, "recompute": "full"}):
        purposes = ("layers", "embedding", "head")
        traffic = [row for row in build(launch_config(parallel=parallel)).traffic if row.purpose in purposes]
        volumes.append(
            {purpose: sum(r.sent_bytes for r in traffic if r.purpose == purpose) for purpose in purposes}
        )
    # A sum is a scatter and a gather: of four of each per layer, two gathers are done twice.
    assert volumes[1]["layers"] * 8 == volumes[0]["layers"] * 10
    assert volumes[1]["head"] * 2 == volumes[0]["head"] * 3
    assert volumes[1]["embedding"] == volumes[0]["embedding"]
    assert volumes[2] == volumes[0]  # what is computed again needs no second gather


def test_sequence_parallelism_sums_the_gradients_of_whole_parameters_in_one_message():
    found = rows(launch_config(parallel={"tp": 2, "sequence_parallel": True}))
    num_elements = (6 * LAYERS + 2) * HIDDEN + SEQ * HIDDEN
    assert found["replicated gradients", "all_reduce"] == (1, num_elements * 4)


def test_tensor_parallelism_sums_the_gradients_of_the_norms_of_heads():
    model = {"family": "llama", "qk_norm": True, "head_dim": 8}
    found = rows(launch_config(model=model, parallel={"tp": 2}))
    assert found["replicated gradients", "all_reduce"] == (1, 2 * 8 * LAYERS * 4)
    assert ("replicated gradients", "all_reduce") not in rows(launch_config(parallel={"tp": 2}))


@pytest.mark.parametrize(("dropout", "extra"), [(0.0, 1), (0.1, 2)])
def test_recomputation_repeats_the_sums_that_the_backward_needs(dropout, extra):
    config = launch_config(
        model={"dropout": dropout}, batch={"global_size": 3}, parallel={"tp": 2, "recompute": "full"}
    )
    assert rows(config)["recomputation", "all_reduce"] == (extra * LAYERS * 3, SEQ * HIDDEN * 4)


@pytest.mark.parametrize(("sequence_parallel", "share"), [(False, 1), (True, 2)])
def test_a_boundary_carries_one_message_each_way_per_microbatch(sequence_parallel, share):
    parallel = {"pp": 4, "tp": 2, "sequence_parallel": sequence_parallel}
    config = launch_config(batch={"global_size": 10, "micro_size": 2}, parallel=parallel, precision=MIXED)
    message = 2 * SEQ * HIDDEN * 2 // share
    assert rows(config, 0)["activations", "send_recv"] == (5, message)
    assert ("activation gradients", "send_recv") not in rows(config, 0)
    assert rows(config, 1)["activations", "send_recv"] == (5, message)
    assert rows(config, 1)["activation gradients", "send_recv"] == (5, message)
    assert ("activations", "send_recv") not in rows(config, 3)


def test_interleaving_sends_once_per_chunk():
    config = launch_config(
        batch={"global_size": 4}, parallel={"pp": 2, "num_chunks": 2, "schedule": "interleaved_1f1b"}
    )
    counts = [rows(config, rank)["activations", "send_recv"][0] for rank in (0, 1)]
    assert counts == [2 * 4, 1 * 4]  # stages 0 and 2, and stage 1: the last stage sends nothing on
    assert sum(counts) == (2 * 2 - 1) * 4


def test_tied_embeddings_are_summed_by_their_two_holders_only():
    config = launch_config(model={"tied_embeddings": True}, parallel={"pp": 4, "tp": 2})
    holders = [rank for rank in range(4) if ("tied embedding gradients", "all_reduce") in rows(config, rank)]
    assert holders == [0, 3]
    tied = next(row for row in build(config).traffic if row.purpose == "tied embedding gradients")
    assert tied.message_bytes == tied.sent_bytes == VOCAB * HIDDEN // 2 * 4


def test_the_gradient_norm_is_summed_over_the_ranks_of_a_replica():
    plan = build(launch_config(parallel={"pp": 2, "tp": 2}))
    norm = next(row for row in plan.traffic if row.purpose == "gradient norm")
    assert norm.sent_bytes == 2 * 3 / 4 * 4


def test_only_the_last_stage_shares_its_loss():
    config = launch_config(parallel={"pp": 2, "dp": 2})
    assert ("loss and targets", "all_reduce") not in rows(config, 0)
    assert rows(config, 1)["loss and targets", "all_reduce"] == (2, 8)


def test_time_is_latency_and_bytes_over_the_slowest_link_of_the_group():
    config = launch_config(batch={"global_size": 3}, parallel={"tp": 8}, model={"num_heads": 8})
    inside = next(row for row in build(config).traffic if row.purpose == "embedding")
    message = SEQ * HIDDEN * 4
    assert inside.time_s == pytest.approx(3 * (14 * 1e-6 + 2 * 7 / 8 * message / 100e9))
    spread = launch_config(
        batch={"global_size": 3},
        parallel={"tp": 8},
        model={"num_heads": 8},
        cluster={"nodes": 2, "devices_per_node": 4},
    )
    across = next(row for row in build(spread).traffic if row.purpose == "embedding")
    assert across.time_s == pytest.approx(3 * (14 * 1e-5 + 2 * 7 / 8 * message / 10e9))


def test_a_padded_vocabulary_is_what_the_ranks_exchange():
    config = launch_config(model={"vocab_size": 257, "tied_embeddings": True}, parallel={"pp": 2, "tp": 2})
    tied = next(row for row in build(config).traffic if row.purpose == "tied embedding gradients")
    assert tied.message_bytes == 258 // 2 * HIDDEN * 4
    assert job_shape(config).model.num_parameters > build(config).num_parameters
