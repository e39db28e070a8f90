"""Metrics in words: the same names and digits wherever a person reads them."""

from collections.abc import Mapping

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
    accuracy: float | None, metrics: Mapping[str, float], to_beat: Mapping[str, float] | None = None
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
    values = ", ".join(f"{words} {figure(metric, spread[name])}" for name, words in parts.items())
    return f"{NAMES[metric]} over {spread['nodes']:.0f} nodes: {values}"


def figure(name: str, value: float) -> str:
    """With four digits: shares behind the point, what has a unit by its size."""
    return f"{value:.4f}" if name in NAMES and name not in ("rmse", "mae") else _number(value)


def _number(value: float) -> str:
    return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
