"""Titles and metrics of a run as text, for terminals, pages, plots and trackers."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fedbudget import python_file
from fedbudget.settings.settings import Settings

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
"""Labels of metrics, in the order of display. Other metrics are a model's own."""

_BASELINES = {"accuracy": "majority class", "rmse": "of the mean"}


def run_title(settings: Settings, dataset: str | None = None, note: str = "") -> str:
    """Return the title of a run: model, dataset and method.

    Args:
      settings: settings of the run.
      dataset: name of the dataset, if it is not the one in the settings.
      note: how the data differ from the whole dataset.

    >>> run_title(Settings(model="svm", nodes=5, partition="case:2"))
    'svm on digits, 5 nodes, case:2, adaptive τ, accelerated'
    >>> run_title(Settings(model="linear", method="centralized"), "homes.csv", "10 samples")
    'linear on homes.csv (10 samples), centralized'
    >>> run_title(Settings(model="svm", tau=10, update="fedadam"))
    'svm on digits, τ = 10, fedadam, accelerated'
    >>> run_title(Settings(model="svm", budget=("privacy=4",), privacy_unit="sample"))
    'svm on digits, adaptive τ, private samples'
    """
    if settings.method == "centralized":
        settings = replace(settings, nodes=None, partition=None)
    parts = [task_title(settings, dataset, note)]
    if settings.method not in ("centralized", "asynchronous"):
        parts.append(tau_text(settings))
    if settings.update is not None:
        parts.append(settings.update)
    return ", ".join([*parts, method_title(settings)])


def method_title(settings: Settings) -> str:
    """Return the name of the method, or the unit that a private run protects.

    >>> method_title(Settings(budget=("privacy=4",), privacy_noise="seeded"))
    'private nodes (simulated ε)'
    """
    if settings.limits().by_noise is None:
        return settings.method
    unit = "samples" if settings.privacy_unit == "sample" else "nodes"
    simulated = " (simulated ε)" if settings.privacy_noise == "seeded" else ""
    return f"private {unit}{simulated}"


def task_title(settings: Settings, dataset: str | None = None, note: str = "") -> str:
    """Return the title of a task: model and dataset, without the method.

    >>> task_title(Settings(model="svm", nodes=5, partition="case:2"))
    'svm on digits, 5 nodes, case:2'
    """
    name = dataset or Path(settings.dataset).name or settings.dataset
    title = f"{model_title(settings)} on {name}"
    parts = [f"{title} ({note})" if note else title]
    if settings.nodes is not None:
        parts.append(f"{settings.nodes} nodes")
    if settings.partition is not None:
        parts.append(settings.partition)
    return ", ".join(parts)


def model_title(settings: Settings) -> str:
    """Return the name of the model; "default model" if the data decide it later."""
    return "default model" if settings.model is None else python_file.short(settings.model)


def tau_text(settings: Settings) -> str:
    return "adaptive τ" if settings.tau == "adaptive" else f"τ = {settings.tau}"


def metrics_text(
    accuracy: float | None,
    metrics: Mapping[str, float],
    to_beat: Mapping[str, float] | None = None,
) -> str:
    """Return the metrics in one line, with baselines in brackets; empty if there are none.

    Args:
      accuracy: accuracy, if it was evaluated.
      metrics: other metrics by name.
      to_beat: baselines by metric.

    >>> metrics_text(0.942, {"balanced_accuracy": 0.93, "f1": 0.931}, {"accuracy": 0.811})
    'accuracy 0.9420 (majority class 0.8110), balanced 0.9300, F1 0.9310'
    >>> metrics_text(None, {"rmse": 31234.56, "mae": 20000.0, "r2": 0.9}, {"rmse": 98765.4})
    'RMSE 31235 (of the mean 98765), MAE 20000, R² 0.9000'
    """
    values = dict(metrics)
    if accuracy is not None:
        values.setdefault("accuracy", accuracy)
    baselines = to_beat or {}
    parts = []
    for name in dict.fromkeys([*NAMES, *values]):
        if name not in values or name == "f1_binary":
            continue
        text = f"{NAMES.get(name, name)} {format_metric(name, values[name])}"
        if name in baselines:
            text += f" ({_BASELINES[name]} {format_metric(name, baselines[name])})"
        parts.append(text)
    return ", ".join(parts)


def spread_text(spread: Mapping[str, float], metric: str) -> str:
    """Return the spread of a metric over nodes in one line.

    >>> spread_text({"nodes": 4, "worst": 0.9, "tenth": 0.91, "median": 0.95}, "accuracy")
    'accuracy over 4 nodes: worst 0.9000, tenth percentile 0.9100, median 0.9500'
    """
    labels = {"worst": "worst", "tenth": "tenth percentile", "median": "median"}
    values = ", ".join(
        f"{label} {format_metric(metric, spread[name])}" for name, label in labels.items()
    )
    return f"{NAMES[metric]} over {spread['nodes']:.0f} nodes: {values}"


def format_metric(name: str, value: float) -> str:
    """Return a metric with four decimals, or four digits if it has a unit."""
    if name in NAMES and name not in ("rmse", "mae"):
        return f"{value:.4f}"
    return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
