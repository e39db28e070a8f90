"""Train your own PyTorch module on handwritten digits. Needs fedbudget[torch]."""

import torch
from torch import Tensor, nn

import fedbudget
from fedbudget.models import TorchModel


class Network(nn.Module):
    """One convolution and one linear layer, for batches of shape [samples, 1, 8, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 8, kernel_size=3)
        self.score = nn.Linear(8 * 6 * 6, 10)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.score(torch.relu(self.convolution(images)).flatten(1))
        return scores


model = TorchModel(lambda: Network())
result = fedbudget.train(model=model, dataset="digits", case=2, budget="time=15s")
print(f"loss {result.loss:.4f}, accuracy {result.accuracy:.3f}", end=", ")
print(f"average τ {result.average_tau:.1f}")

network = model.trained(result.w)  # a plain nn.Module
digit = network(torch.zeros(1, 1, 8, 8)).argmax().item()
print(f"a blank image looks like a {digit}")
