"""What a run is, in a line: the same on terminals, pages, plots and trackers."""

from dataclasses import replace
from pathlib import Path

from fedbudget import python_file
from fedbudget.settings import Settings


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
    parts += [tau_text(settings)] if settings.method not in ("centralized", "asynchronous") else []
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
    name, model = dataset or Path(settings.dataset).name or settings.dataset, model_title(settings)
    parts = [f"{model} on {name} ({note})" if note else f"{model} on {name}"]
    parts += [f"{settings.nodes} nodes"] if settings.nodes is not None else []
    parts += [settings.partition] if settings.partition is not None else []
    return ", ".join(parts)


def model_title(settings: Settings) -> str:
    """What the model is called; of settings whose data nobody has looked at yet, that it is the default."""
    return "default model" if settings.model is None else python_file.short(settings.model)


def tau_text(settings: Settings) -> str:
    return "adaptive τ" if settings.tau == "adaptive" else f"τ = {settings.tau}"
