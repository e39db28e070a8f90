"""What a private run has cost its nodes, by an accountant that others keep: dp-accounting, imported nowhere else."""

import math
from collections.abc import Sequence

from fedbudget.runs.record import RoundRecord


def noise_multipliers(records: Sequence[RoundRecord], rho: float = 0.0) -> list[float]:
    """Of all that a run has made known, in the order of time: noise, in multiples of what one node can change.

    Args:
      rho: what was paid in all; where that is more than rounds have cost, for rounds that are not in the records, it is
        one more.
    """
    known = [record.private for record in records if record.private is not None]
    found = [each[name] for each in known for name in ("noise", "count_noise") if name in each]
    more = rho - sum(1 / (2 * sigma**2) for sigma in found)
    return [*found, math.sqrt(1 / (2 * more))] if more > 1e-9 * rho else found


def accounted_epsilon(multipliers: Sequence[float], delta: float) -> float:
    """ε at this δ of Gaussian mechanisms one after another.

    Together they are one, so that the library's exact figure is that of one.

    Args:
      multipliers: noise of each, in multiples of its sensitivity.
    """
    from dp_accounting import get_epsilon_gaussian

    inverse = math.sqrt(sum(1 / sigma**2 for sigma in multipliers))
    return 0.0 if inverse == 0 else float(get_epsilon_gaussian(1 / inverse, delta))
