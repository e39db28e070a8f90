"""`fedbudget evaluate`."""

import json
from pathlib import Path

from fedbudget.cli.command import command
from fedbudget.cli.options import RUN, Given, OutputOptions
from fedbudget.option import REQUIRED, option


@command
def evaluate(
    *,
    run: Path = RUN,
    dataset: str = option(REQUIRED, "A dataset's name, a path, or NAME.py:NAME; its test samples if any, else all."),
    given: Given,
    output: OutputOptions,
) -> None:
    """Apply a trained model to data, and print its loss and accuracy.

    Examples:

      fedbudget evaluate runs/NAME --dataset digits

      fedbudget evaluate runs/NAME --dataset new.csv --target price

      fedbudget evaluate runs/NAME --dataset ward.py:samples
    """
    from fedbudget.experiments.evaluate import evaluate as apply
    from fedbudget.runs.folder import Run

    result = apply(Run.open(run), dataset, given["target"], given["data_dir"])
    if output.json:
        print(json.dumps(vars(result)))
        return
    accuracy = "" if result.accuracy is None else f", accuracy {result.accuracy:.4f}"
    print(f"{result.samples} samples: loss {result.loss:.4f}{accuracy}")
