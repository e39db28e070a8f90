"""`fedbudget evaluate`."""

import json
from pathlib import Path

from fedbudget.cli.command import command
from fedbudget.cli.options import OWN_MODEL, RUN, Given, OutputOptions
from fedbudget.option import REQUIRED, option


@command
def evaluate(
    *,
    run: Path = RUN,
    dataset: str = option(REQUIRED, "A dataset's name, a path, or NAME.py:NAME; its test samples if any, else all."),
    model: str | None = OWN_MODEL,
    given: Given,
    output: OutputOptions,
) -> None:
    """Apply a trained model to data, and print its loss and metrics.

    Examples:

      fedbudget evaluate runs/NAME --dataset digits

      fedbudget evaluate runs/NAME --dataset new.csv --target price

      fedbudget evaluate runs/NAME --dataset ward.py:samples

      fedbudget evaluate runs/NAME --dataset digits --model net.py:Net
    """
    from fedbudget.cli.options import settings_from
    from fedbudget.experiments.evaluate import evaluate as apply
    from fedbudget.runs.figures import metrics_text
    from fedbudget.runs.folder import Run

    options = settings_from({name: given[name] for name in ("target", "drop")}).table_options()
    result = apply(Run.open(run), dataset, options, given["data_dir"], model=model)
    if output.json:
        print(json.dumps(vars(result)))
        return
    metrics = metrics_text(result.accuracy, result.metrics, result.to_beat)
    print(", ".join(filter(None, (f"{result.samples} samples: loss {result.loss:.4f}", metrics))))
