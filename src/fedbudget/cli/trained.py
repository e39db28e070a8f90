"""`fedbudget evaluate`, `predict` and `export`: the use of trained models."""

import json
import sys
from pathlib import Path

from fedbudget.cli.options import (
    OWN_MODEL,
    RUN,
    SITE,
    Given,
    OutputOptions,
    command,
    settings_from,
)
from fedbudget.settings.option import REQUIRED, option, paths_from
from fedbudget.trained import ExportFormat


@command
def evaluate(
    *,
    run: Path = RUN,
    dataset: str = option(
        REQUIRED,
        "A dataset's name, a path, or FILE.py:NAME; its test samples if any, else all.",
    ),
    model: str | None = OWN_MODEL,
    site: str | None = SITE,
    given: Given,
    output: OutputOptions,
) -> None:
    """Apply a trained model to data, and print its loss and metrics.

    Examples:

      fedbudget evaluate runs/NAME --dataset digits

      fedbudget evaluate runs/NAME --dataset new.csv --target price

      fedbudget evaluate runs/NAME --dataset ward.py:samples

      fedbudget evaluate runs/NAME --dataset digits --model net.py:Net

      fedbudget evaluate runs/NAME --dataset ward.csv --site "node 2"
    """
    from fedbudget.experiments.evaluate import evaluate as apply_model
    from fedbudget.runs.folder import Run
    from fedbudget.runs.text import metrics_text

    settings = settings_from({name: given[name] for name in ("target", "drop")})
    result = apply_model(
        Run.open(run),
        dataset,
        settings.table_options(),
        given["data_dir"],
        model=model,
        site=site,
    )
    if output.json:
        print(json.dumps(vars(result)))
        return
    loss = f"{result.samples} samples: loss {result.loss:.4f}"
    metrics = metrics_text(result.accuracy, result.metrics, result.to_beat)
    print(", ".join(filter(None, (loss, metrics))))


@command
def predict(
    *,
    run: Path = RUN,
    dataset: Path = option(
        REQUIRED,
        "New samples: a table, a .npz with an array x, or FILE.py:NAME.",
        values=lambda start: paths_from(start, ".csv", ".tsv", ".parquet", ".npz"),
    ),
    out: Path | None = option(None, "The .csv to write.", shown="the screen"),
    drop: tuple[str, ...] = option(
        (),
        "Columns of tables to ignore, in addition to those of training: id,date.",
        commas=True,
    ),
    model: str | None = OWN_MODEL,
    site: str | None = SITE,
) -> None:
    """Predict for new samples with a trained model.

    Classes are printed by name, with their probabilities if the model has them. Numbers
    are in their original unit. Columns of a table are found by name, in any order, and the
    target column is optional. Columns that are not features, such as an ID, are copied
    next to the predictions.

    Examples:

      fedbudget predict runs/NAME --dataset new.csv

      fedbudget predict runs/NAME --dataset new.csv --drop notes --out predictions.csv

      fedbudget predict runs/NAME --dataset ward.py:samples --model net.py:Net

      fedbudget predict runs/NAME --dataset ward.csv --site "node 2"
    """
    from fedbudget import durable_files
    from fedbudget.experiments.evaluate import predict as predict_samples
    from fedbudget.trained.model import load

    predictions = predict_samples(load(run, model=model, site=site), dataset, drop)
    for remark in predictions.remarks:
        print(f"fedbudget: {remark}", file=sys.stderr)
    if out is None:
        print(predictions.to_csv(), end="")
    else:
        durable_files.replace(out, predictions.to_csv().encode())
        print(out)


@command
def export(
    *,
    run: Path = RUN,
    to: ExportFormat = option(
        REQUIRED,
        "torch (a program, or your own module's state_dict), onnx (a graph), or numpy "
        "(a .npz).",
    ),
    out: Path | None = option(None, "The file to write.", shown="in the run's folder"),
    model: str | None = OWN_MODEL,
    site: str | None = SITE,
) -> None:
    """Write a trained model to a file for other programs.

    Graphs and programs take raw features, and standardise and scale them as in training.

    Examples:

      fedbudget export runs/NAME --to onnx

      fedbudget export runs/NAME --to torch --out ward.pt2

      fedbudget export runs/NAME --to numpy --out ward.npz

      fedbudget export runs/NAME --to torch --model net.py:Net

      fedbudget export runs/NAME --to onnx --site "node 2"
    """
    from fedbudget.trained.export import export as write
    from fedbudget.trained.export import file_name
    from fedbudget.trained.model import load

    trained = load(run, model=model, site=site)
    path = out or run / file_name(trained, to, site)
    write(trained, to, path)
    print(path)
