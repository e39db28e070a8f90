"""A model of your own on data of your own: logistic regression, as a function of loss and gradient, on three hospitals.

Two budgets hold at once, and the run says which of them ended it.
"""

import numpy as np

import fedbudget


def logistic(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean loss and its gradient, for y in {0, 1}."""
    score = x @ w
    probability = 1 / (1 + np.exp(-score))
    return float(np.mean(np.logaddexp(0, score) - y * score)), x.T @ (probability - y) / len(y)


def hospital(rng: np.random.Generator, patients: int, shift: float) -> tuple[np.ndarray, np.ndarray]:
    """Made-up patients; every hospital sees other ones."""
    x = rng.normal(shift, 1.0, (patients, 6)).astype(np.float32)
    return x, (x @ np.array([1, -2, 0.5, 0, 1, -1]) + rng.normal(0, 0.5, patients) > 0).astype(np.float32)


rng = np.random.default_rng(0)
result = fedbudget.train(
    model=fedbudget.FunctionModel(logistic, initial=np.zeros(6), predict=lambda w, x: x @ w > 0),
    shards=[hospital(rng, patients, shift) for patients, shift in ((400, -0.5), (250, 0.0), (900, 0.5))],
    test=hospital(rng, 500, 0.0),
    budget=["time=15s", "bytes=60kB"],
)
print(f"loss {result.loss:.4f}, accuracy {result.accuracy:.3f}, stopped by {result.stopped_by}")
print("spent:", {name: round(amount, 1) for name, amount in result.spent.items()})
