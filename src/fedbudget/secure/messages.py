"""What passes between a node and the aggregator for a masked sum, besides the masked vector itself.

    aggregator   Terms, once                           that sums are masked
    node         Introduction, once                    its key to agree on masks with
    aggregator   Group, for every attempt at a round   who masks with whom
    node         Shares                                of its two secrets, encrypted for each neighbour
    aggregator   Relay                                 the neighbours' shares for this node
    node         the masked vector
    aggregator   Survivors                             whose vectors are in the sum
    node         Opened                                of each neighbour one share: of its own mask's seed where it is
                                                       in the sum, and otherwise of the seeds that it has with others

Sizes are bounded by the types; what is more is checked where it is used.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fedbudget.protocol.messages import PeerError
from fedbudget.secure.shamir import SHARE

_Name = Annotated[str, Meta(max_length=200)]
_Names = Annotated[tuple[_Name, ...], Meta(max_length=200)]
_Count = Annotated[int, Meta(ge=0, lt=2**40)]
_Number = Annotated[int, Meta(ge=0, lt=2**62)]
_Share = Annotated[bytes, Meta(min_length=SHARE, max_length=SHARE)]
_SealedShares = Annotated[bytes, Meta(max_length=100)]


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Told apart by the name of its class."""


class Terms(_Message, frozen=True):
    """Sums are masked, and of each group such a share must stay."""

    threshold: Annotated[float, Meta(ge=0, le=1)]


class SignedKey(_Message, frozen=True):
    """A node's public key, and who says so; see identity.py."""

    name: _Name
    public: Annotated[bytes, Meta(min_length=32, max_length=32)]
    made: _Number
    credential: Annotated[bytes, Meta(max_length=10_000)]
    signature: Annotated[bytes, Meta(max_length=2000)]


class TallyShape(_Message, frozen=True):
    """What of test samples is added up: counts of so many classes, histograms of so many scores, errors, metrics."""

    classes: Annotated[int, Meta(ge=0, le=100_000)] = 0
    scored: Annotated[int, Meta(ge=0, le=100)] = 0
    errors: bool = False
    own: Annotated[tuple[_Name, ...], Meta(max_length=64)] = ()


class Introduction(_Message, frozen=True):
    """A node's key, and what it can say of test samples, if anything."""

    key: SignedKey
    tally: TallyShape | None


class Group(_Message, frozen=True):
    """Who masks together with a node, in one attempt at a round.

    Args:
      attempt: larger than any before, in all rounds of a run.
      names: of the node and its neighbours, in the order in which shares are numbered.
      threshold: how many of them must stay.
      weights: how many samples count, of each node of the fleet that this is for.
      scale: the sum of all weights is at most 2 to the power of this.
      places: for numbers of which the largest counts.
      room: how often a number of w may have doubled; see fixed_point.py.
      tally: what of test samples is added up, if anything.
      keys: of neighbours that were not told yet.
      sharers: for how many nodes' noise each adds its share, where the round is private; see private_contents.py.
    """

    round: _Number
    attempt: _Number
    names: _Names
    threshold: _Count
    weights: Annotated[tuple[_Count, ...], Meta(max_length=10_000)]
    scale: Annotated[int, Meta(ge=0, le=60)]
    places: Annotated[int, Meta(ge=0, le=2**20)]
    room: Annotated[int, Meta(ge=0, le=40)]
    tally: TallyShape | None
    keys: Annotated[tuple[SignedKey, ...], Meta(max_length=200)]
    sharers: _Count = 0


class Shares(_Message, frozen=True):
    """Args:
    seeds: with each neighbour, in their order, under a key of which there are shares.
    shares: for each neighbour, by its name, encrypted.
    """

    attempt: _Number
    seeds: Annotated[bytes, Meta(max_length=16 * 200 + 16)]
    shares: Annotated[dict[_Name, _SealedShares], Meta(max_length=200)]


class Relay(_Message, frozen=True):
    """Neighbours' shares for one node, by their names; who is not here takes no part."""

    attempt: _Number
    shares: Annotated[dict[_Name, _SealedShares], Meta(max_length=200)]


class Survivors(_Message, frozen=True):
    """Whose vectors are in the sum: of the node and its neighbours by name, and of all by a digest."""

    attempt: _Number
    names: _Names
    everyone: Annotated[bytes, Meta(min_length=32, max_length=32)]


class Opened(_Message, frozen=True):
    """Shares by the name of whose secret it is: of own masks' seeds, and of keys to seeds with others."""

    attempt: _Number
    own: Annotated[dict[_Name, _Share], Meta(max_length=200)]
    pairs: Annotated[dict[_Name, _Share], Meta(max_length=200)]


FromNode = Introduction | Shares | Opened
FromAggregator = Terms | Group | Relay | Survivors

# Made here, once: msgspec does not bear that two threads look at a type for the first time together.
_FROM_NODE = msgspec.msgpack.Decoder(FromNode)
_FROM_AGGREGATOR = msgspec.msgpack.Decoder(FromAggregator)


def pack(message: FromNode | FromAggregator) -> bytes:
    return msgspec.msgpack.encode(message)


def from_node(data: bytes) -> FromNode:
    """Refuses what cannot be with `PeerError`."""
    found: FromNode = _decoded(_FROM_NODE, data)
    return found


def from_aggregator(data: bytes) -> FromAggregator:
    """Refuses what cannot be with `PeerError`."""
    found: FromAggregator = _decoded(_FROM_AGGREGATOR, data)
    return found


def _decoded(decoder: "msgspec.msgpack.Decoder[Any]", data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"a message of masked sums that cannot be read: {error}") from None
