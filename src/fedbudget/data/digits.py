"""scikit-learn's handwritten digits: 1,797 real images of 8x8 pixels with 16 shades, embedded in that package."""

import numpy as np

from fedbudget.data.dataset import Dataset, Part

_TRAIN = 1437  # the first four fifths; the rest was written by other people


def load() -> Dataset:
    from sklearn.datasets import load_digits  # slow to import

    digits = load_digits()
    everything = Part(digits.data.astype(np.uint8), digits.target.astype(np.int64), digits.target.astype(np.float64))
    rows = np.arange(len(everything))
    return Dataset(
        "digits",
        everything.rows(rows[:_TRAIN]),
        everything.rows(rows[_TRAIN:]),
        classes=tuple("0123456789"),
        scale=1 / 16,
        parity=True,
        shape=(1, 8, 8),
    )
