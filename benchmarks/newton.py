"""Newton's method and descent on the natural federations, in simulated time.

    FEDBUDGET_DATA=FOLDER python -m benchmarks.newton [--seeds N]

For each task, without validation: the seconds until the training loss is within 0.1 % of
the pooled optimum. Descent runs with budgets of 10, 20, 40 ... 640 s, because its step
size follows the budget; the shortest time counts. The optimum is that of scikit-learn.

With validation and a budget of 40 s: the loss of the result on the test rows of all nodes.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression

from fedbudget.arrays import Float32
from fedbudget.errors import UserError
from fedbudget.launch.method import choose_solver
from fedbudget.launch.simulate import SimulatedRun, simulate
from fedbudget.models.base import loss_over
from fedbudget.protocol.state import Round
from fedbudget.settings.settings import Settings
from fedbudget.settings.types import MethodName

TASKS = {
    "heart-disease": "softmax",
    "tcga-brca": "softmax",
    "beijing-air": "linear",
    "parkinsons": "linear",
    "cmapss": "linear",
    "diabetes": "linear",
    "breast-cancer": "svm",
}
BUDGETS = (10, 20, 40, 80, 160, 320, 640)
CLOSE = 1.001
METHODS: tuple[MethodName, ...] = ("newton", "accelerated")


def settings_of(
    name: str, method: MethodName, budget: float, seed: int, **more: object
) -> Settings:
    """Return the settings of a run; `accelerated` always descends."""
    options: dict[str, Any] = {"step_size": "auto"} if method == "accelerated" else {}
    options |= more
    return Settings(
        model=TASKS[name],
        dataset=name,
        method=method,
        budget=(f"time={budget}s",),
        seed=seed,
        costs="simulated",
        **options,
    )


def optimum(run: SimulatedRun) -> float:
    """Return the smallest loss on all training rows."""
    table = run.train
    x = np.asarray(table.scaled(slice(None)), np.float64)
    y = np.asarray(table.y, np.float64)
    if run.model.name == "linear":
        w = np.linalg.lstsq(x, y, rcond=None)[0]
        return float(0.5 * np.square(y - x @ w).mean())
    if run.model.name == "softmax":
        best = LogisticRegression(C=1e12, tol=1e-9, max_iter=100_000).fit(x, y)
        shares = best.predict_proba(x)[np.arange(len(y)), y.astype(int)]
        return float(-np.log(shares).mean())
    losses = [loss for _, loss in history(simulate(newton_run(run.settings)))]
    return min(losses)


def newton_run(settings: Settings) -> Settings:
    """Return the settings of a long run of Newton's method."""
    return replace(settings, method="newton", step_size=None, budget=("time=640s",))


def history(run: SimulatedRun) -> Iterator[tuple[float, float]]:
    """Yield the seconds before each round, and the training loss of its w."""
    found: list[tuple[float, float]] = []
    spent = [0.0]

    def observe(round_: Round, w: Float32) -> None:
        loss = run.training_loss(w)
        assert loss is not None
        found.append((spent[0], loss))
        spent[0] = float(round_.ledger.spent[0])

    outcome = run.engine.run(observe=observe)
    loss = run.training_loss(outcome.w)
    assert loss is not None
    found.append((spent[0], loss))
    yield from found


def seconds_to(name: str, method: MethodName, seed: int) -> tuple[float, float, int]:
    """Return the seconds until the loss is close to the optimum, the largest loss at the
    start of a round relative to the first, and the number of rounds until then."""
    quickest = math.inf
    largest = 0.0
    rounds = 0
    best: float | None = None
    for budget in BUDGETS:
        try:
            run = simulate(settings_of(name, method, budget, seed, validation=0.0))
        except UserError:  # the budget does not cover a round
            continue
        best = optimum(run) if best is None else best
        points = list(history(run))
        largest = max(largest, max(loss for _, loss in points) / points[0][1])
        close = [at for at, (_, loss) in enumerate(points) if loss <= CLOSE * best]
        if close and points[close[0]][0] < quickest:
            quickest = points[close[0]][0]
            rounds = close[0]
        if close:
            break
    return quickest, largest, rounds


def test_loss(
    name: str, method: MethodName, seed: int, budget: float
) -> tuple[float, float]:
    """Return the loss of the result on test rows, and the seconds spent."""
    run = simulate(settings_of(name, method, budget, seed))
    outcome = run.engine.run(observe=lambda *_: None)
    assert run.test is not None
    return loss_over(run.model, outcome.w, run.test), float(outcome.ledger.spent[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    given = parser.parse_args()
    for name in given.tasks:
        run = simulate(settings_of(name, "accelerated", 40, 0))
        default = replace(run.settings, step_size=None)
        choice = choose_solver(default, run.model, run.shards.size.tolist())
        print(
            f"{name}: {'newton' if choice.newton else 'descent'}, because {choice.reason}"
        )
        for method in METHODS:
            found = [seconds_to(name, method, seed) for seed in range(given.seeds)]
            times, peaks, rounds = zip(*found, strict=True)
            print(
                f"  {method} close after {np.mean(times):.2f} s, "
                f"{np.mean(rounds):.0f} rounds; highest start {max(peaks):.2f}",
                flush=True,
            )
        if not choice.newton:
            continue
        tested = {
            method: np.array(
                [test_loss(name, method, seed, 40) for seed in range(2 * given.seeds)]
            )
            for method in METHODS
        }
        for method, values in tested.items():
            loss, seconds = values.mean(axis=0)
            print(f"  {method} test loss {loss:.5f} after {seconds:.1f} s")
        gap = tested["newton"][:, 0] - tested["accelerated"][:, 0]
        error = gap.std(ddof=1) / math.sqrt(len(gap))
        print(f"  difference {gap.mean():.5f} ± {error:.5f}", flush=True)


if __name__ == "__main__":
    main()
