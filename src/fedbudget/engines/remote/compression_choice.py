"""How many bits vectors are sent with, where a person leaves that open (auto): decided once, in the first rounds.

Where bytes are budgeted it is 8 bits, with which a budget buys three to four times the rounds. Otherwise it is what
makes rounds shorter. All begin with 32 bits. How long a node's messages were on the line is the time from asking it to
its answer, less what it has worked; the shortest of some rounds is the line's, and not that of a machine that was busy
for a moment. Where all nodes' lines are quick, there is nothing to gain: 32 bits stay, and w is the same to the bit as
in one process. Where one is slow, be it because it carries few bytes a second or because it is long, which cannot be
told apart by that, some rounds are made with 8 bits, and these stay if rounds are a tenth shorter by them, local
updates aside. Fewer than 8 are not tried: where nodes have labels of their own they lose more than they save. Where
time is simulated no line is measured, and nothing is tried.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedbudget.protocol.compression import BroadcastCompressor, Kind

TRIED = 3
"""Rounds that are made each way."""
LEAST_GAIN = 0.1
"""Of a round's time, that 8 bits must save."""
QUICK = 0.02
"""Seconds that messages take at most on a line that is not worth a trial, with what a busy machine adds to them."""
FAST = 12.5e6
"""And bytes a second that such a line carries at least."""


@dataclass
class CompressionChoice:
    """Decides for a compressor.

    Args:
      compressor: that the coming broadcasts are made with.
      parameters: of the model.
      tries: whether it is still open.
    """

    compressor: BroadcastCompressor
    parameters: int
    tries: bool
    _lines: dict[int, float] = field(default_factory=dict)
    _rests: dict[Kind, list[float]] = field(default_factory=lambda: {"none": [], "8-bit": []})
    _wholes: list[float] = field(default_factory=list)

    @classmethod
    def first(
        cls, compressor: BroadcastCompressor, parameters: int, *, budgeted: bool, measured: bool
    ) -> "CompressionChoice":
        """Before the first round.

        Args:
          budgeted: whether bytes are.
          measured: whether time is, and not simulated.
        """
        compressor.kind = "8-bit" if budgeted else "none"
        return cls(compressor, parameters, measured and not budgeted)

    def add(self, lines: Mapping[int, float], rest: float, whole: float) -> None:
        """A round that was made with what was chosen last.

        Args:
          lines: seconds that messages to a node and back were on the line, by a number of it.
          rest: seconds that the round took besides local updates.
          whole: seconds that it took.
        """
        if not self.tries:
            return
        kind = self.compressor.kind
        self._rests[kind].append(rest)
        if kind == "none":
            self._wholes.append(whole)
            self._lines |= {node: min(seconds, self._lines.get(node, math.inf)) for node, seconds in lines.items()}
        if len(self._rests[kind]) < TRIED:
            return
        if kind == "none" and self._slowest_line > LEAST_GAIN * statistics.median(self._wholes):
            self.compressor.kind = "8-bit"
            return
        self.tries = False
        if kind != "none":
            saved = statistics.median(self._rests["none"]) - statistics.median(self._rests["8-bit"])
            if saved < LEAST_GAIN * statistics.median(self._wholes):
                self.compressor.kind = "none"

    @property
    def _slowest_line(self) -> float:
        """Seconds that messages take on it; 0 where all are quick."""
        slowest = max(self._lines.values(), default=0.0)
        # What a round sends is w, both ways, of four bytes a number.
        return slowest if slowest > max(QUICK, 8 * self.parameters / FAST) else 0.0
