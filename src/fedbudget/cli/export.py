"""`fedbudget export`."""

from pathlib import Path

from fedbudget.cli.command import command
from fedbudget.cli.options import OWN_MODEL, RUN
from fedbudget.option import REQUIRED, option
from fedbudget.trained.formats import ExportFormat


@command
def export(
    *,
    run: Path = RUN,
    to: ExportFormat = option(
        REQUIRED, "torch (a program, or your own module's state_dict), onnx (a graph), or numpy (a .npz)."
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
