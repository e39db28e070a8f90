"""Energy as processors measure it: RAPL, which Linux shows as powercap.

Every package (socket) has a counter of microjoules in a folder of its own, `intel-rapl:0` and so on, AMD's too. The
zones within a package (`intel-rapl:0:0`, its cores) are part of it, and the whole platform (`psys`) has the packages in
it: neither is added. A counter starts again at 0 after `max_energy_range_uj`, minutes at full power, so it has to be
read more often than that; one that is not read is an error, never zero.

The counters are the machine's, not a process's: nodes that share a machine read the same joules, and `Rapl.host` says
so.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from fedbudget.resources.resource import MeterError, this_host

POWERCAP = Path("/sys/class/powercap")

_TOP_LEVEL = re.compile(r"intel-rapl:[0-9]+")


class Rapl:
    """The energy of this machine's processors since this was made; a `MeterError` where that cannot be read."""

    def __init__(self, root: Path = POWERCAP) -> None:
        self.host = this_host()
        """Of which machine, without saying its name."""
        self._packages = _packages(root)
        self._last = [package.microjoules() for package in self._packages]
        self._total = 0

    @classmethod
    def find(cls, root: Path = POWERCAP) -> "Rapl | None":
        """This machine's, if it has one that we may read."""
        try:
            return cls(root)
        except MeterError:
            return None

    def read(self) -> float:
        """Joules since this was made, of all packages together."""
        now = [
            package.microjoules() for package in self._packages
        ]  # all or none, so that a failure loses nothing
        for package, reading, last in zip(self._packages, now, self._last, strict=True):
            self._total += package.passed(last, reading)
        self._last = now
        return self._total / 1e6


@dataclass(frozen=True)
class _Package:
    """One counter.

    Args:
      energy: the file that it is read from.
      range: what it counts to before it starts again, in microjoules.
    """

    energy: Path
    range: int

    def microjoules(self) -> int:
        reading = _number(self.energy)
        if reading > self.range:
            raise MeterError(
                f"{self.energy} says {reading}, more than the {self.range} that it counts to"
            )
        return reading

    def passed(self, last: int, now: int) -> int:
        return now - last if now >= last else now - last + self.range


def _packages(root: Path) -> list[_Package]:
    if not root.is_dir():
        raise MeterError("no powercap on this machine")
    zones = sorted(path for path in root.iterdir() if _TOP_LEVEL.fullmatch(path.name))
    packages = [zone for zone in zones if _text(zone / "name").startswith("package")]
    if not packages:
        raise MeterError("powercap shows no processor's energy on this machine")
    return [
        _Package(zone / "energy_uj", _number(zone / "max_energy_range_uj"))
        for zone in packages
    ]


def _number(path: Path) -> int:
    text = _text(path)
    if not re.fullmatch(r"[0-9]+", text):
        raise MeterError(f"{path} says {text[:40]!r}, which is no number of microjoules")
    return int(text)


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", errors="replace").strip()
    except PermissionError:
        raise MeterError(
            f"{path} is readable by root only; chmod a+r lets others read it"
        ) from None
    except OSError as error:
        raise MeterError(f"{path} cannot be read: {error.strerror}") from None
