"""Nodes of different speeds over gRPC: who becomes slow in the middle is followed within
five rounds.
"""

from typing import Any

import numpy as np
import pytest

from fedbudget.engines.remote.worker import Worker
from fedbudget.runs.record import RoundRecord
from fedbudget.settings.settings import Settings
from support.served import run_over_grpc

CHANGE, FOLLOWED, ROUNDS = 8, 5, 20
PACE = 40.0


@pytest.mark.slow  # nodes take their time
def test_a_node_that_becomes_slow_does_not_hold_the_others_up_for_more_than_five_rounds() -> (
    None
):
    """A tenth as fast: soon the others make several times as many updates in a round, and
    it as few as it can.
    """
    workers: list[Any] = []
    updates: list[list[int]] = []

    def observe(record: RoundRecord) -> None:
        updates.append(
            list(record.work["updates"]) if record.work else [record.tau] * record.nodes
        )
        if record.round == CHANGE:
            workers[-1]._pace *= 10

    settings = Settings(
        model="softmax", partition="case:2", batch_size="full", nodes=4, rounds=ROUNDS, costs="measured",
        budget=("time=1000s",), combine="mean", compress="none",
    )  # fmt: skip
    made = run_over_grpc(
        settings, lambda data: Worker(data, pace=PACE), workers, callbacks=[observe]
    )
    assert len(made.rounds) == ROUNDS + 1
    before, after = (
        np.array(updates[3:CHANGE]),
        np.array(updates[CHANGE + FOLLOWED : ROUNDS]),
    )
    assert before[:, -1].mean() > 0.5 * before[:, :-1].mean()
    assert np.median(after[:, :-1].min(axis=1) / after[:, -1]) >= 4
    assert np.median(after[:, -1]) <= 2
