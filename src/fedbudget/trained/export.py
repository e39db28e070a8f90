"""A trained model as a file for other programs: ONNX, PyTorch or numpy."""

import io
import os
from pathlib import Path
from typing import Any, get_args

import numpy as np

from fedbudget import durable_files
from fedbudget.errors import unknown
from fedbudget.models.catalogue import MODELS, require_torch
from fedbudget.trained.formats import ExportFormat
from fedbudget.trained.model import TrainedModel


def export(model: TrainedModel, to: ExportFormat, path: str | os.PathLike[str]) -> None:
    """Writes a trained model to a file for other programs.

    Args:
      model: of a result, or from `fedbudget.load`.
      to: `onnx`, a graph that takes raw features and gives labels, probabilities or values; `torch`, a program of
        `torch.export` that takes raw features and gives the model's outputs, or the `state_dict` of your own module;
        `numpy`, a `.npz` of all tensors by their names.
      path: of the file.
    """
    if to not in get_args(ExportFormat):
        raise unknown("format", to, get_args(ExportFormat))
    durable_files.replace(Path(path), _contents(model, to))


def _contents(trained: TrainedModel, to: ExportFormat) -> bytes:
    if to == "onnx":
        from fedbudget.trained.onnx import to_onnx

        return to_onnx(trained)
    if to == "torch":
        require_torch("export to torch")
        from fedbudget.trained.torch import to_torch

        return to_torch(trained)
    return to_numpy(trained)


def file_name(trained: TrainedModel, to: ExportFormat) -> str:
    """What such a file is called, where nobody has said it."""
    program = trained.name in MODELS
    return {
        "onnx": "model.onnx",
        "torch": "model.pt2" if program else "model.pt",
        "numpy": "model.npz",
    }[to]


def to_numpy(trained: TrainedModel) -> bytes:
    """A `.npz` of the tensors by their names, and of all that features and outputs are changed by."""
    samples = trained.samples
    file = io.BytesIO()
    about: dict[str, Any] = {"feature_scale": samples.scale}
    if trained.feature_names:
        about["feature_names"] = np.array(trained.feature_names)
    if trained.classes:
        about["classes"] = np.array(trained.classes)
    if (how := samples.standardization) is not None:
        about |= {"feature_mean": how.mean, "feature_deviation": how.deviation}
        about |= {"target_mean": how.target_mean, "target_deviation": how.target_deviation}
    np.savez(file, **{**about, **trained.tensors})
    return file.getvalue()
