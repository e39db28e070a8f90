"""`fedbudget evaluate`."""

import json as jsonlib
from typing import Annotated

import typer

from fedbudget.cli import options as o


def evaluate(
    run: o.RunFolder,
    dataset: Annotated[
        str, typer.Option(help="A dataset's name or a path; its test samples where it has some, or else all.")
    ],
    target: o.Target = None,
    data_dir: o.DataDir = None,
    json: o.Json = False,
) -> None:
    """Apply a trained model to data, and print its loss and accuracy.

    Examples:

      fedbudget evaluate runs/NAME --dataset digits

      fedbudget evaluate runs/NAME --dataset new.csv --target price
    """
    from fedbudget.experiments.evaluate import evaluate as apply
    from fedbudget.runs.folder import Run

    result = apply(Run.open(run), dataset, target, data_dir)
    if json:
        print(jsonlib.dumps({"samples": result.samples, "loss": result.loss, "accuracy": result.accuracy}))
        return
    accuracy = "" if result.accuracy is None else f", accuracy {result.accuracy:.4f}"
    print(f"{result.samples} samples: loss {result.loss:.4f}{accuracy}")
