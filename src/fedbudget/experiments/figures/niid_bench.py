"""The settings of NIID-Bench (Li et al., *Federated Learning on Non-IID Data Silos*, ICDE 2022) that can be had here.

Ten nodes share MNIST or Fashion-MNIST by Dirichlet(0.5), or have 1, 2 or 3 labels each; the benchmark's small network,
mini-batches of 64. There a round is ten epochs at every node, fifty times, with a momentum of 0.9 in local updates;
here all methods have the same budget of simulated time and are tuned for it. So published accuracies are beside ours to
show which settings are hard, and for whom, and are no result that ours must come to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedbudget.experiments.figures.figure import Claim, FigureTable, GridSize
from fedbudget.experiments.figures.rivals import Rivals, own_and_best
from fedbudget.experiments.figures.rows import Rows, distinct, where
from fedbudget.experiments.rivals import Rival, published_rivals

_NODES: dict[str, Any] = {"model": "lenet", "nodes": 10, "batch_size": 64, "budget": ("time=30s",)}
_SPREAD = {"Dirichlet 0.5": "dirichlet:0.5", "1 label": "labels:1", "2 labels": "labels:2", "3 labels": "labels:3"}
TASKS: Mapping[str, Mapping[str, Any]] = {
    f"{title}, {spread}": {**_NODES, "dataset": dataset, "partition": partition}
    for title, dataset in (("MNIST", "mnist"), ("Fashion-MNIST", "fashion-mnist"))
    for spread, partition in _SPREAD.items()
}

PUBLISHED: Mapping[str, Mapping[str, str]] = {
    "MNIST, Dirichlet 0.5": {"FedAvg": "98.9", "SCAFFOLD": "99.1", "FedProx": "99.0", "FedNova": "98.0"},
    "MNIST, 1 label": {"FedAvg": "19.3 ± 11.8", "SCAFFOLD": "9.9", "FedProx": "51.8 ± 26.8", "FedNova": "52.6 ± 14.1"},
    "MNIST, 2 labels": {"FedAvg": "96.9", "SCAFFOLD": "96.9", "FedProx": "96.9", "FedNova": "96.7"},
    "MNIST, 3 labels": {"FedAvg": "97.9", "SCAFFOLD": "97.9", "FedProx": "97.9", "FedNova": "97.6"},
    "Fashion-MNIST, Dirichlet 0.5": {"FedAvg": "88.1", "SCAFFOLD": "88.4", "FedProx": "88.2", "FedNova": "88.2"},
    "Fashion-MNIST, 1 label": {
        "FedAvg": "28.4 ± 17.1", "SCAFFOLD": "10.0", "FedProx": "32.7 ± 6.7", "FedNova": "16.9 ± 9.3",
    },
    "Fashion-MNIST, 2 labels": {
        "FedAvg": "78.1 ± 2.5", "SCAFFOLD": "33.8 ± 41.2", "FedProx": "78.1 ± 1.0", "FedNova": "71.7 ± 2.3",
    },
    "Fashion-MNIST, 3 labels": {
        "FedAvg": "82.4 ± 1.5", "SCAFFOLD": "80.3 ± 5.0", "FedProx": "83.0", "FedNova": "82.0 ± 1.3",
    },
}  # fmt: skip
"""Of test images, in percent, the best of all rounds, as Flower's baseline niid_bench has them; a deviation over seeds
below 1 is left out."""


@dataclass(frozen=True)
class NiidBench(Rivals):
    """The benchmark's methods, and accuracies beside those that it is known by."""

    def rivals(self, size: GridSize) -> Sequence[Rival]:
        grid: dict[str, Sequence[Any]] = {"tau": (10,) if size.quick else (10, 100), "step_size": (0.03, 0.1)}
        published = {rival.name: rival for rival in published_rivals()}
        known = [published[name] for name in ("FedAvg", "SCAFFOLD", "FedProx", "FedNova")]
        return [replace(each, grid={**each.grid, **grid, **_pull(each)}) for each in known]

    def climbs(self, size: GridSize) -> int:
        return 1

    def claims(self, rows: Rows) -> list[Claim]:
        claims = super().claims(rows)[:-1]
        for task in distinct(rows, "task"):
            own, best = own_and_best(where(rows, task=task))
            if own["accuracy"] is not None and best["accuracy"] is not None:
                claims.append(
                    Claim(
                        f"{task}: the default's accuracy is not below that of the rival with the lowest loss",
                        f"{own['accuracy']:.3f}, {best['method']} {best['accuracy']:.3f}",
                        own["accuracy"] >= best["accuracy"],
                    )
                )
        return claims

    def table(self, rows: Rows) -> FigureTable:
        made = super().table(rows)
        published = [PUBLISHED.get(task, {}).get(method, "") for task, method, *_ in made.rows]
        lines = [(*row[:4], told, *row[4:]) for row, told in zip(made.rows, published, strict=True)]
        return FigureTable((*made.head[:4], "accuracy, published, %", *made.head[4:]), tuple(lines))


def _pull(rival: Rival) -> dict[str, Sequence[float]]:
    return {"proximal": (0.01, 1.0)} if "proximal" in rival.grid else {}
