"""A run's forecast for whoever watches it: the end of its budget while it goes on, half as much again after it.

It is made anew when there are new rounds, but never takes more than a hundredth of the time.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fedbudget.forecasts.forecast import Forecast, Forecaster
from fedbudget.runs.record import RoundRecord

MORE = 0.5
"""What a run that has ended is given besides, as a share of its budget."""

_SHARE = 0.01  # of the time


class LatestForecast:
    """Keeps the last forecast for as long as it will do."""

    def __init__(self) -> None:
        self._made_for: tuple[int, bool] | None = None
        self._forecast: Forecast | None = None
        self._until = 0.0

    def of(
        self, records: Sequence[RoundRecord], limits: Mapping[str, float], known: Mapping[str, Any] | None = None
    ) -> Forecast:
        """
        Args:
          known: the `loss` and the `accuracy` of its result, where it has ended.
        """
        began, ended = time.perf_counter(), known is not None
        if self._forecast is None or (self._made_for != (len(records), ended) and (ended or began >= self._until)):
            self._forecast = next_forecast(records, limits, known)
            self._made_for = len(records), ended
            finished = time.perf_counter()
            self._until = finished + (finished - began) / _SHARE
        return self._forecast


def next_forecast(
    records: Sequence[RoundRecord], limits: Mapping[str, float], known: Mapping[str, Any] | None = None
) -> Forecast:
    """See `LatestForecast.of`."""
    more = 0.0 if known is None else MORE
    return Forecaster(records, limits, known).at({name: limit * (1 + more) for name, limit in limits.items()})
