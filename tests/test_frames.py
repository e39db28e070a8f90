"""DataFrames in Python train like the files they would be written to, in one process and on
nodes.
"""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedbudget
from support.networked import LONG
from support.patients import SITES, write_patients

TABLE: dict[str, Any] = {
    "target": "outcome",
    "drop": ("patient", "visit"),
    "impute": "median",
}
RUN: dict[str, Any] = {
    "model": "softmax",
    "tau": 3,
    "rounds": 8,
    "step_size": 0.3,
    "batch_size": "full",
}
RUN |= {"budget": "time=1000000s", "method": "frugal"}


@pytest.fixture
def frames(tmp_path: Path) -> list[Any]:
    write_patients(tmp_path / "sites", rows=40)
    return [pd.read_csv(tmp_path / "sites" / f"{site}.csv") for site in SITES]


def test_frames_train_like_files(frames: list[Any], tmp_path: Path) -> None:
    own = fedbudget.train(shards=frames, **TABLE, **RUN)
    read = fedbudget.train(dataset=str(tmp_path / "sites"), test_share=0.0, **TABLE, **RUN)
    assert own.w.tobytes() == read.w.tobytes()


def test_one_frame_is_partitioned(frames: list[Any]) -> None:
    """The test share is held out."""
    result = fedbudget.train(
        dataset=pd.concat(frames), nodes=3, test_share=0.5, **TABLE, **RUN
    )
    assert result.accuracy is not None
    assert result.accuracy * 80 == pytest.approx(
        round(result.accuracy * 80)
    )  # half of 160 rows


def test_errors_suggest_python_arguments(frames: list[Any]) -> None:
    with pytest.raises(
        fedbudget.UserError, match=r"Try: drop='patient,visit' impute='mean'$"
    ):
        fedbudget.train(shards=frames, target="outcome", **RUN)


def test_frames_on_nodes(frames: list[Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with ThreadPoolExecutor(3) as pool:
        nodes = [
            pool.submit(
                fedbudget.join,
                address,
                data=frame,
                name=f"n{number}",
                give_up_after=LONG,
                quiet=True,
                **TABLE,
            )
            for number, frame in enumerate(frames[1:])
        ]
        simulated = {**RUN, "costs": "simulated"}
        result = fedbudget.serve(
            address,
            data=frames[0],
            test=frames[0],
            nodes=4,
            quiet=True,
            **TABLE,
            **simulated,
        )
        assert [node.result(LONG) for node in nodes] == [len(result.rounds)] * 3
    whole = fedbudget.train(shards=frames, **TABLE, **RUN)
    np.testing.assert_allclose(result.w, whole.w, atol=1e-5)
    assert result.accuracy is not None


def test_raw_columns_give_a_warning() -> None:
    """The scales differ by a factor of 1000, as in many tables. Softmax learns almost
    nothing without `standardise`.
    """
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 200)
    x = np.column_stack([rng.normal(0, 1000, 200), rng.normal(5 + 0.02 * y, 0.01, 200)])
    shards = [(x[:100], y[:100]), (x[100:], y[100:])]
    with pytest.warns(
        UserWarning,
        match=r"on very different scales .*; standardise scales all of them to mean 0",
    ):
        raw = fedbudget.train(shards=shards, test=(x, y), model="softmax", budget="time=3s")
    standardised = fedbudget.train(
        shards=shards, test=(x, y), model="softmax", budget="time=3s", standardise=True
    )
    assert raw.accuracy is not None
    assert standardised.accuracy is not None
    assert raw.accuracy < 0.7 < 0.8 < standardised.accuracy
