"""What the commands serve, join and local have in common."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedbudget.cli import options as o
from fedbudget.errors import UserError

if TYPE_CHECKING:
    from fedbudget.engines.remote.node_data import NodeData


def node_data(given: Mapping[str, Any], seed: int) -> "NodeData | None":
    """What this machine holds itself, if anything."""
    if given["data"] is None and given["shard"] is None:
        return None
    from fedbudget.launch.node_data import from_dataset, from_file

    if given["data"] is not None:
        if given["shard"] is not None or given["dataset"] is not None:
            raise UserError("give --data, or --dataset with --shard, not both")
        return from_file(given["data"], labels=given["labels"], target=given["target"])
    chosen = ("dataset", "case", "partition", "data_dir", "target", "test_share", "train_samples")
    settings = o.settings_from({name: given[name] for name in chosen})
    return from_dataset(replace(settings, seed=seed), given["shard"])
