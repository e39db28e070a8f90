"""Privacy of a run, from settings: δ, noise and secure aggregation.

Noise that protects real nodes is secret unless you request otherwise. Noise of simulated
nodes follows from the seed, so that runs can be repeated.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
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
from fedbudget.protocol.features.feature import Feature, NodeNoise
from fedbudget.protocol.features.node_privacy import NodePrivacy
from fedbudget.protocol.features.sample_privacy import SamplePrivacy
from fedbudget.protocol.method import Method, PrivateRule
from fedbudget.resources.privacy import default_delta
from fedbudget.secure.graph import needed, sharers
from fedbudget.settings.compatibility import automatic_step
from fedbudget.settings.settings import Settings

if TYPE_CHECKING:
    from fedbudget.engines.grpc.masked_sums import MaskedSums

THRESHOLD = 2 / 3
"""Default fraction of a group that must stay for its masked sum to be opened."""


def is_private(settings: Settings) -> bool:
    return settings.limits().by_noise is not None


def run_budget(settings: Settings) -> Budget:
    """Return the budget of the settings, with δ if it limits privacy."""
    budget = settings.limits()
    if budget.by_noise is not None:
        delta = settings.privacy_delta or default_delta(settings.nodes or 1)
        return replace(budget, delta=delta)
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
    units = math.ceil(math.sqrt(samples)) if per_sample else settings.nodes or 1
    delta = settings.privacy_delta or default_delta(units)
    noise = settings.privacy_noise or ("seeded" if simulated else "secret")
    return replace(settings, privacy_delta=delta, privacy_noise=noise)


def private_rule(settings: Settings, overrides: Overrides, nodes: int) -> PrivateRule:
    """Return the rule of private rounds; refuse objects that it replaces.

    Args:
      nodes: number of nodes.
    """
    chosen = (overrides.controller, overrides.combine, overrides.step_size)
    if any(each is not None for each in chosen) or overrides.features:
        raise UserError(
            "a private run chooses τ, noise and step size together: omit `controller`, "
            "`combine`, `step_size` and `features` objects"
        )
    seeded = settings.privacy_noise == "seeded"
    feature: Feature = NodePrivacy(own_steps=automatic_step(settings))
    if settings.privacy_unit == "sample":
        feature = SamplePrivacy()
    return PrivateRule(
        nodes,
        SeededNoise(settings.seed) if seeded else SecretNoise(),
        feature,
        None if settings.tau == "adaptive" else FixedTau(settings.tau).tau,
    )


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
    settings: Settings, run: str, client_ca: Path | None
) -> "MaskedSums | None":
    """Return the aggregator's part of secure aggregation, if the settings request it.

    Args:
      run: name of the run.
      client_ca: certificate authority that signs the certificates of nodes.
    """
    if not settings.secure_aggregation:
        return None
    if find_spec("cryptography") is None:
        raise UserError(
            "`secure_aggregation` needs cryptography; install it with: "
            "pip install 'fedbudget[network]'"
        )
    from fedbudget.engines.grpc.masked_sums import MaskedSums
    from fedbudget.secure.identity import trust_of

    threshold = settings.secure_threshold or THRESHOLD
    return MaskedSums(run, threshold, trust_of(client_ca, None))


def with_sums_only(method: Method, threshold: float | None) -> Method:
    """Return the method with sums only; refuse objects that need the report of each node.

    Args:
      threshold: fraction of nodes that must stay; `THRESHOLD` if None.
    """
    if method.combine.needs_reports:
        raise UserError(
            f"{type(method.combine).__name__} needs the report of every node, which "
            "`secure_aggregation` hides: `combine` must be mean"
        )
    method = replace(method, sums_only=True)
    if (rule := method.private) is not None:
        excess = rule.nodes / sharers(needed(rule.nodes, threshold or THRESHOLD))
        method = replace(method, private=replace(rule, excess=max(1.0, excess)))
    if method.needs_reports:
        raise UserError(
            "these objects need δ, which is estimated from the report of every node, and "
            "`secure_aggregation` hides it: omit `controller`, `update` and `step_size`"
        )
    return method
