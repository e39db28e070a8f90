"""All figures by name: those of the paper's evaluation, and those that go past it."""

from collections.abc import Mapping

from fedbudget.experiments.figures.figure import Figure
from fedbudget.experiments.figures.instantaneous import instantaneous, instantaneous_over_network
from fedbudget.experiments.figures.loss_against_tau import loss_against_tau
from fedbudget.experiments.figures.methods import methods, no_knobs
from fedbudget.experiments.figures.one_phi import one_phi
from fedbudget.experiments.figures.sensitivity import sensitivity
from fedbudget.experiments.figures.synchrony import synchrony
from fedbudget.experiments.figures.varying import AGGREGATION, BUDGET, NODES, varying

_DGD, _SGD = "svm-dgd-mnist", "svm-sgd-mnist"
_QUICK = ("svm-digits", "softmax-digits", "mlp-digits", _SGD, _DGD, "linear-energy", "kmeans-user-knowledge")

FIGURES: Mapping[str, Figure] = {
    figure.name: figure
    for figure in (
        loss_against_tau("svm-dgd", "SVM (DGD)", _DGD, differs=True, slower=True),
        loss_against_tau("svm-sgd", "SVM (SGD)", _SGD, differs=True),
        loss_against_tau("linear", "Linear regression", "linear-energy"),
        loss_against_tau("kmeans", "K-means", "kmeans-user-knowledge", slower=True),
        loss_against_tau("cnn-mnist", "CNN on MNIST", "cnn-mnist", differs=True, long=True),
        loss_against_tau("cnn-fashion-mnist", "CNN on Fashion-MNIST", "cnn-fashion-mnist", differs=True, long=True),
        loss_against_tau("cnn-cifar-10", "CNN on CIFAR-10", "cnn-cifar-10", differs=True, long=True),
        varying("nodes", "SVM (SGD), number of nodes", _SGD, NODES),
        varying("aggregation-sgd", "SVM (SGD), time of an aggregation", _SGD, AGGREGATION),
        varying("aggregation-dgd", "SVM (DGD), time of an aggregation", _DGD, AGGREGATION),
        varying("budget-sgd", "SVM (SGD), total budget", _SGD, BUDGET),
        varying("budget-dgd", "SVM (DGD), total budget", _DGD, BUDGET),
        instantaneous("instantaneous-dgd", "SVM (DGD), a single run", _DGD),
        instantaneous("instantaneous-sgd", "SVM (SGD), a single run", _SGD),
        instantaneous_over_network("instantaneous-dgd-network", "SVM (DGD), a single run over a network", _DGD),
        instantaneous_over_network("instantaneous-sgd-network", "SVM (SGD), a single run over a network", _SGD),
        sensitivity("phi-dgd", "SVM (DGD), control parameter φ", _DGD),
        sensitivity("phi-sgd", "SVM (SGD), control parameter φ", _SGD),
        synchrony("asynchronous-dgd", "SVM (DGD), synchronous and asynchronous", _DGD),
        synchrony("asynchronous-sgd", "SVM (SGD), synchronous and asynchronous", _SGD),
        methods("methods", "The paper's method and frugal", _QUICK),
        no_knobs("no-knobs", "The paper's method, and frugal with a step size of its own", _QUICK),
        one_phi("one-phi", "The control parameter φ, with the paper's method and with frugal", _QUICK),
    )
}
