"""Use of a trained model: predictions for new samples, and export to other programs."""

from typing import Literal

ExportFormat = Literal["torch", "onnx", "numpy"]
"""Format of an exported model. Defined here so that the CLI need not import the
exporters."""
