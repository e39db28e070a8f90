"""Cut connections: a node reconnects with its memory, for every kind of data."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedbudget import Settings
from fedbudget.arrays import Float32
from fedbudget.data.tables import TableOptions
from fedbudget.engines.grpc import node as node_module
from fedbudget.engines.remote.messages import Farewell
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.launch.inputs import from_dataset, from_file, from_value
from fedbudget.launch.method import build_method
from fedbudget.launch.task import agree_on_task
from fedbudget.models import TorchModel
from fedbudget.protocol.aggregator import Aggregator
from support.breakable_line import breakable_line
from support.methods import bits
from support.networked import LONG, PausableWorker, aggregator, network, wait_until

NODES = 2


def of_csv(folder: Path, node: int) -> NodeData:
    rng = np.random.default_rng(node)
    rows = [
        f"{a:.4f},{b:.4f},{'dry' if a > b else 'wet'}"
        for a, b in rng.normal(3 + node, 2, size=(40, 2))
    ]
    path = folder / f"{node}.csv"
    path.write_text("\n".join(["a,b,soil", *rows]) + "\n")
    return from_file(path, TableOptions("soil"))


def of_npz(folder: Path, node: int) -> NodeData:
    rng = np.random.default_rng(node)
    np.savez(
        folder / f"{node}.npz",
        x=rng.normal(size=(40, 5)).astype(np.float32),
        y=rng.integers(0, 3, 40),
    )
    return from_file(folder / f"{node}.npz")


def of_idx(folder: Path, node: int) -> NodeData:
    rng = np.random.default_rng(node)
    labels = np.arange(40, dtype=np.uint8) % 10
    images = rng.integers(0, 255, (40, 3, 4), dtype=np.uint8)
    header = struct.pack(">4B3I", 0, 0, 8, 3, *images.shape)
    (folder / f"{node}-images-idx3-ubyte").write_bytes(header + images.tobytes())
    (folder / f"{node}-labels-idx1-ubyte").write_bytes(
        struct.pack(">4BI", 0, 0, 8, 1, 40) + labels.tobytes()
    )
    return from_file(folder / f"{node}-images-idx3-ubyte")


def of_shard(folder: Path, node: int) -> NodeData:
    return from_dataset(
        Settings(dataset="digits", partition="case:2"), f"{node + 1}/{NODES}"
    )


class Noisy(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Samples with a random transform, read one by one."""

    def __init__(self, node: int) -> None:
        self._x = torch.from_numpy(
            np.random.default_rng(node).normal(size=(40, 5)).astype(np.float32)
        )

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        return self._x[place] + 0.1 * torch.randn(5), place % 3


def of_torch(folder: Path, node: int) -> NodeData:
    return from_value(Noisy(node))


def network_of_torch() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3)
    )


@pytest.mark.parametrize("data", [of_csv, of_npz, of_idx, of_shard, of_torch])
def test_cut_connection_keeps_same_bits(
    data: Callable[[Path, int], NodeData], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut between two rounds and during one. Every w equals that of an uninterrupted
    run.
    """
    monkeypatch.setattr(node_module, "_FIRST_WAIT", 0.01)
    own = [data(tmp_path, node) for node in range(NODES)]
    make = network_of_torch if data is of_torch else None
    assert bits(run(own, make, cut=True)) == bits(run(own, make, cut=False))


def run(
    own: list[NodeData], make: Callable[[], nn.Module] | None, *, cut: bool
) -> list[Float32]:
    """The w of five rounds. With `cut`, the connection of the first node is cut after round
    2 and in round 4.
    """
    settings = Settings(
        model="softmax", method="frugal", batch_size=8, seed=5, budget=("time=1h",)
    )
    method, known = build_method(settings), aggregator().ledger
    models = [None if make is None else TorchModel(make) for _ in range(1 + NODES)]
    settings, method, task, model = agree_on_task(
        settings, method, [each.samples() for each in own], models[0]
    )
    with network() as net, breakable_line(net.server.port) as line:
        net.task, w = task, model.initial(settings.seed)
        costs: Any = {"budget": known.budget, "expected": known.costs}
        net.aggregator = Aggregator(w, method=method, statistics=model.statistics, **costs)
        workers = [
            PausableWorker(each, model=theirs)
            for each, theirs in zip(own, models[1:], strict=True)
        ]
        joined = [
            net.join(0, worker=workers[0], address=line.address),
            net.join(1, worker=workers[1]),
        ]
        net.start(NODES)
        net.round(), net.round()
        if cut:
            line.cut()
            wait_until(lambda: line.made == 2)
            wait_until(lambda: net.server._rounds.count(ready=True) == NODES)
        net.round()
        workers[0].go.clear()
        net.begin(least=NODES)
        if cut:
            wait_until(
                lambda: any(
                    peer.asked for peer in net.server._peers if peer.name == "node-0"
                )
            )
            line.cut()
        workers[0].go.set()
        net.finish()
        assert net.round().missed == ()
        assert line.made == (3 if cut else 1)
        assert net.server.counters.late == 0
        net.server.close(Farewell("the run is over"))
        assert [each.result(LONG).reason for each in joined] == ["the run is over"] * NODES
        return net.all_w
