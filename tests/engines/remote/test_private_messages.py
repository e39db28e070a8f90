"""What leaves a node in a private run: real messages against the table in the guide."""

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from fedbudget.engines.remote import wire
from fedbudget.engines.remote.checks import check_request
from fedbudget.engines.remote.messages import (
    Answer,
    Hello,
    MaskedReport,
    NodeRefusal,
    Ready,
    RoundRequest,
    Welcome,
)
from fedbudget.engines.remote.task import SamplesDescription
from fedbudget.engines.remote.worker import Worker
from fedbudget.models.per_sample import GradientRows, weights
from fedbudget.protocol.features.feature import expected_layout
from fedbudget.protocol.messages import (
    Broadcast,
    NormRound,
    PeerError,
    PrivateRound,
    SampleNormRound,
    SampleRound,
)
from support.networked import FEATURES, node_data, task

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "privacy.md"
W = np.zeros(FEATURES, np.float32)
OF_NODES = (
    NormRound(round=1, w=W, rho=0.05, tau=3, eta=0.1),
    PrivateRound(round=2, w=W, rho=0.05, tau=3, eta=0.1, clip=1.0),
)
OF_SAMPLES = (
    SampleNormRound(round=1, w=W, rho=0.05),
    SampleRound(round=2, w=W, rho=0.05, tau=3, eta=0.1, clip=1.0),
)


def answers(
    method: str, broadcasts: tuple[Broadcast, ...]
) -> Iterator[tuple[Answer, wire.Packed]]:
    """The packed answers of a real node to the first two rounds of a run."""
    node = Worker(node_data(1))
    asked = task(method)
    node.accept(Welcome("run", asked, (0,)))
    for before, broadcast in enumerate(broadcasts):
        layout = expected_layout(asked.built_features, broadcast)
        answer = node.answer(RoundRequest(replace(broadcast, report=layout), before))
        vectors = node.encode(answer.report)
        yield answer, wire.pack_report(answer.report, answer.costs, vectors)


@pytest.mark.parametrize(
    ("method", "broadcasts", "first", "second"),
    [
        ("private", OF_NODES, ["lengths"], ["lengths"]),
        ("samples", OF_SAMPLES, ["octaves"], []),
    ],
)
def test_private_reports_have_stated_size(
    method: str, broadcasts: tuple[Broadcast, ...], first: list[str], second: list[str]
) -> None:
    """A report has one number, one vector of 4 bytes per parameter, and costs."""
    (norms, norm_bytes), (update, update_bytes) = answers(method, broadcasts)
    assert [*norms.report.numbers] == first
    assert [*update.report.numbers] == second
    assert len(norm_bytes.vectors) == 0
    assert len(update_bytes.vectors) == 4 * FEATURES
    assert max(len(norm_bytes.message), len(update_bytes.message)) < 80
    assert norms.tallies == update.tallies == ()
    assert set(update.costs.readings) <= {"time"}


def test_guide_lists_all_fields() -> None:
    """The guide has a row for each message of a node, and names each of its fields."""
    if not GUIDE.exists():
        pytest.skip("the documentation is not installed")
    section = GUIDE.read_text(encoding="utf-8").split("## What leaves a node")[1]
    rows = [row for row in section.split("\n## ")[0].splitlines() if row.startswith("|")]
    listed = set(re.findall("`([A-Za-z_]+)`", "".join(rows)))
    for message in (
        Hello,
        SamplesDescription,
        Ready,
        wire.SentReport,
        MaskedReport,
        NodeRefusal,
    ):
        names = {field.name for field in fields(message)}
        assert names - listed == set(), message
        assert message is SamplesDescription or message.__name__ in listed


@pytest.mark.parametrize("clip", [5e-324, 2.0**-50, 2.0**50])
def test_extreme_clips_are_refused(clip: float) -> None:
    """A gradient (c, c, c), clipped to the smallest number, is √3 times too long: each
    coordinate is rounded up. The noise would hide 1/3 of ρ only.
    """
    short = np.full((1, 3), 1e-5, np.float32)
    gradient = GradientRows(short)
    kept = weights(gradient.lengths, 5e-324)
    assert np.count_nonzero(gradient.total(kept) / 5e-324 == 1) == 3
    request = RoundRequest(replace(OF_SAMPLES[1], clip=clip), 1)
    with pytest.raises(PeerError, match="a private round with the clip"):
        check_request(request, task("samples"))
    check_request(RoundRequest(OF_SAMPLES[1], 1), task("samples"))
