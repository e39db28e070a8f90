"""All figures by name: those of the paper's evaluation, and those that go past it."""

from collections.abc import Mapping

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
from fedbudget.experiments.figures.rivals import MORE_TASKS, TASKS, NiidBench, Rivals
from fedbudget.experiments.figures.rivals import NIID_TASKS as NIID_TASKS
from fedbudget.experiments.figures.synchrony import SingleSynchrony, Synchrony

_DGD = "svm-dgd-mnist"
_SGD = "svm-sgd-mnist"
_QUICK = (
    "svm-digits",
    "softmax-digits",
    "mlp-digits",
    _SGD,
    _DGD,
    "linear-energy",
    "kmeans-user-knowledge",
)
# of networks, whose runs are long; more can be added, and those made stay
_THREE = (1, 10, 100)
_ENDS = (1, 100)

FIGURES: Mapping[str, Figure] = {
    figure.name: figure
    for figure in (
        LossAgainstTau("svm-dgd", "SVM (DGD)", (_DGD,), slower=True),
        LossAgainstTau("svm-sgd", "SVM (SGD)", (_SGD,)),
        LossAgainstTau("linear", "Linear regression", ("linear-energy",)),
        LossAgainstTau("kmeans", "K-means", ("kmeans-user-knowledge",), slower=True),
        LossAgainstTau(
            "cnn-mnist", "CNN on MNIST", ("cnn-mnist",), FEW_TAUS, _THREE, long=True
        ),
        LossAgainstTau(
            "cnn-fashion-mnist",
            "CNN on Fashion-MNIST",
            ("cnn-fashion-mnist",),
            _THREE,
            _ENDS,
            long=True,
        ),
        LossAgainstTau(
            "cnn-cifar-10", "CNN on CIFAR-10", ("cnn-cifar-10",), _THREE, _ENDS, long=True
        ),
        Varying("nodes", "SVM (SGD), number of nodes", (_SGD,), NODES),
        Varying(
            "aggregation-sgd", "SVM (SGD), time of an aggregation", (_SGD,), AGGREGATION
        ),
        Varying(
            "aggregation-dgd", "SVM (DGD), time of an aggregation", (_DGD,), AGGREGATION
        ),
        Varying("budget-sgd", "SVM (SGD), total budget", (_SGD,), BUDGET),
        Varying("budget-dgd", "SVM (DGD), total budget", (_DGD,), BUDGET),
        Instantaneous("instantaneous-dgd", "SVM (DGD), a single run", (_DGD,), slower=True),
        Instantaneous("instantaneous-sgd", "SVM (SGD), a single run", (_SGD,)),
        Instantaneous(
            "instantaneous-dgd-network",
            "SVM (DGD), a single run over a network",
            (_DGD,),
            slower=True,
            engine="network",
        ),
        Instantaneous(
            "instantaneous-sgd-network",
            "SVM (SGD), a single run over a network",
            (_SGD,),
            engine="network",
        ),
        Sensitivity("phi-dgd", "SVM (DGD), control parameter φ", (_DGD,)),
        Sensitivity("phi-sgd", "SVM (SGD), control parameter φ", (_SGD,)),
        Synchrony("asynchronous-dgd", "SVM (DGD), synchronous and asynchronous", (_DGD,)),
        Synchrony("asynchronous-sgd", "SVM (SGD), synchronous and asynchronous", (_SGD,)),
        SingleSynchrony(
            "asynchronous-dgd-run",
            "SVM (DGD), synchronous and asynchronous, single runs",
            (_DGD,),
        ),
        SingleSynchrony(
            "asynchronous-sgd-run",
            "SVM (SGD), synchronous and asynchronous, single runs",
            (_SGD,),
        ),
        Methods("methods", "The paper's method and frugal", _QUICK),
        NoKnobs(
            "no-knobs", "The paper's method, and frugal with a step size of its own", _QUICK
        ),
        Rivals(
            "rivals",
            "The default with nothing tuned, and tuned rivals",
            tuple(TASKS),
            long=True,
        ),
        Rivals(
            "more-rivals",
            "Further settings: the default with nothing tuned, and tuned rivals",
            tuple(MORE_TASKS),
            long=True,
            settings_of=MORE_TASKS,
        ),
        NiidBench(
            "niid-bench",
            "NIID-Bench, the default with nothing tuned, and tuned rivals",
            tuple(NIID_TASKS),
            long=True,
            settings_of=NIID_TASKS,
        ),
        OnePhi(
            "one-phi",
            "The control parameter φ, with the paper's method and with frugal",
            _QUICK,
        ),
    )
}
