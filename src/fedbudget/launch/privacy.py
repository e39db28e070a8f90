"""Privacy of a run, from settings: δ, noise, secure aggregation, and what they exclude.

Noise that protects real nodes is secret unless you request otherwise. Noise of simulated
nodes follows from the seed, so that runs can be repeated.
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
from fedbudget.engines.noise import (
    SecretNodeNoise,
    SecretNoise,
    SeededNodeNoise,
    SeededNoise,
)
from fedbudget.errors import UserError
from fedbudget.launch.prepared import Overrides
from fedbudget.models.base import Model
from fedbudget.models.per_sample import require_per_sample
from fedbudget.protocol.combine import COMBINE_RULES
from fedbudget.protocol.method import Method, PrivateRule
from fedbudget.protocol.sample_privacy import NodeNoise
from fedbudget.resources.privacy import default_delta
from fedbudget.secure.graph import FEWEST, needed, sharers
from fedbudget.settings.settings import Settings

if TYPE_CHECKING:
    from fedbudget.engines.grpc.masked_sums import MaskedSums

THRESHOLD = 2 / 3
"""Default fraction of a group that must stay for its masked sum to be opened."""

_NEED_REPORTS = (
    "drift_correction",
    "combine",
    "compress",
    "workload",
    "patience",
    "delta",
    "phi",
)
"""Settings that use data which nodes of a private run do not send."""


def is_private(settings: Settings) -> bool:
    return settings.limits().by_noise is not None


def run_budget(settings: Settings) -> Budget:
    """Return the budget of the settings, with δ if it limits privacy."""
    budget = settings.limits()
    if budget.by_noise is not None:
        delta = settings.privacy_delta or default_delta(settings.nodes or 1)
        return replace(budget, delta=delta)
    if settings.privacy_delta or settings.privacy_noise or settings.privacy_unit:
        raise UserError(
            "`privacy_delta`, `privacy_noise` and `privacy_unit` need a budget of privacy, "
            "such as privacy=4"
        )
    return budget


def with_privacy(
    settings: Settings, *, simulated: bool = True, samples: int = 0
) -> Settings:
    """Return the settings with δ and the kind of noise, so that a resumed run keeps both.

    Args:
      simulated: whether nodes are simulated; the noise of real nodes is secret by default.
      samples: number of samples of all nodes, if known; with `privacy_unit` sample,
        δ is below 1/samples.
    """
    if not is_private(settings):
        return settings
    per_sample = settings.privacy_unit == "sample"
    if per_sample and settings.privacy_noise == "seeded" and not simulated:
        raise UserError(
            "with `privacy_unit` sample, nodes add secret noise of their own: "
            "`privacy_noise` seeded is not possible"
        )
    units = math.ceil(math.sqrt(samples)) if per_sample else settings.nodes or 1
    delta = settings.privacy_delta or default_delta(units)
    noise = settings.privacy_noise or ("seeded" if simulated else "secret")
    return replace(settings, privacy_delta=delta, privacy_noise=noise)


def private_rule(settings: Settings, overrides: Overrides, nodes: int) -> PrivateRule:
    """Return the rule of private rounds; refuse settings that leak more or have no effect.

    Args:
      nodes: number of nodes.
    """
    per_sample = settings.privacy_unit == "sample"
    _require_private_settings(settings, overrides)
    seeded = settings.privacy_noise == "seeded"
    return PrivateRule(
        nodes,
        SeededNoise(settings.seed) if seeded else SecretNoise(),
        None if settings.tau == "adaptive" else FixedTau(settings.tau).tau,
        per_sample=per_sample,
    )


def _require_private_settings(settings: Settings, overrides: Overrides) -> None:
    if settings.method != "accelerated":
        raise UserError(
            "a budget of privacy has its own method: `method` must be accelerated, "
            f"not {settings.method}"
        )
    for name in _NEED_REPORTS:
        value = getattr(settings, name)
        if value not in (None, False, "none", "mean", "equal"):
            option = f"`{name}`" if value is True else f"`{name}` {value}"
            raise UserError(f"{option} needs data that nodes of a private run do not send")
    defaults = {each.name: each.default for each in fields(settings)}
    for name in ("gamma", "tau_max"):
        if getattr(settings, name) != defaults[name]:
            raise UserError(
                f"`{name}` has no effect in a private run, which plans τ itself: "
                "fix `tau`, or omit it"
            )
    if settings.rounds == 1:
        raise UserError(
            "`rounds` 1 trains nothing: in the first private round, nodes only report the "
            "norms of their updates"
        )
    chosen = (overrides.controller, overrides.combine, overrides.step_size)
    if any(each is not None for each in chosen):
        raise UserError(
            "a private run chooses τ, noise and step size together: omit `controller`, "
            "`combine` and `step_size` objects"
        )
    if any(target.metric == "loss" for target in settings.targets()):
        raise UserError(
            "`until` loss does not work in a private run, in which nodes report no loss"
        )
    if settings.privacy_unit == "sample" and settings.proximal is not None:
        raise UserError("`proximal` does not work with `privacy_unit` sample")


def node_noise(settings: Settings) -> NodeNoise | None:
    """Return the noise of simulated nodes; None unless single samples are protected."""
    if not is_private(settings) or settings.privacy_unit != "sample":
        return None
    if settings.privacy_noise == "seeded":
        return SeededNodeNoise(settings.seed)
    return SecretNodeNoise()


def require_own_samples(
    settings: Settings, model: Model, rows: Sequence[NDArray[Any]]
) -> None:
    """Refuse models and partitions in which single samples cannot be protected.

    Args:
      rows: rows of each node.
    """
    if settings.privacy_unit != "sample":
        return
    require_per_sample(model)
    every = np.concatenate(rows)
    if len(np.unique(every)) < len(every):
        raise UserError(
            "`privacy_unit` sample needs each sample at one node only, but several nodes "
            "share some: choose another `partition`"
        )


def masked_sums(
    settings: Settings, run: str, client_ca: Path | None, *, own_data: bool
) -> "MaskedSums | None":
    """Return the aggregator's part of secure aggregation; refuse settings it excludes.

    Args:
      run: name of the run.
      client_ca: certificate authority that signs the certificates of nodes.
      own_data: whether the aggregator itself holds samples.
    """
    if not settings.secure_aggregation:
        if settings.secure_threshold is not None:
            raise UserError("`secure_threshold` needs `secure_aggregation`")
        return None
    if find_spec("cryptography") is None:
        raise UserError(
            "`secure_aggregation` needs cryptography; install it with: "
            "pip install 'fedbudget[network]'"
        )
    if own_data:
        raise UserError(
            "an aggregator that holds data cannot use `secure_aggregation`: start a "
            "separate node for its data"
        )
    if settings.compress not in (None, "none"):
        raise UserError(
            f"`compress` {settings.compress} does not work with `secure_aggregation`: "
            "masks use all bits"
        )
    if is_private(settings) and settings.privacy_noise == "seeded":
        raise UserError(
            "`privacy_noise` seeded does not work with `secure_aggregation`, in which "
            "nodes draw secret noise"
        )
    if settings.privacy_unit == "sample":
        raise UserError(
            "`privacy_unit` sample does not work with `secure_aggregation`: nodes already "
            "add noise to everything they send"
        )
    if settings.nodes is not None and settings.nodes < FEWEST:
        raise UserError(
            f"`secure_aggregation` needs at least {FEWEST} nodes: a sum over fewer reveals "
            "too much about each"
        )
    from fedbudget.engines.grpc.masked_sums import MaskedSums
    from fedbudget.secure.identity import trust_of

    threshold = settings.secure_threshold or THRESHOLD
    return MaskedSums(run, threshold, trust_of(client_ca, None))


def require_no_masks(settings: Settings) -> None:
    """Refuse secure aggregation on engines other than gRPC, which would ignore it."""
    if settings.secure_aggregation:
        raise UserError(
            "`secure_aggregation` works only over gRPC: use fedbudget serve and join, "
            "or local"
        )


def with_sums_only(method: Method, threshold: float | None) -> Method:
    """Return the method with sums only; refuse one that needs the report of each node.

    Args:
      threshold: fraction of nodes that must stay; `THRESHOLD` if None.
    """
    if method.combine.needs_reports:
        own = type(method.combine)
        names = [f"`combine` {name}" for name, rule in COMBINE_RULES.items() if rule is own]
        raise UserError(
            f"{(names or [own.__name__])[0]} needs the report of every node, which "
            "`secure_aggregation` hides: `combine` must be mean"
        )
    method = replace(method, sums_only=True)
    if (rule := method.private) is not None:
        excess = rule.nodes / sharers(needed(rule.nodes, threshold or THRESHOLD))
        method = replace(method, private=replace(rule, excess=max(1.0, excess)))
    if method.needs_reports:
        raise UserError(
            "this method estimates δ from the report of every node, which "
            "`secure_aggregation` hides; use `method` accelerated, frugal with drift "
            "correction, or a fixed `tau`"
        )
    return method
