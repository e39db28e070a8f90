"""A node's part in masked sums: its answer to each message, and the terms it requires.

The node holds its report back until its neighbours' shares have arrived, and then sends it
masked. It keeps its key for the lifetime of its process, across lost connections: an
aggregator cannot make it create another one. In a private run it adds its share of the
noise, and no other party sees that share.

A node computes what must be the same for all nodes from what it has received itself
(`begin`), before it masks anything. It weights its samples itself. The task and the
threshold of a run cannot change.

Threads: node.py calls one method at a time, from its event loop or from a worker thread
that it awaits. There are no locks here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b, sha256
from pathlib import Path
from typing import TYPE_CHECKING

from fedbudget.arrays import Float32, UInt64
from fedbudget.engines.grpc.stream import pack
from fedbudget.engines.remote import wire
from fedbudget.engines.remote.messages import Answer, MaskedReport, RoundRequest
from fedbudget.engines.remote.node_limits import BeyondLimits
from fedbudget.engines.remote.task import Task
from fedbudget.engines.remote.worker import Worker
from fedbudget.protocol.features import compression
from fedbudget.protocol.messages import Broadcast, PeerError, Private, RoundPart
from fedbudget.secure.contents import (
    Contents,
    InvalidReport,
    PrivateContents,
    scale_of,
    shape_of,
    weights_of,
)
from fedbudget.secure.graph import FEWEST, THRESHOLD
from fedbudget.secure.messages import (
    Abstention,
    Confirmations,
    FromAggregator,
    Group,
    Introduction,
    Relay,
    Survivors,
    TallyShape,
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
      least: smallest number of members at the start of a round; None for the number of
        known nodes, or three if they are not known.
      cert, key, ca: certificate, its key, and the CA of other nodes' certificates. Without
        them the node has an Ed25519 key.
      identity: file of that key, created if missing; a new key for this process if None.
      known: file with identities of other nodes; if None, the first identity of each
      counts.
    """

    required: bool = False
    threshold: float = THRESHOLD
    least: int | None = None
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
        self._agreed = b""  # digest of the task and the terms of the run
        self._cap = 0  # samples that count
        self._shape: TallyShape | None = None  # of this node's test results
        self._group: Group | None = None
        self._begun = False  # the round of this group
        self._trained: tuple[Broadcast, Answer] | None = None
        self._known_vectors: list[tuple[Float32, bytes]] = []
        # last private request, and the noisy vector that answered it
        self._noisy: tuple[object, UInt64] | None = None

    @property
    def agreed(self) -> bool:
        """Whether reports are masked on this connection."""
        return self._terms is not None

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
          BeyondLimits: the aggregator's terms are weaker than this node's, or others than
            before in this run.
        """
        options = self._options
        if self._terms is None:
            if options.required or run == self._run:
                raise BeyondLimits(
                    "the aggregator would see this node's reports one by one; start it "
                    "with `secure_aggregation`, or start this node without"
                )
            return []
        if self._terms.threshold < options.threshold - 1e-9:
            raise BeyondLimits(
                f"the aggregator's `secure_threshold` is {self._terms.threshold:.3g}, and "
                f"this node's is {options.threshold:.3g}"
            )
        task = worker.task
        if task.most_counted is None:
            raise BeyondLimits("the task does not say how many samples of a node count")
        require_equal_shares(task, divides_noise=options.required)
        agreed = sha256(
            f"{self._terms.threshold} {wire.task_to_text(task)}".encode()
        ).digest()
        if self._member is None or self._run != run:
            self._member = self._create_member(run)
            self._run = run
        elif agreed != self._agreed:
            raise BeyondLimits("the aggregator has changed the task within a run")
        self._agreed = agreed
        self._cap = task.most_counted
        tally = worker.trial_tally
        self._shape = None if tally is None else shape_of(tally)
        return pack(Introduction(self._member.signed_key, self._shape, self._member.least))

    def begin(
        self, request: RoundRequest, worker: Worker
    ) -> tuple[RoundRequest, list[bytes]]:
        """Begin a masked round up to its local updates.

        Returns:
          the request to this node, from that to all nodes, and the messages to send before
          the local updates.
        """
        group = self._group
        broadcast = request.broadcast
        if (
            self._terms is None
            or self._member is None
            or group is None
            or group.round != broadcast.round
            or self._begun
        ):
            raise PeerError("a masked round without a group")
        if isinstance(broadcast, Private) and not 1 <= group.sharers < len(group.ring):
            raise BeyondLimits(
                f"the aggregator divides the noise among {group.sharers} nodes, in a group "
                f"of {len(group.ring)}"
            )
        if group.tally is not None and self._shape not in (None, group.tally):
            raise PeerError("test results in a shape that would leave out this node's")
        self._begun = True
        own = replace(request, broadcast=broadcast.to(worker.numbers))
        fleet = worker.begin(own)
        header, vectors = wire.contents_of(broadcast)
        common = fleet.common
        counts = f"{len(header)} {len(vectors)} {len(common)}".encode()
        parts = [self._agreed, counts, header, *self._vector_digests([*vectors, *common])]
        contents = sha256(b"\0".join(parts)).digest()
        return own, pack(self._member.join(group, self._terms.threshold, contents))

    def _vector_digests(self, vectors: Sequence[Float32]) -> list[bytes]:
        """Digest of each vector; those of the previous round are known.

        They use BLAKE2b, which takes half the time of SHA-256 on most processors.
        """
        before = self._known_vectors
        self._known_vectors = []
        for vector in vectors:
            known = [*before, *self._known_vectors]
            digests = [digest for other, digest in known if other is vector]
            if not digests:
                data = compression.raw(vector)
                digests = [blake2b(data, digest_size=32).digest()]
            self._known_vectors.append((vector, digests[0]))
        return [digest for _, digest in self._known_vectors]

    def hold(self, broadcast: Broadcast, answer: Answer) -> None:
        """Keep a report until it can be masked."""
        self._trained = broadcast, answer

    def answer(self, message: FromAggregator) -> list[bytes]:
        """Return the reply to a message."""
        if isinstance(message, Terms):
            if self._terms is not None:
                raise PeerError("the terms of secure aggregation have changed")
            self._terms = message
            return []
        if self._member is None or self._terms is None:
            raise PeerError("secure aggregation without agreed terms")
        if isinstance(message, Group):
            self._group = message
            self._begun = False
            self._trained = None
            return []
        if isinstance(message, Survivors):
            return pack(self._member.confirm(message))
        if isinstance(message, Confirmations):
            return pack(self._member.open(message))
        return self._masked(self._member, message)

    def _masked(self, member: "MaskingMember", relay: Relay) -> list[bytes]:
        group = self._group
        trained = self._trained
        self._trained = None
        if group is None or trained is None or trained[0].round != group.round:
            raise PeerError("shares of a round that this node has not trained")
        broadcast, answer = trained
        if not isinstance(broadcast, Private):
            contents = Contents.of(broadcast, group.tally)
            report = answer.report
            report = replace(report, sizes=weights_of(report.sizes, self._cap))
            scale = scale_of(self._cap, len(group.ring))
            try:
                vector = contents.encode(report, scale, answer.tallies)
            except InvalidReport:
                self._notify(f"the report of round {group.round} is not finite; not sent")
                return pack(Abstention(group.attempt, answer.costs))
        else:
            vector = self._with_noise(group, broadcast, answer)
        masked = member.mask(relay, vector)
        return pack(MaskedReport(group.round, group.attempt, masked, answer.costs))

    def _with_noise(self, group: Group, broadcast: Private, answer: Answer) -> UInt64:
        """Encode a private report with this node's share of the noise.

        A repeated round receives the same vector. Fresh noise would reveal more than was
        paid for, if both vectors were opened. `MaskingMember.confirm` refuses a sum with
        fewer shares than `group.sharers` and its own.
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
        known = set(trust.known or ()) | {self._name}
        least = options.least or max(FEWEST, len(known))
        shown = describe_credential(self._identity.credential)
        self._notify(f"reports are masked; other nodes identify this node by {shown}")
        if ca is not None:
            verified = f"other nodes need certificates from {ca}"
        elif trust.known is not None:
            verified = f"other nodes need the keys in {options.known}"
        else:
            verified = (
                "the first key of each other node is trusted: an aggregator that is "
                "malicious from the start can replace it"
            )
        self._notify(f"{verified}; rounds need at least {least} nodes")
        return MaskingMember(
            run, self._name, self._identity, trust, options.threshold - 1e-9, least
        )


def require_equal_shares(task: Task, *, divides_noise: bool) -> None:
    """Refuse tasks in which an aggregator could give this node a share of its own.

    Args:
      divides_noise: whether this node shares the noise that hides its samples with others.

    Raises:
      BeyondLimits: the rounds of the task treat nodes differently, or divide that noise.
    """
    features = task.built_features
    parts = [kind for feature in features for kind in feature.types]
    # The updates of nodes that make many of them almost cancel in a weighted sum. Then the
    # sum is the report of a node that makes one.
    if any(issubclass(kind, RoundPart) and kind.addressed for kind in parts):
        raise BeyondLimits(
            "the aggregator could request other numbers of local updates from each node, "
            "which singles out reports in a sum; use the same version of fedbudget on both"
        )
    kinds = [kind for feature in features for kind in feature.kinds]
    divided = any(issubclass(kind, Private) and kind.only_masked for kind in kinds)
    if divided and not divides_noise:
        raise BeyondLimits(
            "this run divides the noise that hides a sample among all nodes, which an "
            "aggregator could invent; start this node with `secure_aggregation`, which "
            "verifies the others, or the aggregator without"
        )


def describe_credential(credential: bytes) -> str:
    """A key as written in a file of known nodes, or the digest of a certificate."""
    if len(credential) == 32:
        return f"the key {credential.hex()}"
    return f"the certificate with digest {sha256(credential).hexdigest()[:16]}"
