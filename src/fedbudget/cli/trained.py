"""`fedbudget evaluate`.

`fedbudget predict`.

`fedbudget export`.
"""

import json
import sys
from pathlib import Path

from fedbudget.cli.options import OWN_MODEL, RUN, Given, OutputOptions, command
from fedbudget.settings.option import REQUIRED, option, paths_from
from fedbudget.trained.formats import ExportFormat


@command
def evaluate(
    *,
    run: Path = RUN,
    dataset: str = option(
        REQUIRED,
        "A dataset's name, a path, or NAME.py:NAME; its test samples if any, else all.",
    ),
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
    from fedbudget.runs.folder import Run
    from fedbudget.runs.text import metrics_text

    options = settings_from(
        {name: given[name] for name in ("target", "drop")}
    ).table_options()
    result = apply(Run.open(run), dataset, options, given["data_dir"], model=model)
    if output.json:
        print(json.dumps(vars(result)))
        return
    metrics = metrics_text(result.accuracy, result.metrics, result.to_beat)
    print(
        ", ".join(
            filter(None, (f"{result.samples} samples: loss {result.loss:.4f}", metrics))
        )
    )


@command
def predict(
    *,
    run: Path = RUN,
    data: Path = option(
        REQUIRED,
        "New samples: a .csv, a .npz with an array x, or a Python file and a name in it, ward.py:samples.",
        values=lambda start: paths_from(start, ".csv", ".npz"),
    ),
    out: Path | None = option(None, "The .csv to write.", shown="the screen"),
    drop: tuple[str, ...] = option(
        (), "CSV columns to leave out, besides those of training: id,date.", commas=True
    ),
    model: str | None = OWN_MODEL,
) -> None:
    """Predict for new samples with a trained model.

    Classes have their names, with a probability for each where the model has them, and numbers their own unit. Columns
    of a .csv are found by their names, in any order; the target may be there or not. What is no feature, such as an ID,
    stands beside the predictions.

    Examples:

      fedbudget predict runs/NAME --data new.csv

      fedbudget predict runs/NAME --data new.csv --drop notes --out predictions.csv

      fedbudget predict runs/NAME --data ward.py:samples --model net.py:Net
    """
    from fedbudget import durable_files
    from fedbudget.experiments.evaluate import predict as predict_for
    from fedbudget.trained.model import load

    found = predict_for(load(run, model=model), data, drop)
    for remark in found.remarks:
        print(f"fedbudget: {remark}", file=sys.stderr)
    if out is None:
        print(found.to_csv(), end="")
    else:
        durable_files.replace(out, found.to_csv().encode())
        print(out)


@command
def export(
    *,
    run: Path = RUN,
    to: ExportFormat = option(
        REQUIRED,
        "torch (a program, or your own module's state_dict), onnx (a graph), or numpy (a .npz).",
    ),
    out: Path | None = option(None, "The file to write.", shown="in the run's folder"),
    model: str | None = OWN_MODEL,
) -> None:
    """Write a trained model to a file for other programs.

    Graphs and programs take features as they are outside, and standardise and scale them as at training.

    Examples:

      fedbudget export runs/NAME --to onnx

      fedbudget export runs/NAME --to torch --out ward.pt2

      fedbudget export runs/NAME --to numpy --out ward.npz

      fedbudget export runs/NAME --to torch --model net.py:Net
    """
    from fedbudget.trained.export import export as write
    from fedbudget.trained.export import file_name
    from fedbudget.trained.model import load

    trained = load(run, model=model)
    path = out or run / file_name(trained, to)
    write(trained, to, path)
    print(path)
