"""An authorized node that lies does not harm the training of two honest nodes."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbudget.engines.grpc.admission import AUDIT
from fedbudget.engines.remote.messages import Answer, Hello, RoundRequest
from fedbudget.evaluation.metrics import Tally
from fedbudget.resources.resource import Reading, Usage
from fedbudget.result import Result
from support.hostile import Lies, train_with_liar


@pytest.fixture(scope="module")
def alone() -> Result:
    """A run of the two honest nodes only."""
    return train_with_liar(None)


def reporting(**lies: float) -> Lies:
    """Replace these numbers and vectors of every report by constants."""

    def made_up(known: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: np.full_like(values, lies[name]) if name in lies else values
            for name, values in known.items()
        }

    def answer(honest: Answer, request: RoundRequest) -> Answer:
        report = honest.report
        numbers = made_up(report.numbers)
        vectors = made_up(report.vectors)
        return replace(honest, report=replace(report, numbers=numbers, vectors=vectors))

    return Lies(answer=answer)


def moving(
    lie: Callable[[Any, Any], Any], hello: Callable[[Hello], Hello] = lambda hello: hello
) -> Lies:
    """Replace w_i by a function of w(t₀) and w_i."""

    def answer(honest: Answer, request: RoundRequest) -> Answer:
        report = honest.report
        if "w" not in report.vectors:
            return honest
        w = lie(request.broadcast.w, report.vectors["w"]).astype(np.float32)
        return replace(honest, report=replace(report, vectors={**report.vectors, "w": w}))

    return Lies(hello=hello, answer=answer)


def costing(lie: Callable[[Mapping[str, Reading]], Mapping[str, Reading]]) -> Lies:
    def changed(costs: Usage) -> Usage:
        return replace(costs, readings=lie(costs.readings))

    return Lies(
        ready=changed, answer=lambda honest, _: replace(honest, costs=changed(honest.costs))
    )


def with_samples(hello: Hello, count: int) -> Hello:
    return replace(hello, samples=replace(hello.samples, sizes=(count,)))


def assert_as_good(found: Result, alone: Result) -> None:
    assert found.accuracy is not None
    assert alone.accuracy is not None
    assert found.accuracy >= alone.accuracy - 0.02
    assert found.stopped_by == alone.stopped_by
    assert all(np.isfinite(record.loss) for record in found.rounds)


@pytest.mark.parametrize(
    ("lies", "warning"),
    [
        pytest.param(reporting(w=3.4e38), "liar at ipv4:127.0.0.1", id="w of 3.4e38"),
        pytest.param(
            reporting(plain=np.nan),
            "liar's report has numbers that are not finite",
            id="plain is NaN",
        ),
        pytest.param(
            reporting(beta=9e11),
            "liar reported beta 9e+11; the numbers of the other nodes allow",
            id="a smoothness of 9e11",
        ),
        pytest.param(reporting(losses=1e30), "liar at ipv4:127.0.0.1", id="a loss of 1e30"),
        pytest.param(
            reporting(losses=-1e30), "liar at ipv4:127.0.0.1", id="a loss of -1e30"
        ),
        pytest.param(
            reporting(losses=1e14), "liar reported loss change 1e+14", id="a loss of 1e14"
        ),
        pytest.param(
            reporting(best_losses=-1e14),
            "liar's losses do not count in this run any more: it reported a change",
            id="a loss of -1e14",
        ),
        pytest.param(
            reporting(corrected=1e14, plain=0.0),
            "liar reported corrected 1e+14",
            id="divergences",
        ),
        pytest.param(
            moving(lambda start, w: start - 10 * (w - start)),
            "liar's updates",
            id="-10 times its update",
        ),
    ],
)
def test_false_reports(
    lies: Lies, warning: str, alone: Result, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert_as_good(train_with_liar(lies), alone)
    assert warning in caplog.text
    assert "n1" not in caplog.text


def test_one_warning_for_each_process(caplog: pytest.LogCaptureFixture) -> None:
    """A process with several nodes cannot fill the log."""
    with caplog.at_level(logging.WARNING):
        train_with_liar(reporting(beta=9e11, losses=1e14), liar_nodes=5, rounds=3)
    warnings = [each.getMessage() for each in caplog.records]
    (warning,) = [each for each in warnings if "liar reported" in each]
    assert "reported beta 9e+11" in warning
    assert len([each for each in warnings if "liar's losses" in each]) == 1


def zero_with(samples: int) -> Lies:
    """A false sample count and w = 0; without protection the accuracy was 0.092."""
    return moving(lambda start, w: 0 * w, lambda hello: with_samples(hello, samples))


def test_impossible_sample_count(alone: Result, caplog: pytest.LogCaptureFixture) -> None:
    """The count is capped, so the node has nearly no weight in the average."""
    with caplog.at_level(logging.WARNING):
        assert_as_good(train_with_liar(zero_with(2**40 - 1)), alone)
    assert "liar reported samples out of proportion to the other nodes" in caplog.text


@pytest.mark.parametrize("rule", ["trimmed", "median"])
def test_plausible_false_sample_count(rule: str, alone: Result) -> None:
    """The node has half of the total weight; only robust rules withstand that."""
    assert_as_good(train_with_liar(zero_with(500_000), combine=rule), alone)


@pytest.mark.parametrize(
    ("lies", "budget"),
    [
        pytest.param(
            costing(lambda readings: {**readings, "time": Reading(1e9, 1e9)}),
            "time=60s",
            id="a step of 1e9 s",
        ),
        pytest.param(
            costing(lambda readings: {**readings, "cpu": Reading(1e9, 1e9)}),
            "cpu=60s",
            id="1e9 s of a processor",
        ),
        pytest.param(
            costing(
                lambda readings: {
                    name: each for name, each in readings.items() if name != "cpu"
                }
            ),
            "cpu=60s",
            id="no processor reading",
        ),
    ],
)
def test_false_costs(lies: Lies, budget: str, alone: Result) -> None:
    """The spent amount stays as far below its limit as without the liar."""
    # Measured costs choose τ, so a busy machine needs more rounds for the same quality.
    found = train_with_liar(lies, costs="measured", budget=(budget,), rounds=150)
    assert_as_good(found, alone)
    assert max(found.spent.values()) < 30


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ({"shape": (65,)}, "liar's data do not fit"),
        ({"sizes": (5,) * 997}, "liar has 997 nodes"),
        ({"classes": tuple(map(str, range(90_000)))}, "liar has 90000 classes"),
    ],
)
def test_false_description_of_samples(
    lie: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The liar is refused; the aggregator waits for the three others, which train."""
    lies = Lies(hello=lambda hello: replace(hello, samples=replace(hello.samples, **lie)))
    with caplog.at_level(logging.WARNING):
        found = train_with_liar(lies, honest=3, wait_for=3)
    assert reason in caplog.text
    assert {record.nodes for record in found.rounds} == {3}


def test_first_node_has_other_columns(
    alone: Result, caplog: pytest.LogCaptureFixture
) -> None:
    """With two nodes the majority is unknown, so neither is refused; the liar is refused
    when the third node joins.
    """
    lies = Lies(
        hello=lambda hello: replace(hello, samples=replace(hello.samples, shape=(65,)))
    )
    with caplog.at_level(logging.WARNING):
        found = train_with_liar(lies, wait_for=2, first=True)
    assert "liar's data do not fit" in caplog.text
    assert found.w.tobytes() == alone.w.tobytes()


def test_audit_log_names_the_liar(tmp_path: Path, alone: Result) -> None:
    found = train_with_liar(reporting(w=3.4e38), out=tmp_path / "run")
    lines = [
        json.loads(line) for line in (tmp_path / "run" / AUDIT).read_text().splitlines()
    ]
    assert {(each["event"], each["node"]) for each in lines} >= {
        ("joined", "n1"),
        ("joined", "n2"),
        ("joined", "liar"),
    }
    (dropped,) = [each for each in lines if each["event"] == "dropped"]
    assert (dropped["node"], dropped["reason"]) == (
        "liar",
        "3 of its reports in a row were not finite or possible",
    )
    assert found.w.tobytes() == alone.w.tobytes()


def perfect(times: int) -> Lies:
    """Claim that every test sample is right, for many times as many samples."""

    def lie(tally: Tally) -> Tally:
        assert tally.classes is not None
        actual = times * tally.classes.actual
        classes = replace(
            tally.classes, actual=actual, predicted=actual, right=actual, scores=None
        )
        return replace(tally, samples=times * tally.samples, loss=0.0, classes=classes)

    return Lies(
        answer=lambda honest, _: replace(honest, tallies=tuple(map(lie, honest.tallies)))
    )


@pytest.mark.parametrize("honest", [1, 2])
def test_one_node_reaches_no_target(honest: int) -> None:
    """False test results of one node neither end a run nor decide its accuracy."""
    found = train_with_liar(
        perfect(9990),
        honest=honest,
        tested=True,
        until="accuracy=0.99",
        rounds=4,
        budget=("time=1000s",),
    )
    assert found.stopped_by == "rounds"
    if honest == 2:  # with three nodes no test samples count more than half
        assert found.accuracy is not None
        assert found.accuracy < 0.97


@pytest.mark.parametrize("honest", [1, 2])
def test_target_without_any_one_node(honest: int) -> None:
    """False results within all limits make an accuracy of 0.1 appear as 0.4 or more."""
    found = train_with_liar(
        perfect(1),
        honest=honest,
        tested=True,
        until="accuracy=0.3",
        rounds=1,
        budget=("time=1000s",),
        tau=1,
        step_size=1e-4,
    )
    assert found.stopped_by == "rounds"
    assert found.rounds[0].accuracy is not None
    assert found.rounds[0].accuracy > 0.3


def test_three_nodes_reach_a_target() -> None:
    honest = train_with_liar(Lies(), tested=True, until="accuracy=0.7", rounds=30)
    assert honest.stopped_by == "target"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["frugal", "accelerated"])
def test_honest_nodes_are_not_named(method: str, caplog: pytest.LogCaptureFixture) -> None:
    """Near convergence, figures of most nodes are tiny, and those of others are not."""
    with caplog.at_level(logging.WARNING, "fedbudget"):
        found = train_with_liar(
            Lies(), honest=2, rounds=1000, budget=("time=100000s",), method=method
        )
    assert len(found.rounds) == 1001
    assert "reported" not in caplog.text


@pytest.mark.slow
def test_slow_node_is_asked_less_often() -> None:
    """A node that answers just before each deadline takes part in few rounds."""

    def late(honest: Answer, request: RoundRequest) -> Answer:
        time.sleep(1.5)
        return honest

    found = train_with_liar(
        Lies(answer=late), costs="measured", rounds=60, budget=("time=1000s",), tau=2
    )
    counts = [record.nodes for record in found.rounds]
    assert counts.count(2) > 45
    assert counts.count(3) >= 5
