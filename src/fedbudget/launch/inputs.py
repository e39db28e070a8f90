"""What is trained on what: the dataset, the model, and which samples each node has.

A node's data, from files: all of one, or its share of a dataset; and what is tested on.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedbudget import data, python_file
from fedbudget.arrays import Int64
from fedbudget.data import files, partition
from fedbudget.data.builtin import from_idx
from fedbudget.data.dataset import Dataset, hold_out
from fedbudget.data.files import Shard, from_shards
from fedbudget.data.partition import Partition, Rows
from fedbudget.data.read_tables import PLAIN, from_frame, is_frame
from fedbudget.data.shards import Table
from fedbudget.data.tables import RawTable, TableOptions, require_usable
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.errors import UserError, explained
from fedbudget.launch.prepared import NOTHING, Overrides
from fedbudget.launch.privacy import require_no_masks
from fedbudget.models import catalogue
from fedbudget.models.base import KernelModel, Model
from fedbudget.models.own import load_model
from fedbudget.randomness import Stream, generator
from fedbudget.settings.settings import Settings

DEFAULT_BATCH = 100
DEFAULT_NODES = 5


@dataclass(frozen=True)
class TrainingInputs:
    """What is trained on what.

    Args:
      settings: as asked for, with paths that do not depend on where we are.
      dataset: of its samples, as many as were asked for.
      train, test: the samples as the model wants them.
    """

    settings: Settings
    dataset: Dataset
    model: Model
    train: Table
    test: Table | None

    @classmethod
    def of(cls, settings: Settings, overrides: Overrides) -> "TrainingInputs":
        """From what was given, or as the settings say."""
        require_no_masks(settings)
        dataset = overrides.dataset
        if dataset is None:
            dataset, settings = load_dataset(settings), from_any_folder(settings)
        dataset = dataset.sample(
            settings.train_samples, settings.test_samples, settings.seed
        )
        settings = with_model(settings, dataset, overrides.model)
        model = overrides.model or build_model(settings, dataset)
        train = dataset.table(dataset.train, model.target)
        test = None if dataset.test is None else dataset.table(dataset.test, model.target)
        return cls(settings, dataset, model, train, test)


def load_dataset(settings: Settings) -> Dataset:
    """All samples of the settings' dataset."""
    return data.load(
        settings.dataset,
        settings.table_options(),
        test_share=settings.test_share,
        data_dir=settings.data_dir,
        standardise=settings.standardise,
    )


def with_model(settings: Settings, dataset: Dataset, own: Model | None = None) -> Settings:
    """The settings with what is trained: where nothing was said, what fits the data's target.

    Args:
      own: the model, where it was given from Python.
    """
    if settings.model is not None:
        return settings
    return replace(
        settings, model=catalogue.default(dataset) if own is None else own_name(own)
    )


def own_name(model: Model) -> str:
    """What a model that was given from Python is called in settings: never as another that goes by its name there."""
    another = model.name in catalogue.MODELS and not isinstance(model, KernelModel)
    return f"own-{model.name}" if another else model.name


def build_model(settings: Settings, dataset: Dataset) -> Model:
    """The settings' model; one that goes by a name is of the size that the dataset needs."""
    if (own := own_model(settings)) is not None:
        return own
    assert settings.model is not None
    options = catalogue.options(settings.model, vars(settings))
    return catalogue.build(settings.model, dataset, options, device=settings.device)


def own_model(settings: Settings, overrides: Overrides = NOTHING) -> Model | None:
    """The person's own model, given from Python or in a file of theirs; None for one that goes by a name."""
    if (
        overrides.model is not None
        or settings.model is None
        or not python_file.is_reference(settings.model)
    ):
        return overrides.model
    return load_model(settings.model, device=settings.device)


def require_known_model(run: Path, model: str) -> None:
    """Refuses the model of a run that nothing but the program that gave it can make again."""
    if model not in catalogue.MODELS and not python_file.is_reference(model):
        raise UserError(
            f"{run} has a model that was given from Python, {model}: give it again there, or train with "
            "`model` net.py:NAME, which can be found again"
        )


def from_any_folder(settings: Settings) -> Settings:
    """The same with paths that do not depend on where we are, so that the run can be repeated from anywhere."""
    if settings.dataset not in data.DATASETS:
        settings = replace(settings, dataset=str(Path(settings.dataset).resolve()))
    if settings.data_dir is not None:
        settings = replace(
            settings, data_dir=str(Path(settings.data_dir).expanduser().resolve())
        )
    return with_resolved_model(settings)


def with_resolved_model(settings: Settings) -> Settings:
    """The same with a model of a person's own, if it is one, by a path that is right from any folder."""
    return (
        settings
        if settings.model is None
        else replace(settings, model=python_file.resolved(settings.model))
    )


def distribute(settings: Settings, dataset: Dataset) -> tuple[Settings, partition.Rows]:
    """The rows of each node, and the settings with what was decided."""
    settings = with_nodes(settings, dataset)
    assert settings.nodes is not None
    if settings.partition == "files":
        return settings, partition.by_file(dataset.files)
    rng = generator(settings.seed, Stream.PARTITION)
    labels = dataset.partition_labels(settings.seed)
    return settings, partition.split(
        Partition.parse(str(settings.partition)), labels, settings.nodes, rng
    )


def with_nodes(settings: Settings, dataset: Dataset) -> Settings:
    """The settings with how many nodes there are, and how data is given to them."""
    files = len(dataset.files)
    chosen = Partition.parse(settings.partition or ("files" if files else "case:1"))
    nodes = settings.nodes or files or DEFAULT_NODES
    if str(chosen) == "files" and nodes != files:
        raise UserError(
            f"partition files gives each node a file, but {settings.dataset} has {files} for {nodes} nodes"
        )
    return replace(settings, nodes=nodes, partition=str(chosen))


def with_batch_size(settings: Settings, sizes: Sequence[int]) -> Settings:
    """The settings with the size of mini-batches, from those of shards: no more than half of them have."""
    if settings.batch_size is None and settings.privacy_unit == "sample":
        return replace(
            settings, batch_size="full"
        )  # with which noise is the least for what it costs (docs/guide/privacy.md)
    if settings.batch_size is None:
        return replace(settings, batch_size=min(DEFAULT_BATCH, int(np.median(sizes))))
    batch = batch_of(settings)
    if batch is not None and batch > max(sizes):
        raise UserError(
            f"`batch_size` {batch} is larger than the largest shard, node {int(np.argmax(sizes))}'s {max(sizes)} "
            "samples; use a smaller batch, fewer nodes, or `batch_size` full"
        )
    return settings


def batch_of(settings: Settings) -> int | None:
    """Samples in a mini-batch; None for whole shards."""
    return settings.batch_size if isinstance(settings.batch_size, int) else None


OwnData = NodeData | Dataset | Shard | Callable[[], NodeData | Dataset | Shard]
"""A node's samples as a person may have them: (x, y), y None where there is nothing to predict, or what gives them."""


def from_value(
    given: OwnData,
    name: str = "data",
    options: TableOptions = PLAIN,
    standardise: bool | None = None,
    *,
    test_share: float = 0.0,
    test: Any = None,
) -> NodeData:
    """All samples that a person gives from Python, as one node's.

    Args:
      name: what to call them in errors.
      options: of a DataFrame.
      standardise: whether features are, together with those of all nodes; those of a DataFrame when not given.
      test_share: of them, how many are held back to evaluate on.
      test: others to evaluate on, in the same ways, or in a file.
    """
    value: Any = given() if callable(given) else given
    if is_frame(value):
        value = _from_table(from_frame(value, name, options), options, standardise)
    if isinstance(value, NodeData):
        return _with_test(value, test_share, test, options, standardise)
    if not isinstance(value, Dataset):
        value = replace(from_shards([value], None, options, names=[name]), name=name)
    if standardise is not None:
        value = replace(value, warnings=())
    data = NodeData(value, [np.arange(len(value.train))], standardise=bool(standardise))
    return _with_test(data, test_share, test, options, standardise)


def from_file(
    path: Path,
    options: TableOptions = PLAIN,
    *,
    labels: Path | None = None,
    standardise: bool | None = None,
    test_share: float = 0.0,
    test: Any = None,
) -> NodeData:
    """All samples of a `.csv`, a `.npz`, a pair of IDX files, or what a name in a Python file stands for, as one
    node's.

    Args:
      options: of tables.
      standardise: whether features are, together with those of all nodes; those of tables when not given.
      test_share: of them, how many are held back to evaluate on.
      test: others to evaluate on, in any of these ways.
    """
    held_back: Any = {"test_share": test_share, "test": test}
    if python_file.is_reference(str(path)):
        given = python_file.load(str(path))
        with explained(f"{path} gives no samples"):
            return from_value(given, str(path), options, standardise, **held_back)
    if "idx" in path.name:
        return from_value(from_idx(path, labels), standardise=standardise, **held_back)
    if path.is_dir():
        raise UserError(f"{path} is a folder; a node has a file of its own")
    if path.suffix == ".csv":
        data = _from_table(
            files.read_tables([path], options, path)[0], options, standardise
        )
        return _with_test(data, test_share, test, options, standardise)
    return from_value(
        files.load(path, options, test_share=0.0), standardise=standardise, **held_back
    )


def _from_table(
    table: RawTable, options: TableOptions, standardise: bool | None
) -> NodeData:
    require_usable([table])
    name = Path(table.name).name
    dataset = replace(files.from_tables(name, [table], options), files=(), raw=table)
    rows = [np.arange(len(table))]
    return NodeData(
        dataset, rows, standardise=standardise is not False, impute=options.impute
    )


def _with_test(
    data: NodeData, share: float, test: Any, options: TableOptions, standardise: bool | None
) -> NodeData:
    """The same with samples to evaluate on: others, or a share of its own that it then does not train on."""
    if test is not None:
        if share:
            raise UserError("give `test` or `test_share`, not both")
        if isinstance(test, str | os.PathLike):
            return replace(
                data, test=from_file(Path(test), options, standardise=standardise).dataset
            )
        return replace(data, test=from_value(test, "test", options, standardise).dataset)
    if not share:
        return data
    kept, held_back = hold_out(len(data.dataset.train), share)
    return replace(
        data,
        dataset=_only(data.dataset, kept),
        rows=[np.arange(len(kept))],
        test=_only(data.dataset, held_back),
    )


def _only(dataset: Dataset, rows: Int64) -> Dataset:
    """Some of a dataset's training samples."""
    raw = None if dataset.raw is None else dataset.raw.rows(rows)
    return replace(dataset, train=dataset.train.rows(rows), raw=raw)


def from_dataset(settings: Settings, shard: str) -> NodeData:
    """A share of a dataset, as `fedbudget run` would give it to a node, for trials.

    Args:
      settings: the dataset, how it is given to nodes, and the seed.
      shard: 2/5 for the second of five nodes, 1-3/5 for the first three of them together.
    """
    first, last, nodes = _parse_shard(shard)
    dataset, rows = all_shares(settings, nodes)
    return NodeData(dataset, rows[first - 1 : last])


def all_shares(settings: Settings, nodes: int) -> tuple[Dataset, Rows]:
    """The dataset, and the rows of each of so many nodes."""
    dataset = load_dataset(settings).sample(
        settings.train_samples, settings.test_samples, settings.seed
    )
    return dataset, distribute(replace(settings, nodes=nodes), dataset)[1]


def dataset_to_test_on(name: str, settings: Settings) -> Dataset:
    """Samples to test on: those of a dataset, or all of a file that names none."""
    if name in data.DATASETS:
        return load_dataset(replace(settings, dataset=name))
    options = settings.table_options()
    if python_file.is_reference(name) or Path(name).suffix == ".csv":
        return from_file(Path(name), options).dataset
    return files.load(Path(name), options, test_share=0.0, standardise=False)


def _parse_shard(text: str) -> tuple[int, int, int]:
    """
    >>> _parse_shard("2/5"), _parse_shard("1-3/5")
    ((2, 2, 5), (1, 3, 5))
    """
    which, _, count = text.partition("/")
    first, _, last = which.partition("-")
    try:
        numbers = int(first), int(last or first), int(count)
    except ValueError:
        raise UserError(
            f"shard {text!r} is not understood; write I/N, such as 2/5 for the second of five"
        ) from None
    if not 1 <= numbers[0] <= numbers[1] <= numbers[2]:
        raise UserError(f"shard {text}: of {numbers[2]} shards there are 1 to {numbers[2]}")
    return numbers
