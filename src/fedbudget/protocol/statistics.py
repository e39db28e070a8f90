"""What of w is no parameter: running statistics, such as those of batch normalization, which are w's last numbers.

They travel with w, and are averaged by samples as parameters are, eq. (5). But they are measured, and not found by
steps along a gradient: so no update rule moves them, drift is not corrected in them, and no distance between two w
counts them. Wherever two w are compared, one is first given the statistics of the other.
"""

import numpy as np

from fedbudget.arrays import Float32


def with_statistics_of(other: Float32, w: Float32, statistics: int) -> Float32:
    """w, [parameters] or [nodes, parameters], with another's statistics; the other itself, where all else is the same.

    Args:
      statistics: how many of w's last numbers are; with none it is w itself.
    """
    if not statistics:
        return w
    if w.shape == other.shape and np.array_equal(w[..., :-statistics], other[..., :-statistics]):
        return other
    alike = w.copy()
    alike[..., -statistics:] = other[..., -statistics:]
    return alike


def without_statistics(w: Float32, statistics: int) -> Float32:
    """The parameters alone."""
    return w[..., : w.shape[-1] - statistics]


def scaled_from(start: Float32, w: Float32, scale: Float32, statistics: int) -> Float32:
    """Where nodes would be who have come from `start` to w, [nodes, parameters], had they gone so many times as far.

    Args:
      scale: [nodes]; statistics stay as they are.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # of a node that diverged
        scaled: Float32 = w - start
        scaled *= scale[:, None]
        scaled += start
    return with_statistics_of(w, scaled, statistics)
