"""What passes between an aggregator and nodes on other machines, whatever carries it."""

from dataclasses import MISSING, dataclass, fields
from typing import Annotated

from msgspec import Meta

from fedbudget.arrays import UInt64
from fedbudget.engines.remote.task import MOST_NODES, Name, SamplesDescription, Task
from fedbudget.evaluation.metrics import Tally
from fedbudget.models.description import ModelDescription
from fedbudget.protocol.messages import NUMBERS, VECTORS, Broadcast, Report
from fedbudget.resources.resource import NodeCosts


@dataclass(frozen=True)
class Hello:
    """What a node says first.

    Args:
      instance: of the process, made anew by each.
      samples: what its samples are like.
      run: which it remembers something of, if any.
      rounds: after which its memory may stand.
      model: what its own model is like, or the only name of one that it takes; None for any name.
    """

    instance: Name
    samples: SamplesDescription
    run: Name = ""
    rounds: Annotated[
        tuple[Annotated[int, Meta(ge=0, lt=2**32)], ...], Meta(max_length=16)
    ] = ()
    model: Name | ModelDescription | None = None


@dataclass(frozen=True)
class Ready:
    costs: NodeCosts


@dataclass(frozen=True)
class Answer:
    """A report and what it cost.

    Args:
      tallies: what the node's test samples say, where that was asked for and it has some.
      tally_bytes: what these took on the way.
      waited: seconds from when it was asked for, by the aggregator's clock; 0 where nobody looked.
    """

    report: Report
    costs: NodeCosts
    tallies: tuple[Tally, ...] = ()
    tally_bytes: int = 0
    waited: float = 0.0

    @property
    def line_seconds(self) -> float:
        """What the messages took on the way: all that was waited for but the node's own work."""
        evaluation = self.costs.evaluation.get("time")
        return max(
            0.0,
            self.waited
            - self.costs.seconds
            - (0.0 if evaluation is None else evaluation.whole),
        )


@dataclass(frozen=True)
class MaskedReport:
    """A report that nobody can read but in a sum with others, and what it cost.

    Args:
      attempt: at the round, that it is masked for.
      vector: as secure/contents.py has it, masked.
    """

    round: int
    attempt: int
    vector: UInt64
    costs: NodeCosts


@dataclass(frozen=True)
class Welcome:
    run: Name
    task: Task
    numbers: Annotated[
        tuple[Annotated[int, Meta(ge=0, lt=2**62)], ...], Meta(max_length=MOST_NODES)
    ]


@dataclass(frozen=True)
class RoundRequest:
    """A broadcast as a node gets it.

    Args:
      base_round: the round after which the node's memory must stand; 0 for none.
    """

    broadcast: Broadcast
    base_round: int


@dataclass(frozen=True)
class Farewell:
    """The run is over, or the aggregator is for a while."""

    reason: str
    again: bool = False


_ALWAYS = {field.name for field in fields(Report) if field.default is MISSING}


def report_numbers(broadcast: Broadcast) -> list[str]:
    """The fields with a number of each node that a report of this broadcast has, in their order."""
    names = _ALWAYS | broadcast.report_fields
    return [name for name in NUMBERS if name in names]


def report_vectors(broadcast: Broadcast) -> list[str]:
    """The fields with a vector of each node that a report of this broadcast has, in their order."""
    return [name for name in VECTORS if name in broadcast.report_fields]
