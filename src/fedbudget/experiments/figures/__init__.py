"""All figures by name: those of the paper's evaluation, and additional ones.

figures.toml lists them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from fedbudget.experiments.figures.figure import Figure
from fedbudget.experiments.figures.natural import Natural
from fedbudget.experiments.figures.paper import LossAgainstTau, Sensitivity, Varying
from fedbudget.experiments.figures.single_runs import (
    Instantaneous,
    SingleSynchrony,
    Synchrony,
)
from fedbudget.settings.option import read_toml

_KINDS: Mapping[str, type[Figure]] = {
    kind.__name__: kind
    for kind in (
        LossAgainstTau,
        Varying,
        Instantaneous,
        Sensitivity,
        Synchrony,
        SingleSynchrony,
        Natural,
    )
}


def _figures(name: str, fields: dict[str, Any]) -> Iterator[Figure]:
    """Yield the figures of an entry of figures.toml."""
    kind = _KINDS[fields.pop("kind")]
    for batches in ("dgd", "sgd") if "{}" in name else ("",):
        own = {
            "name": name.format(batches),
            "title": fields["title"].format(batches.upper()),
            "tasks": [task.format(batches) for task in fields["tasks"]],
        }
        yield msgspec.convert({**fields, **own}, kind)


FIGURES: Mapping[str, Figure] = {
    figure.name: figure
    for name, fields in read_toml(Path(__file__).with_name("figures.toml")).items()
    for figure in _figures(name, fields)
}
