"""What the commands serve, join and local have in common."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedbudget.cli import options as o
from fedbudget.errors import UserError
from fedbudget.option import declarations
from fedbudget.settings import Settings

if TYPE_CHECKING:
    from fedbudget.engines.remote.node_data import NodeData

TABLES = ("target", "drop", "categorical", "impute", "classes")
"""The options that say what is in a table."""


def node_data(given: Mapping[str, Any], seed: int, test: str | None = None) -> "NodeData | None":
    """What this machine holds itself, if anything.

    Args:
      test: what it evaluates on, besides that.
    """
    if given["data"] is None and given["shard"] is None:
        return None
    from fedbudget.launch.node_data import from_dataset, from_file

    if given["data"] is not None:
        if given["shard"] is not None or given["dataset"] is not None:
            raise UserError("give --data, or --dataset with --shard, not both")
        settings = o.settings_from({name: given[name] for name in (*TABLES, "standardise")})
        share = given["test_share"]
        share = 0.0 if share is None else declarations(Settings)["test_share"].converted(share, text=True)
        how: Any = {"labels": given["labels"], "standardise": settings.standardise}
        return from_file(given["data"], settings.table_options(), **how, test_share=share, test=test)
    if test is not None:
        raise UserError("--test goes with --data")
    chosen = ("dataset", "case", "partition", "data_dir", "test_share", "train_samples", "standardise", *TABLES)
    settings = o.settings_from({name: given[name] for name in chosen})
    return from_dataset(replace(settings, seed=seed), given["shard"])
