"""W1 as a carefully written Flower app, for the simulation of many nodes on one
machine.

The ServerApp sends w to every node and takes the weighted average of the replies. The
ClientApp makes τ local updates in numpy. Shards and mini-batches are those of a
fedbudget run. A process prepares all of them at its first message and keeps them in
memory as float32, so that a round does not load, convert or draw data.

The app is a separate module because Ray serializes code that it cannot import with
every message, and such code loses its state.
"""

import time
from functools import cache
from typing import NamedTuple

import numpy as np
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from benchmarks.workload import (
    BATCH,
    ETA,
    FEATURES,
    REGULARIZATION,
    TAU,
    dataset,
    settings,
)
from fedbudget.arrays import Float32
from fedbudget.data.sampling import BatchIndices, Sampler
from fedbudget.launch.inputs import batch_of
from fedbudget.launch.prepared import Overrides
from fedbudget.launch.simulate import simulate

client = ClientApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """Make τ local updates of one node."""
    nodes, rounds, number = (_asked(message, name) for name in ("nodes", "rounds", "round"))
    samples, node = _samples(nodes, rounds), int(context.node_config["partition-id"])
    w = _w(message).copy()
    x, y = samples.x[node], samples.y[node]
    for update in range(TAU):
        rows = samples.indices[number].of(node, update, len(x))
        batch, target = x[rows], y[rows]
        slack = np.maximum(0, 1 - target * (batch @ w))
        w -= ETA * (REGULARIZATION * w - (target * slack) @ batch / BATCH)
    return Message(
        RecordDict({"w": ArrayRecord([w]), "size": MetricRecord({"samples": len(x)})}),
        reply_to=message,
    )


def server(nodes: int, rounds: int, ended: list[float], ws: list[Float32]) -> ServerApp:
    """Return the ServerApp; it records the end time and w of each round."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        w = np.zeros(FEATURES, np.float32)
        while len(found := list(grid.get_node_ids())) < nodes:
            time.sleep(0.1)
        for number in range(rounds):
            asked = ConfigRecord({"round": number, "rounds": rounds, "nodes": nodes})
            content = RecordDict({"w": ArrayRecord([w]), "asked": asked})
            replies = list(
                grid.send_and_receive([Message(content, node, "train") for node in found])
            )
            sizes = np.array(
                [reply.content.metric_records["size"]["samples"] for reply in replies]
            )
            assert len(sizes) == nodes
            w = np.average([_w(reply) for reply in replies], axis=0, weights=sizes).astype(
                np.float32
            )
            ended.append(time.perf_counter())
            ws.append(w)

    return app


def _w(message: Message) -> Float32:
    return message.content.array_records["w"].to_numpy_ndarrays()[0]


def _asked(message: Message, name: str) -> int:
    found = message.content.config_records["asked"][name]
    assert isinstance(found, int)
    return found


class _Samples(NamedTuple):
    """Features and targets of all nodes, and the mini-batches of each round."""

    x: list[Float32]
    y: list[Float32]
    indices: list[BatchIndices]


@cache
def _samples(nodes: int, rounds: int) -> _Samples:
    prepared = simulate(settings(nodes, rounds), Overrides(dataset=dataset()))
    shards = prepared.shards
    sampler = Sampler(shards.size, batch_of(prepared.settings), prepared.settings.seed)
    table, rows = shards.table, [shards.rows_of(node) for node in range(nodes)]
    return _Samples(
        [table.scaled(own) for own in rows],
        [table.y[own] for own in rows],
        [sampler.round(TAU, fresh=True) for _ in range(rounds)],
    )
