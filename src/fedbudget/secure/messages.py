"""Messages between a node and the aggregator for one masked sum.

    aggregator   Terms, once                           reports are masked; the threshold
    node         Introduction, once                    its signed public key
    aggregator   Group, for every attempt at a round   the node's neighbours
    node         Shares                                Shamir shares of its two secrets,
                                                       encrypted for each neighbour
    aggregator   Relay                                 the neighbours' shares for this node
    node         the masked vector aggregator   Survivors                             nodes
    whose vectors are in the sum node         Opened                                one
    share for each neighbour: of its own
                                                       mask's seed if it survived, otherwise
                                                       of the key to its pairwise seeds

The types bound all sizes. The receiver checks everything else.
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
    """The class name is sent as the tag."""


class Terms(_Message, frozen=True):
    """Reports are masked; `threshold` is the share of each group that must stay."""

    threshold: Annotated[float, Meta(ge=0, le=1)]


class SignedKey(_Message, frozen=True):
    """A node's public key and its signature; see identity.py."""

    name: _Name
    public: Annotated[bytes, Meta(min_length=32, max_length=32)]
    made: _Number
    credential: Annotated[bytes, Meta(max_length=10_000)]
    signature: Annotated[bytes, Meta(max_length=2000)]


class TallyShape(_Message, frozen=True):
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


class Introduction(_Message, frozen=True):
    """A node's key, and the shape of its test results if it has test samples."""

    key: SignedKey
    tally: TallyShape | None


class Group(_Message, frozen=True):
    """A node and its neighbours in one attempt at a round.

    Args:
      attempt: larger than any earlier attempt of the run.
      names: of the node and its neighbours, in the order of share numbers.
      threshold: how many of them must stay.
      weights: sample count of each node in the receiver's fleet.
      scale: the sum of all weights is at most 2 to this power.
      slots: for the largest β̂; see contents.py.
      headroom: doublings of w's largest coordinate that still fit; see contents.py.
      tally: test results to sum, if any.
      keys: of neighbours that the receiver has not seen yet.
      sharers: in a private round, the number of nodes among which the noise is divided.
    """

    round: _Number
    attempt: _Number
    names: _Names
    threshold: _Count
    weights: Annotated[tuple[_Count, ...], Meta(max_length=10_000)]
    scale: Annotated[int, Meta(ge=0, le=60)]
    slots: Annotated[int, Meta(ge=0, le=2**20)]
    headroom: Annotated[int, Meta(ge=0, le=40)]
    tally: TallyShape | None
    keys: Annotated[tuple[SignedKey, ...], Meta(max_length=200)]
    sharers: _Count = 0


class Shares(_Message, frozen=True):
    """A node's secrets, encrypted.

    Args:
      seeds: pairwise seeds in the order of neighbours, encrypted with the shared key.
      shares: encrypted Shamir shares by neighbour.
    """

    attempt: _Number
    seeds: Annotated[bytes, Meta(max_length=16 * 200 + 16)]
    shares: Annotated[dict[_Name, _SealedShares], Meta(max_length=200)]


class Relay(_Message, frozen=True):
    """Neighbours' shares for one node, by name; absent neighbours do not take part."""

    attempt: _Number
    shares: Annotated[dict[_Name, _SealedShares], Meta(max_length=200)]


class Survivors(_Message, frozen=True):
    """Nodes whose vectors are in the sum.

    Args:
      names: survivors among the receiver and its neighbours.
      everyone: digest of all survivors.
    """

    attempt: _Number
    names: _Names
    everyone: Annotated[bytes, Meta(min_length=32, max_length=32)]


class Opened(_Message, frozen=True):
    """Shares by the owner of the secret.

    Args:
      own: shares of own masks' seeds, of survivors.
      pairs: shares of keys to pairwise seeds, of all others.
    """

    attempt: _Number
    own: Annotated[dict[_Name, _Share], Meta(max_length=200)]
    pairs: Annotated[dict[_Name, _Share], Meta(max_length=200)]


FromNode = Introduction | Shares | Opened
FromAggregator = Terms | Group | Relay | Survivors

# Created at import: msgspec is not thread-safe when it inspects a type for the first time.
_FROM_NODE = msgspec.msgpack.Decoder(FromNode)
_FROM_AGGREGATOR = msgspec.msgpack.Decoder(FromAggregator)


def pack(message: FromNode | FromAggregator) -> bytes:
    return msgspec.msgpack.encode(message)


def from_node(data: bytes) -> FromNode:
    """Decode a node's message; raises `PeerError` if it is invalid."""
    message: FromNode = _decode(_FROM_NODE, data)
    return message


def from_aggregator(data: bytes) -> FromAggregator:
    """Decode the aggregator's message; raises `PeerError` if it is invalid."""
    message: FromAggregator = _decode(_FROM_AGGREGATOR, data)
    return message


def _decode(decoder: "msgspec.msgpack.Decoder[Any]", data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"invalid secure-aggregation message: {error}") from None
