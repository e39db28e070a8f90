"""A white-box audit of sums over samples stays below the claimed privacy."""

import math

import pytest
from benchmarks.sample_audit import NODES, SHARERS, audit


@pytest.mark.parametrize("pairs", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_audit_stays_below_claim(pairs: int) -> None:
    """It also reaches what the noise allows: all nodes add n/m times the paid variance, and
    the honest ones alone just that. A claim far above the truth would waste accuracy.
    """
    found = audit(pairs)
    assert found.claimed == pytest.approx(math.sqrt(2 * 0.4277), rel=1e-2)
    expected = found.claimed * math.sqrt(SHARERS / NODES)
    for measured, allowed in ((found.sums, expected), (found.colluding, found.claimed)):
        error = found.error(measured)
        assert measured <= allowed + 2 * error + (pairs < 100) * error
        assert measured >= allowed - 4 * error
