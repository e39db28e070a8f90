"""`summary.json`: the result of a run, with types that are checked when it is read."""

from pathlib import Path
from typing import Any, TypedDict

import msgspec

from fedbudget.errors import printable_texts
from fedbudget.file_contents import read_json
from fedbudget.runs.record import Amounts, Number, Spread, Whole, require_moderate

SUMMARY = "summary.json"
_MAX_SIZE = 2**26  # bytes


class Summary(TypedDict, total=False):
    """The figures that are shown; others may be in the file."""

    loss: Number | None
    accuracy: Number | None
    metrics: Amounts | None
    to_beat: Amounts | None
    spread: Spread | None
    average_tau: Number
    aggregations: Whole
    local_updates: Whole
    spent: Amounts
    budget: Amounts
    sources: dict[str, str]
    stopped_by: str | None
    status: str
    note: str
    until: dict[str, bool]
    kept_round: Whole | None
    validation_loss: Number | None
    validation_start: Number | None
    solver: str
    improved_round: Whole | None
    warnings: list[str]
    privacy_delta: Number | None


def read_any_summary(path: Path) -> dict[str, Any] | None:
    """Return the content of a run's summary, also of a resumed run; None without a file.

    Raises:
      OSError, ValueError: the file cannot be read, or has other content.
    """
    try:
        content = read_json(path / SUMMARY, _MAX_SIZE)
    except FileNotFoundError:
        return None
    try:
        require_moderate(content)
        summary: dict[str, Any] = printable_texts(content)
        msgspec.convert(summary, Summary)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{SUMMARY}: {error}") from None
    return summary
