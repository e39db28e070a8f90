"""Members and a masked sum that communicate directly; members can drop out in any phase."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from fedbudget.arrays import UInt64
from fedbudget.secure.identity import KeyIdentity, Trust
from fedbudget.secure.masked_sum import MaskedSum
from fedbudget.secure.member import MaskingMember
from fedbudget.secure.messages import Group, SignedKey

RUN = "a-run"


def members_of(count: int, run: str = RUN) -> dict[str, MaskingMember]:
    names = [f"node-{number}" for number in range(count)]
    return {name: MaskingMember(run, name, KeyIdentity(), Trust()) for name in names}


def group_for(
    summed: MaskedSum,
    name: str,
    keys: Mapping[str, SignedKey],
    number: int = 1,
    weights: Sequence[int] = (1,),
) -> Group:
    names = summed.group(name)
    others = tuple(keys[other] for other in names if other != name)
    threshold = summed.threshold(name)
    return Group(
        number, summed.attempt, names, threshold, tuple(weights), 0, 0, 8, None, others
    )


def new_masked_sum(
    members: Mapping[str, MaskingMember], attempt: int, length: int, share: float = 2 / 3
) -> MaskedSum:
    keys = {name: member.signed_key.public for name, member in members.items()}
    return MaskedSum(attempt, tuple(members), share, length, keys)


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
    keys = {name: member.signed_key for name, member in members.items()}
    for name, member in members.items():
        if name not in before_shares:
            summed.receive_shares(name, member.join(group_for(summed, name, keys, number)))
    for name, relay in summed.relay().items():
        if name not in before_vectors:
            vector = vectors[name].copy()
            members[name].mask(relay, vector)
            if seen is not None:
                seen.append(vector.tobytes())
            summed.receive_vector(name, vector)
    for name, survivors in summed.survivors().items():
        if name not in before_opening:
            summed.receive_opened(name, members[name].open(survivors))
    return summed.open(), summed.summed


def drawn_vectors(
    names: Collection[str], length: int = 7, seed: int = 0
) -> dict[str, UInt64]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 2**64, length, np.uint64) for name in names}
