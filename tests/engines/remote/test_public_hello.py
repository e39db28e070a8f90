"""What a node sends before the first round of a private run: nothing that follows from the
values of its table.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbudget.data.schema import read_schema
from fedbudget.data.tables import TableOptions
from fedbudget.engines.grpc.node import run_node
from fedbudget.engines.grpc.server import AggregatorServer
from fedbudget.engines.grpc.tokens import Tokens
from fedbudget.engines.remote import wire
from fedbudget.engines.remote.messages import Farewell, Welcome
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.engines.remote.node_limits import BeyondLimits, PrivacyAccount
from fedbudget.engines.remote.task import DataTerms, SamplesDescription, agree
from fedbudget.engines.remote.worker import Worker
from fedbudget.errors import UserError
from fedbudget.launch.inputs import from_file, from_value
from fedbudget.launch.method import build_method
from fedbudget.launch.task import agree_on_task
from fedbudget.protocol.messages import PeerError
from fedbudget.resources.privacy import rho_of
from fedbudget.settings.settings import Settings

SCHEMA = """
[target]
name = "y"
classes = [0, 1, "unknown"]
[columns]
age = { range = [0, 120] }
sex = { categories = ["f", "m"] }
"""
TABLES = (
    # numbers as classes, and a category that one person has
    "age,sex,y\n" + "31.4159,f,0\n" * 6 + "80,rare,1\n" * 6,
    # words as classes, missing values, another order, values outside
    "y,sex,age\n" + "unknown,,\n" * 6 + "1,m,150\n" * 6,
)
PRIVATE = Settings(
    model="softmax", nodes=2, budget=("time=5s", "privacy=4"), privacy_delta=1e-5
)


@pytest.fixture
def schema(tmp_path: Path) -> TableOptions:
    path = tmp_path / "schema.toml"
    path.write_text(SCHEMA)
    return read_schema(path).options


def nodes(folder: Path, options: TableOptions, **how: Any) -> list[NodeData]:
    found = []
    for number, text in enumerate(TABLES):
        path = folder / f"{number}.csv"
        path.write_text(text)
        found.append(from_file(path, options, **how))
    return found


def account(folder: Path, spent: float = 0.0) -> PrivacyAccount:
    path = folder / "account.json"
    path.write_text(f'{{"rho": {spent}, "runs": {{}}}}')
    return PrivacyAccount(path, 4.0, 1e-5)


def hello_bytes(worker: Worker) -> bytes:
    return b"".join(map(bytes, wire.pack(worker.hello("the same"))))


@pytest.mark.parametrize("standardise", [None, False])
@pytest.mark.parametrize("test_share", [0.0, 0.9])
def test_hello_is_independent_of_values(
    standardise: bool | None, test_share: float, schema: TableOptions, tmp_path: Path
) -> None:
    how = {"standardise": standardise, "test_share": test_share}
    with_limits = [
        Worker(each, account=account(tmp_path)) for each in nodes(tmp_path, schema, **how)
    ]
    without = list(map(Worker, nodes(tmp_path, schema, **how)))
    sent = {hello_bytes(worker) for worker in (*with_limits, *without)}
    assert len(sent) == 1
    assert b"rare" not in sent.pop()


def test_only_number_of_rows_differs(schema: TableOptions, tmp_path: Path) -> None:
    described = [each.samples() for each in nodes(tmp_path, schema)]
    path = tmp_path / "longer.csv"
    path.write_text(TABLES[0] + "50,f,1\n")
    longer = from_file(path, schema).samples()
    assert longer.sizes == (13,)
    assert replace(longer, sizes=(12,)) == described[0]


@pytest.mark.parametrize("standardise", [None, False])
@pytest.mark.parametrize("limited", [True, False])
def test_table_needs_a_schema(
    standardise: bool | None, limited: bool, tmp_path: Path
) -> None:
    """With a limit, or if the aggregator has announced a private run."""
    options = TableOptions("y", impute="mean")
    for data in nodes(tmp_path, options, standardise=standardise):
        worker = Worker(data, account=account(tmp_path) if limited else None)
        with pytest.raises(UserError, match="needs a public schema"):
            worker.hello("x", private=not limited)


def test_arrays_are_not_standardised(tmp_path: Path) -> None:
    shard = np.arange(40.0).reshape(20, 2), np.arange(20) % 2
    limited = account(tmp_path)
    Worker(from_value(shard), account=limited).hello("x")
    with pytest.raises(UserError, match="would publish exact means"):
        Worker(from_value(shard, standardise=True), account=limited).hello("x")


def test_spent_limit_sends_nothing(schema: TableOptions, tmp_path: Path) -> None:
    spent = account(tmp_path, rho_of(4.0, 1e-5))
    worker = Worker(nodes(tmp_path, schema)[0], account=spent)
    with pytest.raises(BeyondLimits, match="it has spent ε = 4"):
        worker.hello("x")


def described(folder: Path, options: TableOptions, **how: Any) -> list[SamplesDescription]:
    return [each.samples() for each in nodes(folder, options, **how)]


def test_agreement_is_the_schema(schema: TableOptions, tmp_path: Path) -> None:
    """The scale of the task is that of the file to the bit, not a mean of equal scales."""
    each = described(tmp_path, schema)
    agreed = agree([*each, each[0]])
    assert agreed.layout == each[0].layout
    assert agreed.features == each[0].features
    assert agreed.standardization is not None
    assert agreed.standardization.mean.tolist() == [60, 0, 0, 0]
    assert agreed.classes == ("0", "1", "unknown")


def test_schemas_must_be_equal(schema: TableOptions, tmp_path: Path) -> None:
    ours = described(tmp_path, schema)[0]
    (tmp_path / "other.toml").write_text(SCHEMA.replace("120", "110"))
    other = read_schema(tmp_path / "other.toml").options
    different = (
        described(tmp_path, other)[0],
        described(tmp_path, schema, standardise=False)[0],
        described(tmp_path, TableOptions("y", impute="mean"))[0],
    )
    for theirs in different:
        for pair in ([ours, theirs], [theirs, ours]):
            with pytest.raises(UserError, match="schema"):
                agree(pair)
        with pytest.raises(PeerError, match="schema"):
            DataTerms(schema=ours).require(theirs)


def test_node_refuses_other_layouts(schema: TableOptions, tmp_path: Path) -> None:
    """A task with another layout is refused, for a reason without values of the data."""
    data = nodes(tmp_path, schema)
    _, _, task, _ = agree_on_task(
        PRIVATE, build_method(PRIVATE), [each.samples() for each in data]
    )
    Worker(data[0]).accept(Welcome("run", task, (0,)))
    lies = (
        replace(task.samples, classes=("0", "unknown")),
        replace(task.samples, layout=None),
        replace(task.samples, features=None),
    )
    for lie in lies:
        with pytest.raises(UserError) as refused:
            Worker(data[0]).accept(Welcome("run", replace(task, samples=lie), (0,)))
        assert "another schema" in refused.value.args[0]


def test_private_aggregator_refuses_statistics(tmp_path: Path) -> None:
    given = described(tmp_path, TableOptions("y", impute="mean"))
    with pytest.raises(UserError, match="fedbudget data schema drafts"):
        agree_on_task(PRIVATE, build_method(PRIVATE), given)


async def _join(address: str, worker: Worker, name: str) -> Farewell:
    return await run_node(address, worker, name=name, patience=5.0)


def test_private_run_is_announced(schema: TableOptions, tmp_path: Path) -> None:
    """Over gRPC, a node without limit and schema ends before it has sent a byte."""
    server = AggregatorServer(
        "127.0.0.1:0", run="r", tokens=Tokens(), terms=DataTerms(private=True)
    )
    address = f"127.0.0.1:{server.open()}"
    try:
        plain = Worker(nodes(tmp_path, TableOptions("y", impute="mean"))[0])
        with pytest.raises(UserError, match="needs a public schema"):
            asyncio.run(_join(address, plain, "plain"))
        assert server.counters.received == 0

        async def both() -> dict[str, SamplesDescription]:
            joining = [
                asyncio.ensure_future(_join(address, Worker(data), f"n{number}"))
                for number, data in enumerate(nodes(tmp_path, schema))
            ]
            await asyncio.to_thread(server.wait_for, 2, lambda: False)
            found = server.descriptions()
            await asyncio.to_thread(server.close, Farewell("done"))
            await asyncio.gather(*joining)
            return found

        found = asyncio.run(both())
        assert found["n0"] == found["n1"]
    finally:
        server.close(Farewell("done"))
