"""Masked sums from settings: what they are agreed on with, and what cannot be done where only sums are known."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fedbudget.errors import UserError
from fedbudget.launch.privacy import is_private
from fedbudget.protocol.combine import COMBINE_RULES
from fedbudget.protocol.method import Method
from fedbudget.secure.graph import FEWEST, needed, sharers
from fedbudget.settings import Settings

if TYPE_CHECKING:
    from fedbudget.engines.grpc.masked_rounds import MaskingTerms

THRESHOLD = 2 / 3


def masking_terms(settings: Settings, client_ca: Path | None, *, own_data: bool) -> "MaskingTerms | None":
    """How sums are masked; None where they are not. What does not go together with it is refused.

    Args:
      client_ca: who signs nodes' certificates.
      own_data: whether the aggregator holds samples itself.
    """
    if not settings.secure_aggregation:
        if settings.secure_threshold is not None:
            raise UserError("`secure_threshold` goes with `secure_aggregation`")
        return None
    if find_spec("cryptography") is None:
        raise UserError("`secure_aggregation` needs a library; install it with: pip install 'fedbudget[network]'")
    if own_data:
        raise UserError("an aggregator that holds data itself cannot have `secure_aggregation`: start a node beside it")
    if settings.compress not in (None, "none"):
        raise UserError(f"`compress` {settings.compress} does not go with `secure_aggregation`: masks have all bits")
    if is_private(settings) and settings.privacy_noise == "seeded":
        raise UserError("`privacy_noise` seeded does not go with `secure_aggregation`, where nodes draw it in secret")
    if settings.privacy_unit == "sample":
        raise UserError(
            "`privacy_unit` sample does not go with `secure_aggregation` yet: nodes have added noise to all they send"
        )
    if settings.nodes is not None and settings.nodes < FEWEST:
        raise UserError(f"`secure_aggregation` needs {FEWEST} nodes or more: a sum of fewer tells too much of each")
    from fedbudget.engines.grpc.masked_rounds import MaskingTerms
    from fedbudget.secure.identity_files import trust_of

    return MaskingTerms(settings.secure_threshold or THRESHOLD, trust_of(client_ca, None))


def require_no_masks(settings: Settings) -> None:
    """Refuses what would be left undone in silence, where messages are not carried by gRPC."""
    if settings.secure_aggregation:
        raise UserError("`secure_aggregation` is for nodes over gRPC: use fedbudget serve and join, or local")


def with_sums_only(method: Method, threshold: float | None) -> Method:
    """The method where nothing of nodes but sums is known; refuses one that cannot do with these.

    Args:
      threshold: the share of nodes that must stay, where it is not the usual.
    """
    if method.combine.needs_reports:
        own = type(method.combine)
        name = next((f"`combine` {name}" for name, rule in COMBINE_RULES.items() if rule is own), own.__name__)
        raise UserError(
            f"{name} must see every node's report, which `secure_aggregation` hides: `combine` must be mean"
        )
    method = replace(method, sums_only=True)
    if (rule := method.private) is not None:
        excess = rule.nodes / sharers(needed(rule.nodes, threshold or THRESHOLD))
        method = replace(method, private=replace(rule, excess=max(1.0, excess)))
    if method.needs_reports:
        raise UserError(
            "this method estimates δ from every node's report, which `secure_aggregation` hides; use `method` "
            "accelerated or frugal with drift correction, where nodes tell it a round later, or a fixed `tau`"
        )
    return method
