"""A node's part in masked sums: what it answers to each message about them, and what it insists on.

What it has trained is held back until its neighbours' shares are here, and is then sent masked. It keeps its key for as
long as its process lasts, also when the connection is lost: the aggregator cannot have it made anew. In a private run
it adds its share of the noise, which no one else ever sees by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedbudget.arrays import UInt64
from fedbudget.engines.grpc.messages import pack_masked, pack_masking_reply
from fedbudget.engines.remote.messages import Answer
from fedbudget.engines.remote.node_limits import BeyondLimits
from fedbudget.engines.remote.worker import Worker
from fedbudget.protocol.messages import Broadcast, PeerError
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
    from fedbudget.secure.identity import Identity, Trust
    from fedbudget.secure.member import MaskingMember


@dataclass(frozen=True)
class MaskingOptions:
    """What a node insists on.

    Args:
      required: it takes part only where sums are masked.
      threshold: the least share of a group that must stay.
      cert, key, ca: by which it shows who it is, and others to it; a key of its own where it has none.
      identity: the file of that key, made where it is not there; one for this process when not given.
      known: identities of other nodes by name; the first that each shows when not given.
    """

    required: bool = False
    threshold: float = 0.5
    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    identity: Path | None = None
    known: Path | None = None


class NodeMasking:
    """One node, as long as its process lasts."""

    def __init__(
        self, name: str, options: MaskingOptions, heard: Callable[[str], None]
    ) -> None:
        self._name = name
        self._options = options
        self._heard = heard
        self._terms: Terms | None = None  # of this connection
        self._identity: Identity | None = None
        self._member: MaskingMember | None = None
        self._run = ""
        self._group: Group | None = None
        self._trained: tuple[Broadcast, Answer] | None = None
        self._noisy: tuple[object, UInt64] | None = (
            None  # of which private round, and what it sent before masks
        )

    @property
    def on(self) -> bool:
        return self._terms is not None

    @property
    def round(self) -> int:
        """That is made now."""
        return 0 if self._group is None else self._group.round

    def connect(self) -> None:
        """A connection begins, on which nothing was agreed on."""
        self._terms = self._group = self._trained = None

    def introduce(self, run: str, worker: Worker) -> list[bytes]:
        """What is said before it is ready; refuses a run whose sums are not masked, where they must be."""
        if self._terms is None:
            if self._options.required:
                raise BeyondLimits(
                    "the aggregator would see this node's reports by themselves; it must be started with "
                    "`secure_aggregation`, or this node without"
                )
            return []
        if self._terms.threshold < self._options.threshold:
            raise BeyondLimits(
                f"the aggregator's `secure_threshold` is {self._terms.threshold:g}, and this node's is "
                f"{self._options.threshold:g}"
            )
        if self._member is None or self._run != run:
            self._member = self._make_member(run)
            self._run = run
        shape = None if worker.trial_tally is None else shape_of(worker.trial_tally)
        return pack_masking_reply(Introduction(self._member.signed_key, shape))

    def hold(self, broadcast: Broadcast, answer: Answer) -> None:
        """What was trained, until it can be masked."""
        self._trained = broadcast, answer

    def answer(self, message: FromAggregator) -> list[bytes]:
        """What is sent back."""
        if isinstance(message, Terms):
            self._terms = message
            return []
        if self._member is None or not self.on:
            raise PeerError("masked sums that were not agreed on")
        if isinstance(message, Group):
            self._group = message
            self._trained = None
            return pack_masking_reply(self._member.join(message))
        if isinstance(message, Survivors):
            return pack_masking_reply(self._member.open(message))
        return self._masked(self._member, message)

    def _masked(self, member: "MaskingMember", relay: Relay) -> list[bytes]:
        group, trained, self._trained = self._group, self._trained, None
        if group is None or trained is None or trained[0].round != group.round:
            raise PeerError("shares of a round that was not made")
        broadcast, answer = trained
        if len(group.weights) != len(answer.report.nodes):
            raise PeerError(
                f"weights of {len(group.weights)} nodes, where there are {len(answer.report.nodes)}"
            )
        if broadcast.private is None:
            contents = Contents.of(broadcast, group.places, group.tally, group.room)
            vector = contents.encode(
                contents.summands(answer.report, group, answer.tallies)
            )
        else:
            vector = self._with_noise(group, broadcast, answer).copy()
        member.mask(relay, vector)
        return pack_masked(group.round, group.attempt, vector, answer.costs)

    def _with_noise(self, group: Group, broadcast: Broadcast, answer: Answer) -> UInt64:
        """With its share of the noise. A round that is made again is answered with the same: new noise would tell more
        than is paid for, to whoever could open both.
        """
        asked = (
            broadcast.round,
            broadcast.tau,
            broadcast.private,
            broadcast.w.tobytes(),
            group.sharers,
            self._run,
        )
        if self._noisy is not None and self._noisy[0] == asked:
            return self._noisy[1]
        if not 1 <= group.sharers <= most_sharers(len(group.names), group.threshold):
            raise BeyondLimits(
                f"the aggregator asks for a share of noise as if {group.sharers} nodes added theirs, in a group of "
                f"{len(group.names)} of which {group.threshold} open a sum"
            )
        vector = PrivateContents.of(broadcast, group.sharers).encode(answer.report)
        self._noisy = asked, vector
        return vector

    def _make_member(self, run: str) -> "MaskingMember":
        try:
            from fedbudget.secure.identity import identity_of, trust_of
            from fedbudget.secure.member import MaskingMember
        except ImportError:
            raise BeyondLimits(
                "masked sums need a library; install it with: pip install cryptography"
            ) from None
        options = self._options
        if self._identity is None:
            self._identity = identity_of(options.cert, options.key, options.identity)
        trust: Trust = trust_of(
            options.ca if options.cert is not None else None, options.known
        )
        self._heard(
            f"sums are masked; this node is known to others by {in_short(self._identity.credential)}"
        )
        return MaskingMember(run, self._name, self._identity, trust, options.threshold)


def in_short(credential: bytes) -> str:
    """A key as it stands in a file of known nodes; the digest of a certificate."""
    if len(credential) == 32:
        return f"the key {credential.hex()}"
    from hashlib import sha256

    return f"the certificate with the digest {sha256(credential).hexdigest()[:16]}"
