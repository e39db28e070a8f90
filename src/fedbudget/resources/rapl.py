"""Energy as measured by processors: RAPL, which Linux exposes as powercap.

Every package (socket) of an Intel or AMD processor has a counter of microjoules in its own
folder: `intel-rapl:0`, `intel-rapl:1` and so on. Zones within a package (`intel-rapl:0:0`,
its cores) are a part of it. The platform zone (`psys`) includes the packages. Neither is
added. A counter restarts at 0 after `max_energy_range_uj`, minutes at full power, so it
must be read more often. A counter that cannot be read is an error, never zero.

The counters belong to the machine, not to a process. Nodes that share a machine read the
same joules, which `Rapl.host` shows.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from fedbudget.resources.resource import MeterError, this_host

POWERCAP = Path("/sys/class/powercap")

_TOP_LEVEL = re.compile(r"intel-rapl:[0-9]+")


class Rapl:
    """Energy of this machine's processors since the object was created.

    Raises `MeterError` if it cannot be read.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        self.host = this_host()
        self._packages = _packages(root)
        self._last = [package.microjoules() for package in self._packages]
        self._total = 0

    @classmethod
    def find(cls, root: Path = POWERCAP) -> "Rapl | None":
        """Return the meter of this machine; None if this process cannot read one."""
        try:
            return cls(root)
        except MeterError:
            return None

    def read(self) -> float:
        """Return the joules of all packages since the object was created."""
        # Read all counters before adding any: a failure then loses no energy.
        now = [package.microjoules() for package in self._packages]
        for package, reading, last in zip(self._packages, now, self._last, strict=True):
            self._total += reading - last
            if reading < last:
                self._total += package.range
        self._last = now
        return self._total / 1e6


@dataclass(frozen=True)
class _Package:
    """One counter.

    Args:
      energy: file of the counter.
      range: largest count before it restarts, in microjoules.
    """

    energy: Path
    range: int

    def microjoules(self) -> int:
        reading = _number(self.energy)
        if reading > self.range:
            raise MeterError(
                f"{self.energy} contains {reading}, more than its maximum of {self.range}"
            )
        return reading


def _packages(root: Path) -> list[_Package]:
    if not root.is_dir():
        raise MeterError("this machine has no powercap")
    zones = sorted(path for path in root.iterdir() if _TOP_LEVEL.fullmatch(path.name))
    packages = [
        _Package(zone / "energy_uj", _number(zone / "max_energy_range_uj"))
        for zone in zones
        if _text(zone / "name").startswith("package")
    ]
    if not packages:
        raise MeterError("powercap shows no processor's energy on this machine")
    return packages


def _number(path: Path) -> int:
    text = _text(path)
    if not re.fullmatch(r"[0-9]+", text):
        raise MeterError(f"{path} contains {text[:40]!r}, not a number of microjoules")
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
