"""A feature of your own, from one file: in one process, on Ray and over gRPC.

The file is the example of docs/guide/extending.md. Processes import it from their folder.
"""

import socket
import sys
from pathlib import Path

import numpy as np
import pytest

from fedbudget.arrays import Float32
from fedbudget.runs.record import RoundRecord
from support.doc_blocks import blocks_of
from support.processes import Command, Commands, commands, records, without_wall

PAGE = Path(__file__).parents[2] / "docs/guide/extending.md"
SETTINGS = """
import sys
import numpy as np
import fedbudget

settings = {
    "model": "softmax",
    "costs": "simulated",
    "budget": "time=1000000s",
    "tau": 4,
    "rounds": 6,
    "step_size": 0.1,
    "batch_size": 8,
    "compress": "none",
    "combine": "clipped",
    "out": sys.argv[1],
}
"""
TRAIN = f"""{SETTINGS}
import anchor

features = [anchor.Anchor(float(sys.argv[3]))]
shards = []
for name in ("n1", "n2"):
    with np.load(f"{{name}}.npz") as file:
        shards.append((file["x"], file["y"]))
result = fedbudget.train(shards=shards, engine=sys.argv[2], features=features, **settings)
np.save(f"{{sys.argv[1]}}.npy", result.w)
"""
SERVE = f"""{SETTINGS}
import anchor

features = [anchor.Anchor(float(sys.argv[3]))]
result = fedbudget.serve(sys.argv[2], nodes=2, features=features, **settings)
np.save(f"{{sys.argv[1]}}.npy", result.w)
"""
JOIN = """
import sys
import fedbudget
{imports}
try:
    own = {{"data": f"{{sys.argv[2]}}.npz", "seeded_batches": True}}
    fedbudget.join(sys.argv[1], name=sys.argv[2], **own)
except fedbudget.FedbudgetError as error:
    sys.exit(f"refused: {{error}}")
"""


def write(start: Commands) -> None:
    """Write the feature, the programs and the nodes' data."""
    texts = [each.text for each in blocks_of(PAGE) if "class Anchor(Feature)" in each.text]
    feature = texts[0].split("result = fedbudget.train")[0]
    programs = {
        "anchor": feature,
        "train": TRAIN,
        "aggregator": SERVE,
        "node": JOIN.format(imports="import anchor"),
        "stranger": JOIN.format(imports=""),
    }
    for name, text in programs.items():
        (start.folder / f"{name}.py").write_text(text)
    start.write(2)


def program(start: Commands, name: str, *arguments: str) -> Command:
    return start.run(f"{name}.py", *arguments, program=[sys.executable])


def train(start: Commands, out: str, engine: str, mu: float = 0.5) -> Float32:
    """Run it without a network and return w."""
    command = program(start, "train", out, engine, str(mu))
    assert command.end() == 0, command.errors
    return final_w(start, out)


def final_w(start: Commands, out: str) -> Float32:
    w: Float32 = np.load(start.folder / f"{out}.npy")
    return w


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def distances(rounds: list[RoundRecord]) -> list[float]:
    """What the feature records: the mean distance of the nodes' updates."""
    return [record.extra["distance"] for record in rounds if record.extra is not None]


def test_same_w_over_grpc(tmp_path: Path) -> None:
    with commands(tmp_path) as start:
        write(start)
        address = free_address()
        aggregator = program(start, "aggregator", "served", address, "0.5")
        aggregator.wait_until(lambda: listening(address))
        nodes = [program(start, "node", address, name) for name in ("n1", "n2")]
        assert aggregator.end() == 0, aggregator.errors
        assert [node.end() for node in nodes] == [0, 0], nodes[0].errors
        w = train(start, "one", "in-process")
        without = train(start, "none", "in-process", mu=0.0)
        served = final_w(start, "served")
    assert served.tobytes() == w.tobytes()
    ours = records(tmp_path / "one")
    assert without_wall(records(tmp_path / "served")) == without_wall(ours)
    plain = distances(records(tmp_path / "none"))
    assert w.tobytes() != without.tobytes()
    pairs = zip(distances(ours), plain, strict=True)
    assert all(0 < penalised < free for penalised, free in pairs)


@pytest.mark.slow
def test_same_w_on_ray(tmp_path: Path) -> None:
    with commands(tmp_path) as start:
        write(start)
        assert train(start, "ray", "ray").tobytes() == (
            train(start, "one", "in-process").tobytes()
        )
    assert without_wall(records(tmp_path / "ray")) == without_wall(
        records(tmp_path / "one")
    )


def test_node_without_the_feature_is_refused(tmp_path: Path) -> None:
    """Its program names the feature and ends; the run waits for a node that has it."""
    with commands(tmp_path) as start:
        write(start)
        address = free_address()
        aggregator = program(start, "aggregator", "served", address, "0.5")
        aggregator.wait_until(lambda: listening(address))
        stranger = program(start, "stranger", address, "n1")
        node = program(start, "node", address, "n2")
        assert stranger.end() == 1
        stranger.wait_for("refused: .*the run uses the feature Anchor")
        again = program(start, "node", address, "n1")
        assert aggregator.end() == 0, aggregator.errors
        assert [node.end(), again.end()] == [0, 0]


def listening(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
