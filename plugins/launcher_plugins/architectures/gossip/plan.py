"""Neighbour averaging (decentralized parallel SGD) on a ring: no replica ever talks to more than two others.

Every replica i keeps weights of its own and, at step k, computes its gradient at them while it exchanges
them with its neighbours:

    x[i]  <-  (x[i-1] + x[i] + x[i+1]) / 3  -  AdamW's step for the gradient of replica i's samples at x[i]

With two replicas the one neighbour counts once: (x[0] + x[1]) / 2. The moments stay where they are.

    replica 0    weights <-> 1 and 3   | F B F B ...           | average, clip, update
    replica 1    weights <-> 0 and 2   | F B F B ...           | average, clip, update

Source: Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms? (2017), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable

from launcher.contract.strategy import FP32_BYTES, Architecture, Collective, Fault, JobShape, RankCost


class Gossip(Architecture):
    """Each replica trains its own copy of the model and averages it with its neighbours' every step."""

    runtime = "launcher_plugins.architectures.gossip.runtime:update"
    exact = False

    def check(self, job: JobShape) -> Iterable[Fault]:
        """Somebody to average with, and a number format in which small steps survive the average.

        Inside a replica tensor and pipeline parallelism work as ever: each rank averages its slice with
        the ranks that hold the same slice, copies of a parameter alike. ZeRO refuses by itself.
        """
        precision = job.config.precision
        if job.mesh.dp == 1:
            rule = "averages each replica with its neighbours, and there is one replica (parallel.dp=1)"
            ways = ({"architecture.name": "decentralized"}, {"parallel.dp": 2})
            yield Fault("architecture.name", "gossip", rule, ways=ways)
        if precision.compute == "fp16":
            rule = "each replica would have a loss scale of its own (precision.compute=fp16)"
            yield Fault("architecture.name", "gossip", rule, ways=({"precision.compute": "bf16"},))
        elif precision.compute != "fp32" and not precision.master_weights:
            rule = f"averages in fp32, and the weights are kept in {precision.compute} alone"
            yield Fault("architecture.name", "gossip", rule, ways=({"precision.master_weights": True},))

    def cost(self, job: JobShape, pp_rank: int) -> RankCost:
        """The weights, once to each neighbour; theirs are held until the average is taken."""
        num_neighbours = min(2, job.mesh.dp - 1)
        total = job.num_trained_parameters(pp_rank) * FP32_BYTES
        num_buckets = -(-total // job.config.parallel.bucket_bytes)
        message = Collective(
            operation="send_recv",
            purpose="weights to neighbours",
            axis="dp",
            num_bytes=-(-total // max(1, num_buckets)),
            count=num_neighbours * num_buckets,
            overlappable=True,
            phase="begin",
        )
        return RankCost(
            persistent_bytes={"neighbours' weights": num_neighbours * total},
            collectives=(message,) if num_buckets else (),
        )
