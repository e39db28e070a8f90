"""Energy as codecarbon estimates it, for machines without a meter that can be read.

codecarbon knows how much power many processors take at most, and figures from how busy they are; it adds the memory and
graphics cards. It is the whole machine's energy, as with RAPL.

It looks once a second, in a thread of its own, so that no reading holds a round up. Rounds are shorter than that: in
between power is taken to be what it last was, and what was wrong about that is made up for during the next second. So
what is told never jumps, and nodes on one machine, which look at different moments, still tell nearly the same.

Nothing leaves the machine and nothing is written: codecarbon is told to neither ask nor tell anyone, whatever its own
configuration says.
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
"""Seconds after which a look is too old to go by."""

_FIRST_INTERVAL = 0.2  # seconds until the second look
_LEAST_INTERVAL = 0.05  # seconds, the least, between two looks; asked sooner, codecarbon says again what it saw
_JOULES_PER_KWH = 3.6e6


class CodeCarbon:
    """The energy of this machine since this was made."""

    def __init__(self, tracker: Any, samples: "_PowerSamples") -> None:
        self.host = estimated(this_host())
        self._tracker = tracker
        self._samples = samples

    @classmethod
    def start(cls) -> "CodeCarbon":
        """Begins to look; takes a second or two, in which codecarbon finds out what is in the machine."""
        if find_spec("codecarbon") is None:
            raise UserError(
                "energy-meter codecarbon needs codecarbon; install it with: pip install 'fedbudget[codecarbon]'"
            )
        from codecarbon import OfflineEmissionsTracker

        logging.getLogger("codecarbon").setLevel(logging.CRITICAL)
        samples = _PowerSamples()
        tracker = OfflineEmissionsTracker(
            measure_power_secs=INTERVAL,
            api_call_interval=1,  # of looks, after which it tells `samples`
            output_methods=[],
            output_handlers=[samples],
            emissions_endpoint=None,
            tracking_mode="machine",
            allow_multiple_runs=True,
            force_carbon_intensity_g_co2e_kwh=0,  # what the energy does to the climate is not asked
            log_level="critical",
        )
        tracker.start()
        time.sleep(_FIRST_INTERVAL)
        tracker.flush()  # a second look, for how much power it is to begin with
        if samples.count < 2:  # it keeps all errors to itself
            raise MeterError("codecarbon does not say what this machine takes")
        return cls(tracker, samples)

    def read(self) -> float:
        """Joules since this was made."""
        if self._samples.age() > STALE:
            self._tracker.flush()  # looks at once; its thread may have been held up
        if self._samples.age() > STALE:
            raise MeterError(
                f"codecarbon has not looked at this machine's power for {self._samples.age():.0f} s"
            )
        return self._samples.joules()

    def close(self) -> None:
        """Ends its thread."""
        self._tracker.stop()


class _PowerSamples:
    """What codecarbon has counted, as one of its output handlers, and what to say in between.

    Made with its clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.count = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._when = clock()
        self._last = self._watts = 0.0
        self._reported = self._rate = 0.0  # at the last look, and since then per second

    def age(self) -> float:
        """Seconds since the last look."""
        return self._clock() - self._when

    def joules(self) -> float:
        with self._lock:
            return self._at(self._clock())

    def add(self, joules: float) -> None:
        """Takes in what codecarbon has counted since the beginning."""
        with self._lock:
            now = self._clock()
            if self.count and now - self._when < _LEAST_INTERVAL:
                return
            if self.count:
                self._reported = self._at(now)
                self._watts = (joules - self._last) / (now - self._when)
            self._rate = max(
                0.0, (joules + self._watts * INTERVAL - self._reported) / INTERVAL
            )
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

    def live_out(self, total: Any, delta: Any) -> None:
        self.add(_JOULES_PER_KWH * total.energy_consumed)

    def out(self, total: Any, delta: Any) -> None:
        self.live_out(total, delta)

    def task_out(self, data: Any, experiment_name: str) -> None: ...

    def exit(self) -> None: ...
