"""Combinations of settings that are refused, although each setting alone is valid."""

from typing import Any

from fedbudget.errors import UserError

FEDERATED = ("accelerated", "frugal", "paper")
"""Methods that have nodes and rounds."""


def require_compatible(settings: Any) -> None:
    """Raise UserError for an impossible combination.

    Args:
      settings: `Settings`, whose module imports this one.
    """
    if settings.classes and len(set(settings.classes)) < len(settings.classes):
        raise UserError(f"`classes` contains a duplicate: {', '.join(settings.classes)}")
    if settings.partition is not None:
        from fedbudget.data.partition import Partition

        Partition.parse(settings.partition)
    if settings.method not in FEDERATED:
        alone = f"{settings.method} descent has no"
        sent = settings.participation != 1 or settings.compress not in (None, "none")
        if settings.drift_correction or settings.delta or sent:
            raise UserError(
                f"{alone} `drift_correction`, `delta`, `participation` or `compress`"
            )
        if (
            settings.update
            or settings.step_fall
            or settings.proximal
            or settings.combine
            or settings.attack
        ):
            raise UserError(
                f"{alone} `update`, `combine`, `attack`, `step_fall` or `proximal`"
            )
        if settings.step_size == "auto":
            raise UserError(
                f"{settings.method} descent needs a `step_size` that is a number"
            )
    if settings.speeds is not None:
        from fedbudget.resources.speeds import require_possible

        require_possible(settings.speeds, settings.method, settings.costs)
