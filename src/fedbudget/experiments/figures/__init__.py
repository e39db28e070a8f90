"""All figures by name: those of the paper's evaluation, and additional ones."""

from collections.abc import Iterator, Mapping
from typing import Any

from fedbudget.experiments.figures.figure import FEW_TAUS, Figure
from fedbudget.experiments.figures.instantaneous import Instantaneous
from fedbudget.experiments.figures.methods import Methods, NoKnobs, OnePhi
from fedbudget.experiments.figures.paper import (
    AGGREGATION,
    BUDGET,
    NODES,
    LossAgainstTau,
    Sensitivity,
    Varying,
)
from fedbudget.experiments.figures.rivals import TASKS, NiidBench, Rivals
from fedbudget.experiments.figures.synchrony import SingleSynchrony, Synchrony

_QUICK = (
    "svm-digits",
    "softmax-digits",
    "mlp-digits",
    "svm-sgd-mnist",
    "svm-dgd-mnist",
    "linear-energy",
    "kmeans-user-knowledge",
)
# τ of networks, whose runs are long. A larger grid reuses the finished runs.
_THREE = (1, 10, 100)
_ENDS = (1, 100)


def _svm(
    figure: type[Figure], name: str, title: str, *arguments: Any, **options: Any
) -> Iterator[Figure]:
    """Yield the figure of the SVM with whole shards (DGD) and with mini-batches (SGD)."""
    for kind in ("dgd", "sgd"):
        task = (f"svm-{kind}-mnist",)
        full_title = f"SVM ({kind.upper()}){title}"
        yield figure(name.format(kind), full_title, task, *arguments, **options)


def _cnn(dataset: str, title: str, *taus: tuple[int, ...]) -> Figure:
    name = f"cnn-{dataset}"
    return LossAgainstTau(name, f"CNN on {title}", (name,), *taus, long=True)


def _rivals(figure: type[Rivals], name: str, title: str) -> Figure:
    tasks = TASKS[name]
    return figure(name, title, tuple(tasks), long=True, settings_of=tasks)


FIGURES: Mapping[str, Figure] = {
    figure.name: figure
    for figure in (
        *_svm(LossAgainstTau, "svm-{}", ""),
        LossAgainstTau("linear", "Linear regression", ("linear-energy",)),
        LossAgainstTau("kmeans", "K-means", ("kmeans-user-knowledge",)),
        _cnn("mnist", "MNIST", FEW_TAUS, _THREE),
        _cnn("fashion-mnist", "Fashion-MNIST", _THREE, _ENDS),
        _cnn("cifar-10", "CIFAR-10", _THREE, _ENDS),
        Varying("nodes", "SVM (SGD), number of nodes", ("svm-sgd-mnist",), NODES),
        *_svm(Varying, "aggregation-{}", ", time of an aggregation", AGGREGATION),
        *_svm(Varying, "budget-{}", ", total budget", BUDGET),
        *_svm(Instantaneous, "instantaneous-{}", ", a single run"),
        *_svm(
            Instantaneous,
            "instantaneous-{}-network",
            ", a single run over a network",
            engine="network",
        ),
        *_svm(Sensitivity, "phi-{}", ", control parameter φ"),
        *_svm(Synchrony, "asynchronous-{}", ", synchronous and asynchronous"),
        *_svm(
            SingleSynchrony,
            "asynchronous-{}-run",
            ", synchronous and asynchronous, single runs",
        ),
        Methods("methods", "The paper's method and frugal", _QUICK),
        NoKnobs(
            "no-knobs", "The paper's method, and frugal with a step size of its own", _QUICK
        ),
        _rivals(Rivals, "rivals", "The default with nothing tuned, and tuned rivals"),
        _rivals(
            Rivals,
            "more-rivals",
            "Further settings: the default with nothing tuned, and tuned rivals",
        ),
        _rivals(
            NiidBench,
            "niid-bench",
            "NIID-Bench, the default with nothing tuned, and tuned rivals",
        ),
        OnePhi(
            "one-phi",
            "The control parameter φ, with the paper's method and with frugal",
            _QUICK,
        ),
    )
}
