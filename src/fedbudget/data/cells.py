"""What is in the cells of one column, as texts: numbers, words, dates, and nothing.

A cell is missing where it is empty, or says so in one of the ways that programs write it. A column is of numbers when
at least half of the cells that are there are; then the others are mistakes, which are counted and not taken for words.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedbudget.arrays import Float64
from fedbudget.data.columns import class_name

MISSING = frozenset({"", "na", "n/a", "#n/a", "<na>", "nan", "-nan", "nat", "null", "nil", "?", "-", "."})
"""Ways to write that a value is missing, whatever their case; and `None`, which in lower case may be a word."""

_DATES = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([T ]\S.*)?"  # 2024-05-31, with or without a time of day
    r"|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2})([T ]\S.*)?"  # 31.05.2024, 5/31/24
    r"|\d{1,2}[- ][A-Za-z]{3,9}\.?[-, ]+(\d{4}|\d{2})(\s.*)?"  # 31 May 2024
    r"|[A-Za-z]{3,9}\.? \d{1,2},? \d{4}(\s.*)?"  # May 31, 2024
    r"|\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?( ?[AaPp][Mm])?"  # a time of day
)


@dataclass(frozen=True)
class CellKinds:
    """What the cells of a column are.

    Args:
      numbers: the cells that are numbers, NaN elsewhere, [cells].
      words: how often each text is there that is neither a number nor missing.
      missing: which cells are, [cells].
    """

    numbers: Float64
    words: Counter[str]
    missing: np.ndarray[tuple[int], np.dtype[np.bool_]]

    @property
    def are_numbers(self) -> bool:
        """Whether the column is one of numbers, mistakes aside; one without any value may be."""
        words = self.words.total()
        return len(self.numbers) - int(self.missing.sum()) - words >= words


def is_missing(text: str) -> bool:
    """
    >>> [is_missing(text) for text in ("", "NaN", "?", "None", "none", "0")]
    [True, True, True, True, False, False]
    """
    return text.lower() in MISSING or text == "None"


def looks_like_dates(words: Counter[str]) -> bool:
    """Whether nine of ten texts could be dates, or times of day.

    >>> looks_like_dates(Counter(["2024-05-31", "1/6/2024 12:30"])), looks_like_dates(Counter(["1-2 times", "May"]))
    (True, False)
    """
    dates = sum(count for text, count in words.items() if _DATES.fullmatch(text))
    return bool(words) and dates >= 0.9 * words.total()


def kinds_of(texts: Sequence[str]) -> CellKinds:
    """What each cell is; texts have no blanks around them."""
    try:
        numbers = np.array([float(text) for text in texts], np.float64)
        return CellKinds(numbers, Counter(), np.isnan(numbers))
    except ValueError:
        pass
    numbers, words = np.full(len(texts), np.nan), Counter[str]()
    missing = np.zeros(len(texts), np.bool_)
    for place, text in enumerate(texts):
        if is_missing(text):
            missing[place] = True
            continue
        try:
            numbers[place] = float(text)
        except ValueError:
            words[text] += 1
    return CellKinds(numbers, words, missing)


def category_name(text: str) -> str:
    """A cell as the name of a category: a number is the same however it is written, and so are blanks.

    >>> category_name("1.0"), category_name("1"), category_name("one")
    ('1', '1', 'one')
    """
    try:
        return class_name(float(text))
    except ValueError:
        return " ".join(text.split())
