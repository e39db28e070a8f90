"""Train a custom model on custom data: logistic regression on three hospitals.

The model is a function that returns the loss and its gradient. The run has two budgets
and reports which one stopped it.
"""

import numpy as np

import fedbudget


def logistic(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the mean loss and its gradient, for y in {0, 1}."""
    score = x @ w
    loss = np.mean(np.logaddexp(0, score) - y * score)
    probability = 1 / (1 + np.exp(-score))
    return float(loss), x.T @ (probability - y) / len(y)


def hospital(
    rng: np.random.Generator, patients: int, shift: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return synthetic patients; `shift` differs between hospitals."""
    x = rng.normal(shift, 1.0, (patients, 6)).astype(np.float32)
    score = x @ np.array([1, -2, 0.5, 0, 1, -1]) + rng.normal(0, 0.5, patients)
    return x, (score > 0).astype(np.float32)


rng = np.random.default_rng(0)
result = fedbudget.train(
    model=fedbudget.FunctionModel(
        logistic, initial=np.zeros(6), predict=lambda w, x: x @ w > 0
    ),
    shards=[
        hospital(rng, 400, -0.5),
        hospital(rng, 250, 0.0),
        hospital(rng, 900, 0.5),
    ],
    test=hospital(rng, 500, 0.0),
    budget=["time=15s", "bytes=60kB"],
)
print(f"loss {result.loss:.4f}, accuracy {result.accuracy:.3f}", end=", ")
print(f"stopped by {result.stopped_by}")
print("spent:", {name: round(amount, 1) for name, amount in result.spent.items()})
