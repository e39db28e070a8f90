"""What makes a run private: of which δ, with which noise, and what cannot be had with it."""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedbudget.budget import Budget
from fedbudget.control import FixedTau
from fedbudget.engines.node_noise import SecretNodeNoise, SeededNodeNoise
from fedbudget.errors import UserError
from fedbudget.launch.noise import PaidNoise, SeededNoise
from fedbudget.launch.prepared import Overrides
from fedbudget.models.base import Model
from fedbudget.models.per_sample import require_per_sample
from fedbudget.protocol.method import PrivateRule
from fedbudget.protocol.sample_updates import NodeNoise
from fedbudget.resources.privacy import default_delta

if TYPE_CHECKING:
    from fedbudget.settings import Settings


def is_private(settings: "Settings") -> bool:
    return settings.limits().by_noise is not None


def run_budget(settings: "Settings") -> Budget:
    """The settings' budget, with δ where it limits privacy."""
    budget = settings.limits()
    if budget.by_noise is None:
        if any(each is not None for each in (settings.privacy_delta, settings.privacy_noise, settings.privacy_unit)):
            raise UserError(
                "`privacy_delta`, `privacy_noise` and `privacy_unit` go with a budget of privacy, as privacy=4"
            )
        return budget
    return replace(budget, delta=settings.privacy_delta or default_delta(settings.nodes or 1))


def with_privacy(settings: "Settings", *, simulated: bool = True, samples: int = 0) -> "Settings":
    """The settings of a private run with δ, and where its noise is from, so that a run that goes on has the same.

    Args:
      simulated: whether nodes are; noise that hides real ones is secret, unless it is asked for otherwise.
      samples: of all nodes, where that is known: if it is these that are protected, δ is below one over their number.
    """
    if not is_private(settings):
        return settings
    if settings.privacy_unit == "sample" and settings.privacy_noise == "seeded" and not simulated:
        raise UserError("`privacy_unit` sample has noise of the nodes' own, which is secret: `privacy_noise` is none")
    many = math.ceil(math.sqrt(samples)) if settings.privacy_unit == "sample" else settings.nodes or 1
    delta = settings.privacy_delta or default_delta(many)
    noise = settings.privacy_noise or ("seeded" if simulated else "secret")
    return replace(settings, privacy_delta=delta, privacy_noise=noise)


def private_rule(settings: "Settings", overrides: Overrides, nodes: int) -> PrivateRule:
    """How rounds are private; refuses what would tell more of nodes than is paid for, or has no meaning then.

    Args:
      nodes: how many there are.
    """
    if find_spec("dp_accounting") is None:
        raise UserError("a budget of privacy needs an accountant; install it with: pip install 'fedbudget[privacy]'")
    if settings.method != "accelerated":
        raise UserError(
            f"a budget of privacy has a method of its own, and goes with no other `method`, as {settings.method}"
        )
    for name in ("drift_correction", "combine", "compress", "workload", "patience", "delta", "phi"):
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
        raise UserError("`rounds` 1 trains nothing: in the first of a private run nodes only tell how long updates are")
    if overrides.controller is not None or overrides.combine is not None or overrides.step_size is not None:
        raise UserError(
            "a private run chooses τ, noise and step sizes together: give no controller, combine or step size"
        )
    if any(target.metric == "loss" for target in settings.targets()):
        raise UserError("`until` loss cannot be judged in a private run, in which no loss is told")
    per_sample = settings.privacy_unit == "sample"
    if per_sample and settings.proximal is not None:
        raise UserError("`proximal` does not go with `privacy_unit` sample")
    seeded = settings.privacy_noise == "seeded"
    tau = None if settings.tau == "adaptive" else FixedTau(settings.tau).tau
    return PrivateRule(nodes, SeededNoise(settings.seed) if seeded else PaidNoise(), tau, per_sample=per_sample)


def node_noise(settings: "Settings") -> NodeNoise | None:
    """Of simulated nodes, where it is single samples that are protected."""
    if not is_private(settings) or settings.privacy_unit != "sample":
        return None
    return SeededNodeNoise(settings.seed) if settings.privacy_noise == "seeded" else SecretNodeNoise()


def require_own_samples(settings: "Settings", model: Model, rows: Sequence[NDArray[Any]]) -> None:
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
