"""Messages between a node and the aggregator for one masked sum.

    aggregator   Terms, once                           reports are masked; the threshold
    node         Introduction, once                    its signed public key
    aggregator   Group, for every attempt at a round   the ring of all members; then the
                                                       broadcast
    node         Shares                                Shamir shares of its two secrets,
                                                       encrypted for each neighbour
    aggregator   Relay                                 the neighbours' shares for this node
    node         the masked vector, or Abstention      if its report is not finite
    aggregator   Survivors                             members whose vectors are in the sum
    node         Confirmed                             a proof for each neighbour that it
                                                       has received this list
    aggregator   Confirmations                         the neighbours' proofs for this node
    node         Opened                                one share for each neighbour: of its
                                                       own mask's seed if it survived,
                                                       otherwise of the key to its pairwise
                                                       seeds

All nodes receive the same Terms, Group (without its keys) and Survivors. The types bound
all sizes. The receiver checks everything else.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from fedbudget.resources.resource import Usage
from fedbudget.secure.graph import FEWEST, MOST_NODES
from fedbudget.secure.shamir import DIGEST, SHARE

_Name = Annotated[str, Meta(max_length=200)]
_Count = Annotated[int, Meta(ge=0, lt=2**40)]
_Number = Annotated[int, Meta(ge=0, lt=2**62)]
_Share = Annotated[bytes, Meta(min_length=SHARE, max_length=SHARE)]
_SealedShares = Annotated[bytes, Meta(max_length=100)]
_Proof = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Ring = Annotated[tuple[_Name, ...], Meta(max_length=MOST_NODES)]


@dataclass(frozen=True)
class Terms:
    """Reports are masked; `threshold` is the share of each group that must stay."""

    threshold: Annotated[float, Meta(ge=0, le=1)]


@dataclass(frozen=True)
class SignedKey:
    """A node's public key and its signature; see identity.py."""

    name: _Name
    public: Annotated[bytes, Meta(min_length=32, max_length=32)]
    made: _Number
    credential: Annotated[bytes, Meta(max_length=10_000)]
    signature: Annotated[bytes, Meta(max_length=2000)]


@dataclass(frozen=True)
class TallyShape:
    """Layout of the test results that are summed.

    Args:
      classes: number of classes with counts.
      scored: number of classes with score histograms.
      errors: whether regression errors are included.
      own: names of custom metrics.
    """

    classes: Annotated[int, Meta(ge=0, le=100_000)] = 0
    scored: Annotated[int, Meta(ge=0, le=100)] = 0
    errors: bool = False
    own: Annotated[tuple[_Name, ...], Meta(max_length=64)] = ()


@dataclass(frozen=True)
class Introduction:
    """A node's first message after the task.

    Args:
      key: its key.
      tally: shape of its test results, if it has test samples.
      least: members that a sum with this node must have at the start of a round.
    """

    key: SignedKey
    tally: TallyShape | None
    least: _Count = FEWEST


@dataclass(frozen=True)
class Group:
    """The members of one attempt at a round, the same for all of them except for `keys`.

    Args:
      attempt: larger than any earlier attempt of the run.
      ring: names of all members. A member's neighbours follow from it (graph.py), and
        share numbers are places among their sorted names.
      tally: test results to sum, if any.
      keys: of neighbours that the receiver has not seen yet.
      sharers: in a private round, the number of nodes among which the noise is divided.
    """

    round: _Number
    attempt: _Number
    ring: _Ring
    tally: TallyShape | None
    keys: Annotated[tuple[SignedKey, ...], Meta(max_length=200)]
    sharers: _Count = 0


@dataclass(frozen=True)
class Shares:
    """A node's secrets, encrypted.

    Args:
      seeds: pairwise seeds in the order of neighbours, encrypted with the shared key.
      shares: encrypted Shamir shares by neighbour.
      digests: of the seed of its own mask, and of all shares of both secrets in the order
        of the group, by which the aggregator detects wrong ones.
    """

    attempt: _Number
    seeds: Annotated[bytes, Meta(max_length=16 * 200 + 16)]
    shares: Annotated[dict[_Name, _SealedShares], Meta(max_length=200)]
    digests: Annotated[bytes, Meta(max_length=DIGEST * 401)]


@dataclass(frozen=True)
class Relay:
    """Neighbours' shares for one node, by name; absent neighbours do not take part."""

    attempt: _Number
    shares: Annotated[dict[_Name, _SealedShares], Meta(max_length=200)]


@dataclass(frozen=True)
class Abstention:
    """A node sends no vector, because its report is not finite or out of range."""

    attempt: _Number
    costs: Usage


@dataclass(frozen=True)
class Survivors:
    """Which vectors are in the sum, the same for all nodes.

    Args:
      absent: ascending places in the ring of the members whose vectors are not.
    """

    attempt: _Number
    absent: Annotated[tuple[_Count, ...], Meta(max_length=MOST_NODES)]


@dataclass(frozen=True)
class Confirmed:
    """Proofs for each surviving neighbour that the sender has received a list of survivors.

    Without any, the node refuses to open the round for these survivors.
    """

    attempt: _Number
    proofs: Annotated[dict[_Name, _Proof], Meta(max_length=200)]


@dataclass(frozen=True)
class Confirmations:
    """The neighbours' proofs for one node."""

    attempt: _Number
    proofs: Annotated[dict[_Name, _Proof], Meta(max_length=200)]


@dataclass(frozen=True)
class Opened:
    """Shares by the owner of the secret.

    Args:
      own: shares of own masks' seeds, of survivors.
      pairs: shares of keys to pairwise seeds, of all others.
    """

    attempt: _Number
    own: Annotated[dict[_Name, _Share], Meta(max_length=200)]
    pairs: Annotated[dict[_Name, _Share], Meta(max_length=200)]


FromNode = Introduction | Shares | Abstention | Confirmed | Opened
FromAggregator = Terms | Group | Relay | Survivors | Confirmations
