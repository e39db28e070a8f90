"""Whether features are on scales that gradient descent can learn from."""

import numpy as np

from fedbudget.arrays import Samples

UNEVEN = 30.0
"""How many times as wide as most others a feature may be, or as far from 0 as it is wide."""


def scale_warning(x: Samples) -> str | None:
    """What is wrong with the scales of features, in words; None where nothing is.

    Of images some pixels hardly ever change; so a feature is compared with the quarter that change least.

    Args:
      x: [samples, features].
    """
    if x.dtype.kind != "f" or len(x) < 2:
        return None
    mean, deviation = x.mean(axis=0, dtype=np.float64), x.std(axis=0, dtype=np.float64)
    changing = np.flatnonzero(deviation > 1e-12 * (1 + np.abs(mean)))
    if not len(changing):
        return None
    cure = "little is learned from such; `standardise` brings all to mean 0 and deviation 1"
    order = changing[np.argsort(deviation[changing])]
    narrow, wide = order[len(order) // 4 if len(order) > 3 else 0], order[-1]
    if deviation[wide] > UNEVEN * deviation[narrow]:
        sizes = f"feature {wide} has a deviation of {deviation[wide]:.3g}, feature {narrow} of {deviation[narrow]:.3g}"
        return f"features are on very different scales ({sizes}): {cure}"
    far = changing[(np.abs(mean[changing]) / deviation[changing]).argmax()]
    if abs(mean[far]) > UNEVEN * deviation[far]:
        return f"feature {far} is far from 0 (mean {mean[far]:.3g}, deviation {deviation[far]:.3g}): {cure}"
    return None
