"""A node with a right to take part that lies, beside two honest ones: they train as well as
without it.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbudget.engines.grpc.admission import AUDIT
from fedbudget.engines.remote.messages import Answer, Hello, RoundRequest
from fedbudget.resources.resource import NodeCosts, Reading
from fedbudget.result import Result
from support.hostile import Lies, train_beside


@pytest.fixture(scope="module")
def alone() -> Result:
    """The two honest nodes, by themselves."""
    return train_beside(None)


def saying(**lies: float) -> Lies:
    """These numbers in place of its own, in every report that has them."""

    def answer(honest: Answer, request: RoundRequest) -> Answer:
        known = {name: getattr(honest.report, name) for name in lies}
        made_up = {
            name: np.full_like(known[name], lie)
            for name, lie in lies.items()
            if known[name] is not None
        }
        return replace(honest, report=replace(honest.report, **made_up))

    return Lies(answer=answer)


def moving(
    lie: Callable[[Any, Any], Any], hello: Callable[[Hello], Hello] = lambda hello: hello
) -> Lies:
    """Another w_i, from w(t₀) and its own."""

    def answer(honest: Answer, request: RoundRequest) -> Answer:
        report = honest.report
        if report.w is None:
            return honest
        return replace(
            honest,
            report=replace(report, w=lie(request.broadcast.w, report.w).astype(np.float32)),
        )

    return Lies(hello=hello, answer=answer)


def costing(lie: Callable[[Mapping[str, Reading]], Mapping[str, Reading]]) -> Lies:
    def changed(costs: NodeCosts) -> NodeCosts:
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
    ("lies", "told"),
    [
        pytest.param(saying(w=3.4e38), "liar at ipv4:127.0.0.1", id="w of 3.4e38"),
        pytest.param(
            saying(plain=np.nan),
            "liar's report has numbers that are not finite",
            id="plain is NaN",
        ),
        pytest.param(
            saying(beta=9e11), "liar reported outliers in beta", id="a smoothness of 9e11"
        ),
        pytest.param(saying(losses=1e30), "liar at ipv4:127.0.0.1", id="a loss of 1e30"),
        pytest.param(saying(losses=-1e30), "liar at ipv4:127.0.0.1", id="a loss of -1e30"),
        pytest.param(
            saying(losses=1e14), "liar reported outliers in losses", id="a loss of 1e14"
        ),
        pytest.param(
            saying(best_losses=-1e14),
            "liar reported outliers in best_losses",
            id="a loss of -1e14",
        ),
        pytest.param(
            saying(corrected=1e14, plain=0.0),
            "liar reported outliers in corrected",
            id="divergences",
        ),
        pytest.param(
            moving(lambda start, w: start - 10 * (w - start)),
            "liar's updates",
            id="-10 times its update",
        ),
    ],
)
def test_what_it_reports(
    lies: Lies, told: str, alone: Result, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert_as_good(train_beside(lies), alone)
    assert told in caplog.text
    assert "n1" not in caplog.text.replace(
        "n1 reported outliers in lasting", ""
    )  # a quotient of what is nearly 0, now and then


def zero_with(samples: int) -> Lies:
    """So many samples, and w = 0, which left 0.092."""
    return moving(lambda start, w: 0 * w, lambda hello: with_samples(hello, samples))


def test_more_samples_than_anyone_has(
    alone: Result, caplog: pytest.LogCaptureFixture
) -> None:
    """It counts for nearly nothing, and a rule that does not trust it has nothing to do."""
    with caplog.at_level(logging.WARNING):
        assert_as_good(train_beside(zero_with(2**40 - 1)), alone)
    assert "liar reported outliers in samples" in caplog.text


@pytest.mark.parametrize("rule", ["trimmed", "median"])
def test_as_many_samples_as_half_of_the_average(rule: str, alone: Result) -> None:
    """A number that could be: it counts as half of all, which only rules that do not
    average get over.
    """
    assert_as_good(train_beside(zero_with(500_000), combine=rule), alone)


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
            id="no word of the processor",
        ),
    ],
)
def test_what_it_says_that_a_round_costs(lies: Lies, budget: str, alone: Result) -> None:
    """What is spent is as far from its limit as without it."""
    found = train_beside(lies, costs="measured", budget=(budget,))
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
def test_what_it_says_before_the_start(
    lie: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is refused by name; the three others are waited for, and train."""
    lies = Lies(hello=lambda hello: replace(hello, samples=replace(hello.samples, **lie)))
    with caplog.at_level(logging.WARNING):
        found = train_beside(lies, honest=3, wait_for=3)
    assert reason in caplog.text
    assert {record.nodes for record in found.rounds} == {3}


def test_other_columns_of_the_first_to_come(
    alone: Result, caplog: pytest.LogCaptureFixture
) -> None:
    """Of it and one honest node nobody knows who is right, and neither is refused; when the
    next has come, it is.
    """
    lies = Lies(
        hello=lambda hello: replace(hello, samples=replace(hello.samples, shape=(65,)))
    )
    with caplog.at_level(logging.WARNING):
        found = train_beside(lies, wait_for=2, first=True)
    assert "liar's data do not fit" in caplog.text
    assert found.w.tobytes() == alone.w.tobytes()


def test_who_and_why_is_on_disk(tmp_path: Path, alone: Result) -> None:
    found = train_beside(saying(w=3.4e38), out=tmp_path / "run")
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
        "3 of its reports in a row were not finite, or cannot be",
    )
    assert found.w.tobytes() == alone.w.tobytes()
