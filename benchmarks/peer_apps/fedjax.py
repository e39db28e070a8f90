"""W1 with FedJAX's `for_each_client`.

It compiles the step of a client and processes clients one after the other.
"""

from collections.abc import Callable
from typing import Any

import fedjax
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peer_apps.common import ETA, REGULARIZATION, Work, main


def run(work: Work, report: Callable[[Any], None]) -> None:
    def client_init(shared: Any, _: Any) -> Any:
        return shared

    def client_step(w: Any, batch: Any) -> Any:
        slack = jnp.maximum(0, 1 - batch["y"] * (batch["x"] @ w))
        return w - ETA * (
            REGULARIZATION * w - (batch["y"] * slack) @ batch["x"] / len(batch["y"])
        )

    def client_final(_: Any, w: Any) -> Any:
        return w

    train = fedjax.for_each_client(client_init, client_step, client_final)
    w = jnp.zeros(work.x[0].shape[1], jnp.float32)
    sizes = [len(y) for y in work.y]
    for number in range(work.rounds):
        clients = [
            (
                node,
                [
                    {"x": work.x[node][rows], "y": work.y[node][rows]}
                    for rows in work.batches[number, node]
                ],
                None,
            )
            for node in range(work.nodes)
        ]
        ends = ((end, sizes[node]) for node, end in train(w, clients))
        w = jax.block_until_ready(fedjax.tree_util.tree_mean(ends))
        report(np.asarray(w))


if __name__ == "__main__":
    main(run)
