"""Messages between an aggregator and nodes on other machines, for any transport."""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

from msgspec import Meta

from fedbudget.arrays import Int64, UInt64
from fedbudget.engines.remote.task import Name, SamplesDescription, Task
from fedbudget.evaluation.metrics import Tally
from fedbudget.models.description import ModelDescription
from fedbudget.protocol.messages import Broadcast, Report
from fedbudget.resources.resource import Usage
from fedbudget.secure.graph import MOST_NODES

LONG_REASON = 2000
"""Maximum length of a reason in characters."""

HIDDEN_REASON = (
    "it cannot train this task; the reason may follow from its samples, so only its own "
    "output contains it"
)
"""Reason of a refusal in a private run, in place of one that may follow from samples."""


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
      broadcast: its vectors may be sent as differences (wire.py).
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

    @cached_property
    def nodes(self) -> Int64:
        """Numbers of the member's nodes."""
        return self.report.nodes


@dataclass(frozen=True)
class MaskedAnswer:
    """The answer of a member whose report is known only as a part of the sum.

    Args:
      nodes: numbers of the member's nodes.
      waited: as in `Answer`.
    """

    nodes: Int64
    costs: Usage
    waited: float = 0.0
    tallies: ClassVar[tuple[Tally, ...]] = ()
    tally_bytes: ClassVar[int] = 0


MemberAnswer = Answer | MaskedAnswer


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
class NodeRefusal:
    """A node's last message.

    Args:
      reason: why it does not take part.
      lost: whether its memory of earlier rounds is missing.
    """

    reason: Annotated[str, Meta(max_length=LONG_REASON)]
    lost: bool = False


@dataclass(frozen=True)
class Farewell:
    """The run is over or, if `again`, the aggregator stops for a while."""

    reason: Annotated[str, Meta(max_length=LONG_REASON)]
    again: bool = False
