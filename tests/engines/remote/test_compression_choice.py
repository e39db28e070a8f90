"""How many bits, where that is left open: by what rounds took."""

import pytest

from fedbudget.engines.remote.engine import TRIED, CompressionChoice
from fedbudget.protocol.compression import BroadcastCompressor


def kinds(
    none: float,
    eight: float,
    updates: float = 0.0,
    *,
    parameters: int = 650,
    others: tuple[float, ...] = (0.001,),
    **how: bool,
) -> list[str]:
    """What rounds are made with in which messages to one node and back are on the line for
    so long, with 32 bits and with 8, and those of others not."""
    compressor = BroadcastCompressor("none")
    choice = CompressionChoice.first(
        compressor, parameters, **{"budgeted": False, "measured": True, **how}
    )
    made: list[str] = []
    for _ in range(3 * TRIED):
        made.append(compressor.kind)
        line = none if compressor.kind == "none" else eight
        choice.add(dict(enumerate((*others, line))), line + 0.002, line + 0.002 + updates)
    return made


def test_on_a_slow_line_8_bits_stay() -> None:
    assert kinds(0.060, 0.020) == ["none"] * TRIED + ["8-bit"] * (2 * TRIED)


@pytest.mark.parametrize(
    ("none", "eight", "updates"), [(0.06, 0.06, 0.0), (0.06, 0.025, 0.4)]
)
def test_where_they_gain_nothing_they_are_given_up(
    none: float, eight: float, updates: float
) -> None:
    """As on a line that is long, and not slow; or with updates that take far longer."""
    assert (
        kinds(none, eight, updates)
        == ["none"] * TRIED + ["8-bit"] * TRIED + ["none"] * TRIED
    )


@pytest.mark.parametrize(
    ("seconds", "updates", "parameters"),
    [(0.002, 0.0, 650), (0.015, 0.0, 650), (0.2, 0.0, 10**6), (0.06, 1.0, 650)],
)
def test_on_quick_lines_they_are_not_even_tried(
    seconds: float, updates: float, parameters: int
) -> None:
    """So that w is the same, to the bit, as in one process."""
    assert set(kinds(seconds, seconds / 3, updates, parameters=parameters)) == {"none"}


def test_a_moment_in_which_a_machine_was_busy_does_not_count() -> None:
    compressor = BroadcastCompressor("none")
    choice = CompressionChoice.first(compressor, 650, budgeted=False, measured=True)
    for busy in range(3 * TRIED):  # another node in each round
        choice.add(
            {node: 0.5 if node == busy % 2 else 0.003 for node in range(2)}, 0.5, 0.5
        )
        assert compressor.kind == "none"


def test_a_budget_of_bytes_needs_no_trial() -> None:
    assert set(kinds(0.01, 0.02, budgeted=True)) == {"8-bit"}


def test_where_time_is_simulated_nothing_is_tried() -> None:
    assert set(kinds(0.06, 0.02, measured=False)) == {"none"}
