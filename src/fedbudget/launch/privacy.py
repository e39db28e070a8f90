"""What makes a run private: of which δ, with which noise, and what cannot be had with it.

Masked sums from settings: what they are agreed on with, and what cannot be done where only sums are known.

What a private run has cost its nodes, by an accountant that others keep: dp-accounting, imported nowhere else.
"""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedbudget.budget.budget import Budget
from fedbudget.budget.control import FixedTau
from fedbudget.engines.noise import PaidNoise, SecretNodeNoise, SeededNodeNoise, SeededNoise
from fedbudget.errors import UserError
from fedbudget.launch.prepared import Overrides
from fedbudget.models.base import Model
from fedbudget.models.per_sample import require_per_sample
from fedbudget.protocol.combine import COMBINE_RULES
from fedbudget.protocol.method import Method, PrivateRule
from fedbudget.protocol.sample_privacy import NodeNoise
from fedbudget.resources.privacy import default_delta
from fedbudget.runs.record import RoundRecord
from fedbudget.secure.graph import FEWEST, needed, sharers
from fedbudget.settings.settings import Settings

if TYPE_CHECKING:
    from fedbudget.settings.settings import Settings


def is_private(settings: "Settings") -> bool:
    return settings.limits().by_noise is not None


def run_budget(settings: "Settings") -> Budget:
    """The settings' budget, with δ where it limits privacy."""
    budget = settings.limits()
    if budget.by_noise is None:
        if any(
            each is not None
            for each in (
                settings.privacy_delta,
                settings.privacy_noise,
                settings.privacy_unit,
            )
        ):
            raise UserError(
                "`privacy_delta`, `privacy_noise` and `privacy_unit` go with a budget of privacy, as privacy=4"
            )
        return budget
    return replace(
        budget, delta=settings.privacy_delta or default_delta(settings.nodes or 1)
    )


def with_privacy(
    settings: "Settings", *, simulated: bool = True, samples: int = 0
) -> "Settings":
    """The settings of a private run with δ, and where its noise is from, so that a run that goes on has the same.

    Args:
      simulated: whether nodes are; noise that hides real ones is secret, unless it is asked for otherwise.
      samples: of all nodes, where that is known: if it is these that are protected, δ is below one over their number.
    """
    if not is_private(settings):
        return settings
    if (
        settings.privacy_unit == "sample"
        and settings.privacy_noise == "seeded"
        and not simulated
    ):
        raise UserError(
            "`privacy_unit` sample has noise of the nodes' own, which is secret: `privacy_noise` is none"
        )
    many = (
        math.ceil(math.sqrt(samples))
        if settings.privacy_unit == "sample"
        else settings.nodes or 1
    )
    delta = settings.privacy_delta or default_delta(many)
    noise = settings.privacy_noise or ("seeded" if simulated else "secret")
    return replace(settings, privacy_delta=delta, privacy_noise=noise)


def private_rule(settings: "Settings", overrides: Overrides, nodes: int) -> PrivateRule:
    """How rounds are private; refuses what would tell more of nodes than is paid for, or has no meaning then.

    Args:
      nodes: how many there are.
    """
    if find_spec("dp_accounting") is None:
        raise UserError(
            "a budget of privacy needs an accountant; install it with: pip install 'fedbudget[privacy]'"
        )
    if settings.method != "accelerated":
        raise UserError(
            f"a budget of privacy has a method of its own, and goes with no other `method`, as {settings.method}"
        )
    for name in (
        "drift_correction",
        "combine",
        "compress",
        "workload",
        "patience",
        "delta",
        "phi",
    ):
        if (value := getattr(settings, name)) not in (None, False, "none", "mean", "equal"):
            asked = f"`{name}`" if value is True else f"`{name}` {value}"
            raise UserError(f"{asked} needs more of nodes than a private run is told")
    usual = {each.name: each.default for each in fields(settings)}
    for name in ("gamma", "tau_max"):
        if getattr(settings, name) != usual[name]:
            raise UserError(
                f"`{name}` is not of use to a private run, which plans τ by itself: fix `tau`, or leave it out"
            )
    if settings.rounds == 1:
        raise UserError(
            "`rounds` 1 trains nothing: in the first of a private run nodes only tell how long updates are"
        )
    if (
        overrides.controller is not None
        or overrides.combine is not None
        or overrides.step_size is not None
    ):
        raise UserError(
            "a private run chooses τ, noise and step sizes together: give no controller, combine or step size"
        )
    if any(target.metric == "loss" for target in settings.targets()):
        raise UserError(
            "`until` loss cannot be judged in a private run, in which no loss is told"
        )
    per_sample = settings.privacy_unit == "sample"
    if per_sample and settings.proximal is not None:
        raise UserError("`proximal` does not go with `privacy_unit` sample")
    seeded = settings.privacy_noise == "seeded"
    tau = None if settings.tau == "adaptive" else FixedTau(settings.tau).tau
    return PrivateRule(
        nodes,
        SeededNoise(settings.seed) if seeded else PaidNoise(),
        tau,
        per_sample=per_sample,
    )


def node_noise(settings: "Settings") -> NodeNoise | None:
    """Of simulated nodes, where it is single samples that are protected."""
    if not is_private(settings) or settings.privacy_unit != "sample":
        return None
    return (
        SeededNodeNoise(settings.seed)
        if settings.privacy_noise == "seeded"
        else SecretNodeNoise()
    )


def require_own_samples(
    settings: "Settings", model: Model, rows: Sequence[NDArray[Any]]
) -> None:
    """Refuses what single samples cannot be protected in.

    Args:
      rows: of each node.
    """
    if settings.privacy_unit != "sample":
        return
    require_per_sample(model)
    every = np.concatenate(rows)
    if len(np.unique(every)) < len(every):
        raise UserError(
            "`privacy_unit` sample is of samples that one node has, and here some are at several, each of which would "
            "tell of them: choose another `partition`"
        )


if TYPE_CHECKING:
    from fedbudget.engines.grpc.masked_rounds import MaskingTerms

THRESHOLD = 2 / 3


def masking_terms(
    settings: Settings, client_ca: Path | None, *, own_data: bool
) -> "MaskingTerms | None":
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
        raise UserError(
            "`secure_aggregation` needs a library; install it with: pip install 'fedbudget[network]'"
        )
    if own_data:
        raise UserError(
            "an aggregator that holds data itself cannot have `secure_aggregation`: start a node beside it"
        )
    if settings.compress not in (None, "none"):
        raise UserError(
            f"`compress` {settings.compress} does not go with `secure_aggregation`: masks have all bits"
        )
    if is_private(settings) and settings.privacy_noise == "seeded":
        raise UserError(
            "`privacy_noise` seeded does not go with `secure_aggregation`, where nodes draw it in secret"
        )
    if settings.privacy_unit == "sample":
        raise UserError(
            "`privacy_unit` sample does not go with `secure_aggregation` yet: nodes have added noise to all they send"
        )
    if settings.nodes is not None and settings.nodes < FEWEST:
        raise UserError(
            f"`secure_aggregation` needs {FEWEST} nodes or more: a sum of fewer tells too much of each"
        )
    from fedbudget.engines.grpc.masked_rounds import MaskingTerms
    from fedbudget.secure.identity import trust_of

    return MaskingTerms(settings.secure_threshold or THRESHOLD, trust_of(client_ca, None))


def require_no_masks(settings: Settings) -> None:
    """Refuses what would be left undone in silence, where messages are not carried by gRPC."""
    if settings.secure_aggregation:
        raise UserError(
            "`secure_aggregation` is for nodes over gRPC: use fedbudget serve and join, or local"
        )


def with_sums_only(method: Method, threshold: float | None) -> Method:
    """The method where nothing of nodes but sums is known; refuses one that cannot do with these.

    Args:
      threshold: the share of nodes that must stay, where it is not the usual.
    """
    if method.combine.needs_reports:
        own = type(method.combine)
        name = next(
            (f"`combine` {name}" for name, rule in COMBINE_RULES.items() if rule is own),
            own.__name__,
        )
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


def noise_multipliers(records: Sequence[RoundRecord], rho: float = 0.0) -> list[float]:
    """Of all that a run has made known, in the order of time: noise, in multiples of what one node can change.

    Args:
      rho: what was paid in all; where that is more than rounds have cost, for rounds that are not in the records, it is
        one more.
    """
    known = [record.private for record in records if record.private is not None]
    found = [
        each[name] for each in known for name in ("noise", "count_noise") if name in each
    ]
    more = rho - sum(1 / (2 * sigma**2) for sigma in found)
    return [*found, math.sqrt(1 / (2 * more))] if more > 1e-9 * rho else found


def accounted_epsilon(multipliers: Sequence[float], delta: float) -> float:
    """ε at this δ of Gaussian mechanisms one after another.

    Together they are one, so that the library's exact figure is that of one.

    Args:
      multipliers: noise of each, in multiples of its sensitivity.
    """
    from dp_accounting import get_epsilon_gaussian

    inverse = math.sqrt(sum(1 / sigma**2 for sigma in multipliers))
    return 0.0 if inverse == 0 else float(get_epsilon_gaussian(1 / inverse, delta))
