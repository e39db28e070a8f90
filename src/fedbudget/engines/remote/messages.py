"""Messages between an aggregator and nodes on other machines, for any transport."""

from dataclasses import MISSING, dataclass, fields
from typing import Annotated

from msgspec import Meta

from fedbudget.arrays import UInt64
from fedbudget.engines.remote.task import MOST_NODES, Name, SamplesDescription, Task
from fedbudget.evaluation.metrics import Tally
from fedbudget.models.description import ModelDescription
from fedbudget.protocol.messages import NUMBERS, VECTORS, Broadcast, Report
from fedbudget.resources.resource import Usage


@dataclass(frozen=True)
class Hello:
    """A node's first message.

    Args:
      instance: random identifier of the process.
      samples: description of its samples.
      run: the run in its memory, if any.
      rounds: rounds of which it has the memory.
      model: description of its own model, or the only model name it accepts; None for any
        name.
    """

    instance: Name
    samples: SamplesDescription
    run: Name = ""
    rounds: Annotated[
        tuple[Annotated[int, Meta(ge=0, lt=2**32)], ...], Meta(max_length=16)
    ] = ()
    model: Name | ModelDescription | None = None


@dataclass(frozen=True)
class Welcome:
    """The aggregator's reply to `Hello`: the task and the numbers of the node's fleet."""

    run: Name
    task: Task
    numbers: Annotated[
        tuple[Annotated[int, Meta(ge=0, lt=2**62)], ...], Meta(max_length=MOST_NODES)
    ]


@dataclass(frozen=True)
class Ready:
    """A node's reply to `Welcome`: the costs of its trial round."""

    costs: Usage


@dataclass(frozen=True)
class RoundRequest:
    """A broadcast to one node.

    Args:
      base_round: the node must start from its memory after this round; 0 for none.
    """

    broadcast: Broadcast
    base_round: int


@dataclass(frozen=True)
class Answer:
    """A report and its costs.

    Args:
      tallies: metrics on the node's test samples, if requested and available.
      tally_bytes: their size on the wire.
      waited: seconds from request to answer on the aggregator's clock; 0 if not measured.
    """

    report: Report
    costs: Usage
    tallies: tuple[Tally, ...] = ()
    tally_bytes: int = 0
    waited: float = 0.0

    @property
    def line_seconds(self) -> float:
        """Transfer time of the messages: the wait without the node's own work."""
        evaluation = self.costs.evaluation.get("time")
        evaluating = 0.0 if evaluation is None else evaluation.whole
        return max(0.0, self.waited - self.costs.seconds - evaluating)


@dataclass(frozen=True)
class MaskedReport:
    """A report that can be read only as part of a sum, and its costs.

    Args:
      attempt: number of the attempt at the round; masks differ between attempts.
      vector: encoded as in secure/contents.py, masked.
    """

    round: int
    attempt: int
    vector: UInt64
    costs: Usage


@dataclass(frozen=True)
class Farewell:
    """The run is over or, if `again`, the aggregator stops for a while."""

    reason: str
    again: bool = False


_ALWAYS = {field.name for field in fields(Report) if field.default is MISSING}


def report_numbers(broadcast: Broadcast) -> list[str]:
    """Fields with one number per node in a report of this broadcast, in wire order."""
    names = _ALWAYS | broadcast.report_fields
    return [name for name in NUMBERS if name in names]


def report_vectors(broadcast: Broadcast) -> list[str]:
    """Fields with one vector per node in a report of this broadcast, in wire order."""
    names = broadcast.report_fields
    return [name for name in VECTORS if name in names]
