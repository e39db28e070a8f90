"""How many bits vectors are sent with, where a person leaves that open (auto): decided once, in the first rounds.

Where bytes are budgeted it is 8 bits, with which a budget buys up to three times the rounds. Otherwise it is what makes
rounds shorter. That is tried, because how long a line takes for a byte cannot be told from how long it takes for
anything: some rounds are made with 32 bits and as many with 8, and 8 bits stay if rounds are a tenth shorter by them,
local updates aside. So it is on a slow line; on a quick one there is nothing to gain, and nothing is lost by a few
rounds of 8 bits with error feedback. Fewer than 8 are not tried: where nodes have labels of their own they lose more
than they save. Where time is simulated no line is measured, and nothing is tried.
"""

import statistics
from dataclasses import dataclass, field

from fedbudget.protocol.compression import BroadcastCompressor, Kind

TRIED = 4
"""Rounds that are made each way."""
LEAST_GAIN = 0.1
"""Of a round's time, that 8 bits must save."""


@dataclass
class CompressionChoice:
    """Decides for a compressor.

    Args:
      compressor: that the coming broadcasts are made with.
      tries: whether lines are measured.
    """

    compressor: BroadcastCompressor
    tries: bool
    _rests: dict[Kind, list[float]] = field(default_factory=lambda: {"none": [], "8-bit": []})
    _wholes: list[float] = field(default_factory=list)
    _rounds: int = 0

    @classmethod
    def first(cls, compressor: BroadcastCompressor, *, budgeted: bool, measured: bool) -> "CompressionChoice":
        """Before the first round.

        Args:
          budgeted: whether bytes are.
          measured: whether time is, and not simulated.
        """
        compressor.kind = "8-bit" if budgeted else "none"
        return cls(compressor, measured and not budgeted)

    def add(self, rest: float, whole: float) -> None:
        """A round that was made with what was chosen last.

        Args:
          rest: seconds that it took besides local updates.
          whole: seconds that it took.
        """
        self._rounds += 1
        if not self.tries or self._rounds == 1:  # the first also makes what is needed once
            return
        self._rests[self.compressor.kind].append(rest)
        self._wholes.append(whole)
        if len(self._rests[self.compressor.kind]) < TRIED:
            return
        if self.compressor.kind == "none":
            self.compressor.kind = "8-bit"
            return
        self.tries = False
        saved = statistics.median(self._rests["none"]) - statistics.median(self._rests["8-bit"])
        if saved < LEAST_GAIN * statistics.median(self._wholes[:TRIED]):
            self.compressor.kind = "none"
