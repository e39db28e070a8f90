"""Messages between a node and the aggregator for one masked sum.

    aggregator   Terms, once                           reports are masked; the threshold
    node         Introduction, once                    its signed public key
    aggregator   Group, for every attempt at a round   the node's neighbours
    node         Shares                                Shamir shares of its two secrets,
                                                       encrypted for each neighbour
    aggregator   Relay                                 the neighbours' shares for this node
    node         the masked vector
    aggregator   Survivors                             nodes whose vectors are in the sum
    node         Opened                                one share for each neighbour: of its
                                                       own mask's seed if it survived,
                                                       otherwise of the key to its pairwise
                                                       seeds

The types bound all sizes. The receiver checks everything else.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from fedbudget.secure.shamir import SHARE

_Name = Annotated[str, Meta(max_length=200)]
_Names = Annotated[tuple[_Name, ...], Meta(max_length=200)]
_Count = Annotated[int, Meta(ge=0, lt=2**40)]
_Number = Annotated[int, Meta(ge=0, lt=2**62)]
_Share = Annotated[bytes, Meta(min_length=SHARE, max_length=SHARE)]
_SealedShares = Annotated[bytes, Meta(max_length=100)]


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
    """A node's key, and the shape of its test results if it has test samples."""

    key: SignedKey
    tally: TallyShape | None


@dataclass(frozen=True)
class Group:
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


@dataclass(frozen=True)
class Shares:
    """A node's secrets, encrypted.

    Args:
      seeds: pairwise seeds in the order of neighbours, encrypted with the shared key.
      shares: encrypted Shamir shares by neighbour.
    """

    attempt: _Number
    seeds: Annotated[bytes, Meta(max_length=16 * 200 + 16)]
    shares: Annotated[dict[_Name, _SealedShares], Meta(max_length=200)]


@dataclass(frozen=True)
class Relay:
    """Neighbours' shares for one node, by name; absent neighbours do not take part."""

    attempt: _Number
    shares: Annotated[dict[_Name, _SealedShares], Meta(max_length=200)]


@dataclass(frozen=True)
class Survivors:
    """Nodes whose vectors are in the sum.

    Args:
      names: survivors among the receiver and its neighbours.
      everyone: digest of all survivors.
    """

    attempt: _Number
    names: _Names
    everyone: Annotated[bytes, Meta(min_length=32, max_length=32)]


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


FromNode = Introduction | Shares | Opened
FromAggregator = Terms | Group | Relay | Survivors
