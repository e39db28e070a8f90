"""What a reader of a file gives: features, and targets where there are any; checked, but not yet interpreted."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedbudget.arrays import Samples
from fedbudget.errors import UserError


@dataclass(frozen=True)
class Columns:
    """Samples of one file.

    Args:
      x: features, [samples, features].
      shape: of one sample's features before they were made flat; nothing where they always were.
      numbers: targets that are numbers, [samples].
      words: targets that are words, [samples].
    """

    x: Samples
    numbers: NDArray[np.float64] | None = None
    words: NDArray[np.str_] | None = None
    shape: tuple[int, ...] = ()

    def none(self) -> "Columns":
        """No samples, of the same kind."""
        numbers, words = self.numbers, self.words
        return Columns(
            self.x[:0], None if numbers is None else numbers[:0], None if words is None else words[:0], self.shape
        )

    @property
    def class_names(self) -> list[str] | None:
        """The target of each sample as the name of a class."""
        if self.words is not None:
            return [str(word) for word in self.words]
        return None if self.numbers is None else [class_name(number) for number in self.numbers]


def class_name(number: float) -> str:
    """A whole number as the name of a class; large ones keep all their digits."""
    return f"{number:.15g}"


def refuse_nan(name: str, values: NDArray[np.floating], what: str, first: int = 0) -> None:
    """Values [rows, ...] must be finite; the error names the first row that is not, counted from `first`."""
    bad = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
    if len(bad):
        raise UserError(f"{name}: {what} {bad[0] + first} is not finite (NaN or infinite); {len(bad)} in all are not")
