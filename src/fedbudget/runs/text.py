"""What a run is, in a line: the same on terminals, pages, plots and trackers.

Metrics in words: the same names and digits wherever a person reads them.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fedbudget import python_file
from fedbudget.settings.settings import Settings


def run_title(settings: Settings, dataset: str | None = None, note: str = "") -> str:
    """What was trained on what, and how.

    Args:
      dataset: its name, where the settings do not have it.
      note: in which way the data were less than the whole dataset, if they were.

    >>> run_title(Settings(model="svm", nodes=5, partition="case:2"))
    'svm on digits, 5 nodes, case:2, adaptive τ, accelerated'
    >>> run_title(Settings(model="linear", method="centralized"), "homes.csv", "1000 samples")
    'linear on homes.csv (1000 samples), centralized'
    >>> run_title(Settings(model="svm", tau=10, update="fedadam"))
    'svm on digits, τ = 10, fedadam, accelerated'
    >>> run_title(Settings(model="svm", budget=("privacy=4",), privacy_unit="sample"))
    'svm on digits, adaptive τ, private samples'
    """
    if settings.method == "centralized":
        settings = replace(settings, nodes=None, partition=None)
    parts = [task_title(settings, dataset, note)]
    parts += (
        [tau_text(settings)]
        if settings.method not in ("centralized", "asynchronous")
        else []
    )
    parts += [settings.update] if settings.update is not None else []
    return ", ".join([*parts, method_title(settings)])


def method_title(settings: Settings) -> str:
    """By which method; a private run has one of its own, and says what it protects."""
    if settings.limits().by_noise is None:
        return settings.method
    return "private samples" if settings.privacy_unit == "sample" else "private nodes"


def task_title(settings: Settings, dataset: str | None = None, note: str = "") -> str:
    """What is trained on what, however that is done.

    >>> task_title(Settings(model="svm", nodes=5, partition="case:2"))
    'svm on digits, 5 nodes, case:2'
    """
    name = dataset or Path(settings.dataset).name or settings.dataset
    model = model_title(settings)
    parts = [f"{model} on {name} ({note})" if note else f"{model} on {name}"]
    parts += [f"{settings.nodes} nodes"] if settings.nodes is not None else []
    parts += [settings.partition] if settings.partition is not None else []
    return ", ".join(parts)


def model_title(settings: Settings) -> str:
    """What the model is called; of settings whose data nobody has looked at yet, that it is the default."""
    return "default model" if settings.model is None else python_file.short(settings.model)


def tau_text(settings: Settings) -> str:
    return "adaptive τ" if settings.tau == "adaptive" else f"τ = {settings.tau}"


NAMES = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced",
    "f1": "F1",
    "f1_binary": "F1 of the second class",
    "auc": "AUC",
    "rmse": "RMSE",
    "mae": "MAE",
    "r2": "R²",
}
"""As people say them, in the order in which they are told; others are a model's own."""

_TO_BEAT = {"accuracy": "majority class", "rmse": "of the mean"}
_LEFT_OUT = ("f1_binary",)  # of one line


def metrics_text(
    accuracy: float | None,
    metrics: Mapping[str, float],
    to_beat: Mapping[str, float] | None = None,
) -> str:
    """One line, with the bar to beat in brackets; nothing where there are none.

    >>> metrics_text(0.942, {"balanced_accuracy": 0.93, "f1": 0.931, "auc": 0.98}, {"accuracy": 0.811})
    'accuracy 0.9420 (majority class 0.8110), balanced 0.9300, F1 0.9310, AUC 0.9800'
    >>> metrics_text(None, {"rmse": 31234.56, "mae": 20000.0, "r2": 0.9}, {"rmse": 98765.4})
    'RMSE 31235 (of the mean 98765), MAE 20000, R² 0.9000'
    """
    values = {**({} if accuracy is None else {"accuracy": accuracy}), **metrics}
    order = [name for name in (*NAMES, *values) if name in values and name not in _LEFT_OUT]
    parts = []
    for name in dict.fromkeys(order):
        bar = (to_beat or {}).get(name)
        more = "" if bar is None else f" ({_TO_BEAT[name]} {figure(name, bar)})"
        parts.append(f"{NAMES.get(name, name)} {figure(name, values[name])}{more}")
    return ", ".join(parts)


def spread_text(spread: Mapping[str, float], metric: str) -> str:
    """How far nodes are apart, in one line.

    >>> spread_text({"nodes": 4, "worst": 0.9, "tenth": 0.91, "median": 0.95}, "accuracy")
    'accuracy over 4 nodes: worst 0.9000, tenth percentile 0.9100, median 0.9500'
    """
    parts = {"worst": "worst", "tenth": "tenth percentile", "median": "median"}
    values = ", ".join(
        f"{words} {figure(metric, spread[name])}" for name, words in parts.items()
    )
    return f"{NAMES[metric]} over {spread['nodes']:.0f} nodes: {values}"


def figure(name: str, value: float) -> str:
    """With four digits: shares behind the point, what has a unit by its size."""
    return (
        f"{value:.4f}" if name in NAMES and name not in ("rmse", "mae") else _number(value)
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
