"""Export of a trained model to a file for other programs: ONNX, PyTorch or numpy."""

import io
import os
from pathlib import Path
from typing import Any, get_args
from urllib.parse import quote

import numpy as np

from fedbudget import durable_files
from fedbudget.errors import unknown
from fedbudget.models.catalogue import MODELS, require_torch
from fedbudget.trained import ExportFormat
from fedbudget.trained.model import TrainedModel


def export(model: TrainedModel, to: ExportFormat, path: str | os.PathLike[str]) -> None:
    """Write a trained model to a file for other programs.

    Args:
      model: the model of a result, or of `fedbudget.load`.
      to: `onnx` for a graph from raw features to labels, probabilities or values; `torch`
        for a program of `torch.export` from raw features to the model's outputs, or the
        `state_dict` of your own module; `numpy` for a `.npz` of all tensors by name.
      path: file to write.
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


def file_name(trained: TrainedModel, to: ExportFormat, site: str | None = None) -> str:
    """Return the default name of the file.

    Args:
      trained: the model.
      to: the format.
      site: name of the node, if it is a personal model.
    """
    program = trained.name in MODELS
    endings = {"onnx": "onnx", "torch": "pt2" if program else "pt", "numpy": "npz"}
    name = "model" if site is None else f"model-{quote(site, safe=' ')}"
    return f"{name}.{endings[to]}"


def to_numpy(trained: TrainedModel) -> bytes:
    """Return a `.npz` of the tensors by name, and the scales of features and targets."""
    samples = trained.samples
    file = io.BytesIO()
    about: dict[str, Any] = {"feature_scale": samples.scale, **trained.privacy_metadata}
    if trained.feature_names:
        about["feature_names"] = np.array(trained.feature_names)
    if trained.classes:
        about["classes"] = np.array(trained.classes)
    standard = samples.standardization
    if standard is not None:
        about["feature_mean"] = standard.mean
        about["feature_deviation"] = standard.deviation
        about["target_mean"] = standard.target_mean
        about["target_deviation"] = standard.target_deviation
    np.savez(file, **{**about, **trained.tensors})
    return file.getvalue()
