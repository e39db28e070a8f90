"""What makes a run private: of which δ, with which noise, and what cannot be had with it."""

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fedbudget.budget import Budget
from fedbudget.control import FixedTau
from fedbudget.errors import UserError
from fedbudget.launch.noise import PaidNoise, SeededNoise
from fedbudget.launch.prepared import Overrides
from fedbudget.protocol.method import PrivateRule
from fedbudget.resources.privacy import default_delta

if TYPE_CHECKING:
    from fedbudget.settings import Settings


def is_private(settings: "Settings") -> bool:
    return settings.limits().by_noise is not None


def run_budget(settings: "Settings") -> Budget:
    """The settings' budget, with δ where it limits privacy."""
    budget = settings.limits()
    if budget.by_noise is None:
        if settings.privacy_delta is not None or settings.privacy_noise is not None:
            raise UserError("`privacy_delta` and `privacy_noise` go with a budget of privacy, as privacy=4")
        return budget
    return replace(budget, delta=settings.privacy_delta or default_delta(settings.nodes or 1))


def with_privacy(settings: "Settings", *, simulated: bool = True) -> "Settings":
    """The settings of a private run with δ, and where its noise is from, so that a run that goes on has the same.

    Args:
      simulated: whether nodes are; noise that hides real ones is secret, unless it is asked for otherwise.
    """
    if not is_private(settings):
        return settings
    delta = settings.privacy_delta or default_delta(settings.nodes or 1)
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
        if getattr(settings, name) not in (None, False, "none", "mean", "equal"):
            raise UserError(f"`{name}` {getattr(settings, name)} needs more of nodes than a private run is told")
    if overrides.controller is not None or overrides.combine is not None or overrides.step_size is not None:
        raise UserError(
            "a private run chooses τ, noise and step sizes together: give no controller, combine or step size"
        )
    if any(target.metric == "loss" for target in settings.targets()):
        raise UserError("`until` loss cannot be judged in a private run, in which no loss is told")
    seeded = settings.privacy_noise == "seeded"
    tau = None if settings.tau == "adaptive" else FixedTau(settings.tau).tau
    return PrivateRule(nodes, SeededNoise(settings.seed) if seeded else PaidNoise(), tau)
