"""Members and a masked sum that communicate directly; members can drop out in any phase."""

from collections.abc import Collection, Mapping

import numpy as np

from fedbudget.arrays import UInt64
from fedbudget.secure.identity import KeyIdentity, Trust
from fedbudget.secure.masked_sum import MaskedSum
from fedbudget.secure.member import MaskingMember
from fedbudget.secure.messages import Group, SignedKey

RUN = "a-run"


def members_of(
    count: int, run: str = RUN, threshold: float = 0.5
) -> dict[str, MaskingMember]:
    names = [f"node-{number}" for number in range(count)]
    return {
        name: MaskingMember(run, name, KeyIdentity(), Trust(), threshold) for name in names
    }


def group_for(
    summed: MaskedSum,
    name: str,
    keys: Mapping[str, SignedKey],
    number: int = 1,
) -> Group:
    others = tuple(keys[other] for other in summed.neighbours[name])
    return Group(number, summed.attempt, summed.circle, None, others)


def join(
    members: Mapping[str, MaskingMember],
    summed: MaskedSum,
    number: int = 1,
    absent: Collection[str] = (),
    contents: Mapping[str, bytes] | None = None,
) -> None:
    """Begin an attempt with all members except absent ones.

    Args:
      contents: what each node trains, if it is not the same for all.
    """
    keys = {name: member.signed_key for name, member in members.items()}
    for name, member in members.items():
        if name not in absent:
            group = group_for(summed, name, keys, number)
            what = b"round %d" % number if contents is None else contents[name]
            summed.receive_shares(name, member.join(group, summed.share, what))


def open_sum(
    members: Mapping[str, MaskingMember],
    summed: MaskedSum,
    absent: Collection[str] = (),
) -> UInt64:
    """Confirm the survivors and open their sum, without absent members."""
    survivors = summed.survivors()
    for name in summed.summed:
        if name not in absent:
            summed.receive_confirmed(name, members[name].confirm(survivors))
    for name, confirmations in summed.confirmations().items():
        summed.receive_opened(name, members[name].open(confirmations))
    return summed.open()


def new_masked_sum(
    members: Mapping[str, MaskingMember], attempt: int, length: int, share: float = 2 / 3
) -> MaskedSum:
    return MaskedSum(attempt, tuple(members), share, length)


def masked_round(
    members: Mapping[str, MaskingMember],
    vectors: Mapping[str, UInt64],
    *,
    attempt: int = 1,
    number: int = 1,
    share: float = 2 / 3,
    before_shares: Collection[str] = (),
    before_vectors: Collection[str] = (),
    before_opening: Collection[str] = (),
    seen: list[bytes] | None = None,
) -> tuple[UInt64, set[str]]:
    """Run one masked round; return the opened sum and the members included in it.

    Args:
      share: threshold, as a share of the members.
      before_shares: members that drop out before sending their shares.
      before_vectors: members that drop out before sending their vectors.
      before_opening: members that drop out before the sum is opened.
      seen: receives the masked vectors.
    """
    length = len(next(iter(vectors.values())))
    summed = new_masked_sum(members, attempt, length, share)
    join(members, summed, number, before_shares)
    for name, relay in summed.relay().items():
        if name not in before_vectors:
            vector = members[name].mask(relay, vectors[name])
            if seen is not None:
                seen.append(vector.tobytes())
            summed.receive_vector(name, vector)
    return open_sum(members, summed, before_opening), summed.summed


def drawn_vectors(
    names: Collection[str], length: int = 7, seed: int = 0
) -> dict[str, UInt64]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 2**64, length, np.uint64) for name in names}
