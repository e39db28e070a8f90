"""How many bits, where that is left open: by what rounds took."""

import pytest

from fedbudget.protocol.compression import BroadcastCompressor
from fedbudget.engines.remote.compression_choice import TRIED, CompressionChoice


def kinds(none: float, eight: float, updates: float = 0.0, rounds: int = 3 * TRIED, **how: bool) -> list[str]:
    """What rounds are made with that take so long besides local updates, with 32 bits and with 8."""
    compressor = BroadcastCompressor("none")
    choice = CompressionChoice.first(compressor, **{"budgeted": False, "measured": True, **how})
    made: list[str] = []
    for _ in range(rounds):
        made.append(compressor.kind)
        rest = none if compressor.kind == "none" else eight
        choice.add(rest, rest + updates)
    return made


def test_on_a_slow_line_8_bits_stay() -> None:
    assert kinds(0.060, 0.025) == ["none"] * (1 + TRIED) + ["8-bit"] * (2 * TRIED - 1)


@pytest.mark.parametrize(("none", "eight", "updates"), [(0.002, 0.002, 0.0), (0.01, 0.02, 0.0), (0.06, 0.025, 1.0)])
def test_where_they_gain_nothing_they_are_given_up(none: float, eight: float, updates: float) -> None:
    tried = ["none"] * (1 + TRIED) + ["8-bit"] * TRIED
    assert kinds(none, eight, updates) == tried + ["none"] * (TRIED - 1)


def test_a_budget_of_bytes_needs_no_trial() -> None:
    assert set(kinds(0.01, 0.02, budgeted=True)) == {"8-bit"}


def test_where_time_is_simulated_nothing_is_tried() -> None:
    assert set(kinds(0.06, 0.02, measured=False)) == {"none"}
