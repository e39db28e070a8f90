"""The local images of a machine, images/LABEL/*.png.

Each image is read when a mini-batch needs it.
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image


class Images:
    def __init__(self, folder: str = "images") -> None:
        self.files = sorted(Path(folder).glob("*/*.png"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        pixels = np.array(Image.open(self.files[number]), np.float32) / 255
        return torch.from_numpy(pixels)[None], int(self.files[number].parent.name)
