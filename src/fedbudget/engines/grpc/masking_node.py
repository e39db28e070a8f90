"""A node's part in masked sums: its answer to each message, and the terms it requires.

The node holds its report back until its neighbours' shares have arrived, and then sends it
masked. It keeps its key for the lifetime of its process, across lost connections: an
aggregator cannot make it create another one. In a private run it adds its share of the
noise, and no other party sees that share.

Threads: node.py calls one method at a time, from its event loop or from a worker thread
that it awaits. There are no locks here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from fedbudget.arrays import UInt64
from fedbudget.engines.grpc.stream import pack
from fedbudget.engines.remote.messages import Answer, MaskedReport
from fedbudget.engines.remote.node_limits import BeyondLimits
from fedbudget.engines.remote.worker import Worker
from fedbudget.protocol.messages import Broadcast, NormReport, PeerError, Private
from fedbudget.secure.contents import Contents, PrivateContents, shape_of
from fedbudget.secure.graph import most_sharers
from fedbudget.secure.messages import (
    FromAggregator,
    Group,
    Introduction,
    Relay,
    Survivors,
    Terms,
)

if TYPE_CHECKING:
    from fedbudget.secure.identity import Identity
    from fedbudget.secure.member import MaskingMember


@dataclass(frozen=True)
class MaskingOptions:
    """The terms that a node requires.

    Args:
      required: refuse a run without masked sums.
      threshold: smallest share of a group that must stay.
      cert, key, ca: certificate, its key, and the CA of other nodes' certificates. Without
        them the node has an Ed25519 key.
      identity: file of that key, created if missing; a new key for this process if None.
      known: file with identities of other nodes; if None, the first identity of each
      counts.
    """

    required: bool = False
    threshold: float = 0.5
    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    identity: Path | None = None
    known: Path | None = None


class NodeMasking:
    """The masking state of one node process.

    Args:
      name: of the node.
      notify: called with a line of text for the user.
    """

    def __init__(
        self, name: str, options: MaskingOptions, notify: Callable[[str], None]
    ) -> None:
        self._name = name
        self._options = options
        self._notify = notify
        self._terms: Terms | None = None  # of this connection
        self._identity: Identity | None = None
        self._member: MaskingMember | None = None
        self._run = ""
        self._group: Group | None = None
        self._trained: tuple[Broadcast, Answer] | None = None
        # last private request, and the noisy vector that answered it
        self._noisy: tuple[object, UInt64] | None = None

    @property
    def round(self) -> int:
        """Number of the current round."""
        return 0 if self._group is None else self._group.round

    def connect(self) -> None:
        """Begin a new connection without terms."""
        self._terms = self._group = self._trained = None

    def introduce(self, run: str, worker: Worker) -> list[bytes]:
        """Return the messages that precede `ready`.

        Raises:
          BeyondLimits: the aggregator's terms are weaker than this node's.
        """
        options = self._options
        if self._terms is None:
            if options.required:
                raise BeyondLimits(
                    "the aggregator would see this node's reports one by one; start it "
                    "with `secure_aggregation`, or start this node without"
                )
            return []
        if self._terms.threshold < options.threshold:
            raise BeyondLimits(
                f"the aggregator's `secure_threshold` is {self._terms.threshold:g}, and "
                f"this node's is {options.threshold:g}"
            )
        if self._member is None or self._run != run:
            self._member = self._create_member(run)
            self._run = run
        shape = None if worker.trial_tally is None else shape_of(worker.trial_tally)
        return pack(Introduction(self._member.signed_key, shape))

    def hold(self, broadcast: Broadcast, answer: Answer) -> bool:
        """Keep a report until it can be masked.

        Returns:
          False if reports are not masked on this connection.
        """
        self._trained = None if self._terms is None else (broadcast, answer)
        return self._trained is not None

    def answer(self, message: FromAggregator) -> list[bytes]:
        """Return the reply to a message."""
        if isinstance(message, Terms):
            self._terms = message
            return []
        if self._member is None or self._terms is None:
            raise PeerError("secure aggregation without agreed terms")
        if isinstance(message, Group):
            self._group = message
            self._trained = None
            return pack(self._member.join(message))
        if isinstance(message, Survivors):
            return pack(self._member.open(message))
        return self._masked(self._member, message)

    def _masked(self, member: "MaskingMember", relay: Relay) -> list[bytes]:
        group = self._group
        trained = self._trained
        self._trained = None
        if group is None or trained is None or trained[0].round != group.round:
            raise PeerError("shares of a round that this node has not trained")
        broadcast, answer = trained
        nodes = len(answer.report.nodes)
        if len(group.weights) != nodes:
            raise PeerError(f"weights of {len(group.weights)} nodes, not of {nodes}")
        if not isinstance(broadcast, Private):
            contents = Contents.of(broadcast, group.slots, group.tally, group.headroom)
            vector = contents.encode(answer.report, group, answer.tallies)
        else:
            vector = self._with_noise(group, broadcast, answer).copy()
        member.mask(relay, vector)
        return pack(MaskedReport(group.round, group.attempt, vector, answer.costs))

    def _with_noise(self, group: Group, broadcast: Private, answer: Answer) -> UInt64:
        """Encode a private report with this node's share of the noise.

        A repeated round receives the same vector. Fresh noise would reveal more than was
        paid for, if both vectors were opened.
        """
        request = (
            type(broadcast),
            broadcast.round,
            broadcast.steps,
            broadcast.rho,
            getattr(broadcast, "clip", None),
            broadcast.w.tobytes(),
            group.sharers,
            self._run,
        )
        if self._noisy is not None and self._noisy[0] == request:
            return self._noisy[1]
        if not 1 <= group.sharers <= most_sharers(len(group.names), group.threshold):
            raise BeyondLimits(
                f"the aggregator divides the noise among {group.sharers} nodes, in a group "
                f"of {len(group.names)} with threshold {group.threshold}"
            )
        assert isinstance(answer.report, NormReport)
        vector = PrivateContents.of(broadcast, group.sharers).encode(answer.report)
        self._noisy = request, vector
        return vector

    def _create_member(self, run: str) -> "MaskingMember":
        try:
            from fedbudget.secure.identity import identity_of, trust_of
            from fedbudget.secure.member import MaskingMember
        except ImportError:
            raise BeyondLimits(
                "secure aggregation needs a package: pip install cryptography"
            ) from None
        options = self._options
        if self._identity is None:
            self._identity = identity_of(options.cert, options.key, options.identity)
        ca = options.ca if options.cert is not None else None
        trust = trust_of(ca, options.known)
        shown = describe_credential(self._identity.credential)
        self._notify(f"reports are masked; other nodes identify this node by {shown}")
        return MaskingMember(run, self._name, self._identity, trust, options.threshold)


def describe_credential(credential: bytes) -> str:
    """A key as written in a file of known nodes, or the digest of a certificate."""
    if len(credential) == 32:
        return f"the key {credential.hex()}"
    return f"the certificate with digest {sha256(credential).hexdigest()[:16]}"
