"""The reference workload W1.

Squared SVM, λ=0.1, 784 features, 60,000 samples, mini-batch 100, η=0.01, τ=10. The
samples are synthetic, with the size and sparsity of handwritten digits (four of five
pixels are background), so that the benchmark runs without downloads. Speed does not
depend on the content of the images.
"""

from functools import cache

import numpy as np

from fedbudget.data.dataset import Dataset, Part
from fedbudget.settings.settings import Settings
from fedbudget.settings.types import MethodName, Tau

SAMPLES, FEATURES, BATCH, TAU, ETA, REGULARIZATION = 60_000, 784, 100, 10, 0.01, 0.1
NODES = (5, 50, 500)


@cache
def dataset(samples: int = SAMPLES, features: int = FEATURES) -> Dataset:
    rng = np.random.default_rng(0)
    direction = rng.normal(size=features).astype(np.float32)
    x = np.empty((samples, features), np.uint8)
    scores = np.empty(samples, np.float32)
    for first in range(
        0, samples, 1000
    ):  # in pieces, so that creating the samples does not dominate memory
        piece = rng.integers(1, 256, (min(1000, samples - first), features), dtype=np.uint8)
        piece[rng.random(piece.shape, dtype=np.float32) < 0.8] = 0
        x[first : first + len(piece)] = piece
        scores[first : first + len(piece)] = piece.astype(np.float32) @ direction
    labels = (scores > np.median(scores)).astype(np.int64)
    part = Part(x, labels, labels.astype(np.float64))
    return Dataset(
        "W1", part, part.rows(np.arange(1000)), classes=("0", "1"), scale=1 / 255
    )


def settings(
    nodes: int,
    rounds: int,
    *,
    tau: Tau = TAU,
    full: bool = False,
    case: int = 1,
    method: MethodName = "paper",
) -> Settings:
    """Return W1 as settings; the budget is so large that the number of rounds ends a
    run.

    With adaptive τ, φ is so small that the controller always chooses the upper limit of
    its search range, which equals W1's τ.
    """
    return Settings(
        model="svm",
        nodes=nodes,
        partition=f"case:{case}",
        method=method,
        tau=tau,
        batch_size="full" if full else BATCH,
        step_size=ETA,
        budget=("time=1000h",),
        rounds=rounds,
        phi=1e-12,
        tau_max=TAU,
    )
