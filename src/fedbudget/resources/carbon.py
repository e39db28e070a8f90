"""Energy as estimated by codecarbon, for machines without a readable meter.

codecarbon estimates the power of processors from their type and load, and adds memory and
graphics cards. The energy is that of the whole machine, as with RAPL.

codecarbon samples the power once a second in its own thread, so a reading never delays a
round. Rounds may be shorter than a second. Between two samples the power counts as
constant, and the error of that is corrected over the next second. So the reported energy
never jumps, and nodes on one machine report nearly the same energy although they sample at
different times.

codecarbon sends nothing and writes nothing, regardless of its own configuration.
"""

import logging
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from fedbudget.errors import UserError
from fedbudget.resources.resource import MeterError, estimated, this_host

INTERVAL = 1.0
"""Seconds between two samples."""

STALE = 10.0
"""Seconds after which a sample is too old to be used."""

_FIRST_INTERVAL = 0.2  # seconds until the second sample
_MIN_INTERVAL = 0.05  # seconds; if asked sooner, codecarbon repeats its last sample
_JOULES_PER_KWH = 3.6e6


class CodeCarbon:
    """Energy of this machine since the object was created."""

    def __init__(self, tracker: Any, samples: "_PowerSamples") -> None:
        self.host = estimated(this_host())
        self._tracker = tracker
        self._samples = samples

    @classmethod
    def start(cls) -> "CodeCarbon":
        """Start sampling. codecarbon needs a second or two to detect the hardware."""
        if find_spec("codecarbon") is None:
            raise UserError(
                "energy-meter codecarbon needs codecarbon; install it with: "
                "pip install 'fedbudget[codecarbon]'"
            )
        from codecarbon import OfflineEmissionsTracker

        logging.getLogger("codecarbon").setLevel(logging.CRITICAL)
        samples = _PowerSamples()
        tracker = OfflineEmissionsTracker(
            measure_power_secs=INTERVAL,
            api_call_interval=1,  # call `samples` after every sample
            output_methods=[],
            output_handlers=[samples],
            emissions_endpoint=None,
            tracking_mode="machine",
            allow_multiple_runs=True,
            force_carbon_intensity_g_co2e_kwh=0,  # emissions are not needed
            log_level="critical",
        )
        tracker.start()
        time.sleep(_FIRST_INTERVAL)
        tracker.flush()  # a second sample, for the initial power
        if samples.count < 2:  # codecarbon reports no errors
            raise MeterError("codecarbon cannot estimate the power of this machine")
        return cls(tracker, samples)

    def read(self) -> float:
        """Return the joules since the object was created."""
        if self._samples.age() > STALE:
            self._tracker.flush()  # samples at once: its thread may have been delayed
        if self._samples.age() > STALE:
            raise MeterError(
                "codecarbon has not sampled this machine's power for "
                f"{self._samples.age():.0f} s"
            )
        return self._samples.joules()

    def close(self) -> None:
        """End the sampling thread."""
        self._tracker.stop()


class _PowerSamples:
    """Samples of codecarbon, as one of its output handlers, and the energy between them."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.count = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._when = clock()
        self._last = 0.0  # joules at the last sample
        self._watts = 0.0
        self._reported = 0.0  # joules reported at the last sample
        self._rate = 0.0  # joules reported per second since then

    def age(self) -> float:
        """Return the seconds since the last sample."""
        return self._clock() - self._when

    def joules(self) -> float:
        with self._lock:
            return self._at(self._clock())

    def add(self, joules: float) -> None:
        """Add a sample: the joules that codecarbon has counted since it started."""
        with self._lock:
            now = self._clock()
            if self.count and now - self._when < _MIN_INTERVAL:
                return
            if self.count:
                self._reported = self._at(now)
                self._watts = (joules - self._last) / (now - self._when)
            target = joules + self._watts * INTERVAL  # at the next sample
            self._rate = max(0.0, (target - self._reported) / INTERVAL)
            self._when = now
            self._last = joules
            self.count += 1

    def _at(self, now: float) -> float:
        since = now - self._when
        return (
            self._reported
            + self._rate * min(since, INTERVAL)
            + self._watts * max(0.0, since - INTERVAL)
        )

    # Methods that codecarbon calls.

    def live_out(self, total: Any, delta: Any) -> None:
        self.add(_JOULES_PER_KWH * total.energy_consumed)

    def out(self, total: Any, delta: Any) -> None:
        self.live_out(total, delta)

    def task_out(self, data: Any, experiment_name: str) -> None: ...

    def exit(self) -> None: ...
