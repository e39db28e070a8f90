"""The kinds of files that a trained model can be written to; known without importing what writes them."""

from typing import Literal

ExportFormat = Literal["torch", "onnx", "numpy"]
"""What other programs can read."""
