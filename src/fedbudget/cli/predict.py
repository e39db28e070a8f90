"""`fedbudget predict`."""

import sys
from pathlib import Path

from fedbudget.cli.command import command
from fedbudget.cli.options import OWN_MODEL, RUN
from fedbudget.option import REQUIRED, option, paths_from


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
    drop: tuple[str, ...] = option((), "CSV columns to leave out, besides those of training: id,date.", commas=True),
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
    from fedbudget import atomic_file
    from fedbudget.experiments.predict import predict as predict_for
    from fedbudget.trained.model import load

    found = predict_for(load(run, model=model), data, drop)
    for remark in found.remarks:
        print(f"fedbudget: {remark}", file=sys.stderr)
    if out is None:
        print(found.to_csv(), end="")
    else:
        atomic_file.replace(out, found.to_csv().encode())
        print(out)
