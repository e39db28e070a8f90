"""Privacy of a run, from settings: δ, noise and secure aggregation.

Noise is secret unless you request otherwise. Only on a published dataset, where it protects
nobody, it follows from the seed by default, so that runs can be repeated.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedbudget.budget.budget import Budget
from fedbudget.budget.control import FixedTau
from fedbudget.data.dataset import Dataset
from fedbudget.engines.engine import Pay
from fedbudget.engines.noise import (
    PaymentLog,
    SecretNodeNoise,
    SecretNoise,
    SeededNodeNoise,
    SeededNoise,
    SimulatedSums,
)
from fedbudget.engines.privacy_ledger import PrivacyLedger, charge, fingerprint
from fedbudget.errors import UserError
from fedbudget.launch.prepared import Overrides
from fedbudget.models.base import Model
from fedbudget.models.per_sample import require_per_sample
from fedbudget.protocol.features.feature import Feature, NodeNoise
from fedbudget.protocol.features.node_privacy import NodePrivacy
from fedbudget.protocol.features.sample_privacy import SamplePrivacy, SampleSums
from fedbudget.protocol.method import Method, PrivateRule
from fedbudget.resources.privacy import PrivacyGuarantee, default_delta
from fedbudget.secure.graph import THRESHOLD, needed, sharers
from fedbudget.settings.compatibility import automatic_step
from fedbudget.settings.settings import Settings

if TYPE_CHECKING:
    from fedbudget.engines.grpc.masked_sums import MaskedSums


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
    settings: Settings, *, published: bool = False, samples: int = 0
) -> Settings:
    """Return the settings with δ and the kind of noise, so that a resumed run keeps both.

    Args:
      published: whether nodes are simulated with a published dataset: by default, the
        noise then follows from the seed.
      samples: number of samples of all nodes, if known; with `privacy_unit` sample,
        δ is below 1/samples.
    """
    if not is_private(settings):
        return settings
    per_sample = settings.privacy_unit == "sample"
    units = math.ceil(math.sqrt(samples)) if per_sample else settings.nodes or 1
    delta = settings.privacy_delta or default_delta(units)
    ledger = settings.privacy_ledger
    noise = settings.privacy_noise
    if noise is None:
        noise = "seeded" if published and ledger is None else "secret"
    if ledger is not None:
        ledger = str(Path(ledger).expanduser().resolve())
    return replace(
        settings, privacy_delta=delta, privacy_noise=noise, privacy_ledger=ledger
    )


def open_ledger(settings: Settings, dataset: Dataset) -> PrivacyLedger | None:
    """Return the ledger of the data, if the settings name one.

    Args:
      dataset: all samples; without samples if they are on other machines.
    """
    if settings.privacy_ledger is None:
        return None
    parts = [part for part in (dataset.train, dataset.test) if part is not None]
    here = any(map(len, parts))
    data = fingerprint([(dataset, part) for part in parts]) if here else ""
    path = Path(settings.privacy_ledger)
    if path.is_dir():
        if not here:
            raise UserError(
                f"`privacy_ledger` {path} is a folder, whose files are named after the "
                "data; here the data stay on the nodes: name a file"
            )
        path /= f"{data}.json"
    return PrivacyLedger(path, settings.privacy_unit == "sample", data)


def ledger_name(folder: Path | None) -> str:
    """Return the name of a run in a ledger: its folder, or a random one without."""
    return secrets.token_hex(8) if folder is None else str(folder.resolve())


def with_ledger(ledger: PrivacyLedger | None, pay: Pay, run: str) -> Pay:
    """Return a payment that is charged to a ledger too, if there is one.

    Args:
      run: name of the run in the ledger.
    """
    if ledger is None:
        return pay

    def both(round_: int, rho: float) -> None:
        charge([ledger], run, round_, rho)
        pay(round_, rho)

    return both


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
    tau = None if settings.tau == "adaptive" else FixedTau(settings.tau).tau
    if settings.privacy_unit == "sample":
        feature = SamplePrivacy()
        if settings.secure_aggregation:
            feature = SampleSums()
            tau = 1
    noise = SeededNoise(settings.seed) if seeded else SecretNoise()
    return PrivateRule(nodes, noise, feature, tau)


def guarantee(
    settings: Settings,
    epsilon: float,
    delta: float,
    ledger: PrivacyLedger | None,
    exact_tests: int | None,
) -> PrivacyGuarantee:
    """Return the guarantee of a private run that has spent ε at δ.

    Args:
      ledger: of all runs on the same data.
      exact_tests: number of test samples with exact metrics.
    """
    unit = settings.privacy_unit or "node"
    at_nodes = unit == "sample" or settings.secure_aggregation
    added_by = "nodes" if at_nodes else "aggregator"
    noise = settings.privacy_noise or "secret"
    all_runs = None if ledger is None else ledger.spent(delta)
    return PrivacyGuarantee(epsilon, delta, unit, noise, added_by, all_runs, exact_tests)


def node_noise(settings: Settings) -> NodeNoise | None:
    """Return the noise of simulated nodes; None unless single samples are protected."""
    if not is_private(settings) or settings.privacy_unit != "sample":
        return None
    if settings.privacy_noise == "seeded":
        return SeededNodeNoise(settings.seed)
    return SecretNodeNoise()


def simulated_sums(settings: Settings, method: Method) -> SimulatedSums | None:
    """Return what opens the sums of simulated nodes; None without secure aggregation."""
    if not settings.secure_aggregation or method.private is None:
        return None
    fewest = needed(method.private.nodes, settings.secure_threshold or THRESHOLD)
    seeded = settings.privacy_noise == "seeded"
    return SimulatedSums(sharers(fewest), settings.seed if seeded else None)


def log_payments(secure: SimulatedSums | None, folder: Path) -> None:
    """Record the payments of simulated nodes in the folder of a run, if noise is secret."""
    if secure is not None and secure.seed is None:
        secure.pay = PaymentLog(folder).record


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
