"""Inputs of a run: dataset, model, and the samples of each node."""

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
from fedbudget.data.read_tables import PLAIN, from_frame, is_frame, is_table
from fedbudget.data.shards import Table
from fedbudget.data.tables import RawTable, TableOptions, require_usable
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.errors import UserError, as_user_error
from fedbudget.launch.prepared import NOTHING, Overrides
from fedbudget.models import catalogue
from fedbudget.models.base import KernelModel, Model
from fedbudget.models.own import load_model
from fedbudget.protocol.features.held_out import held_out_rows, share_for
from fedbudget.randomness import Stream, generator
from fedbudget.secure.graph import FEWEST
from fedbudget.settings.compatibility import DEFAULT_NODES, validates
from fedbudget.settings.settings import Settings

DEFAULT_BATCH = 100


@dataclass(frozen=True)
class TrainingInputs:
    """Dataset and model of a run.

    Args:
      settings: with absolute paths.
      dataset: with the requested number of samples.
      train, test: samples in the form of the model.
    """

    settings: Settings
    dataset: Dataset
    model: Model
    train: Table
    test: Table | None

    @classmethod
    def of(cls, settings: Settings, overrides: Overrides) -> "TrainingInputs":
        """Load the inputs that overrides do not replace."""
        dataset = overrides.dataset
        if dataset is None:
            dataset = load_dataset(settings)
            settings = with_absolute_paths(settings)
        dataset = dataset.sample(
            settings.train_samples, settings.test_samples, settings.seed
        )
        settings = with_model(settings, dataset, overrides.model)
        model = overrides.model or build_model(settings, dataset)
        if overrides.model is not None:
            _require_no_weights(settings)
        _require_two_classes(dataset, model)
        if settings.limits().by_noise is not None:
            dataset.require_public()
        train = dataset.table(dataset.train, model.target)
        test = None if dataset.test is None else dataset.table(dataset.test, model.target)
        return cls(settings, dataset, model, train, test)


def _require_two_classes(dataset: Dataset, model: Model) -> None:
    """Refuse to train a classifier on samples that all have the same class."""
    one_class = len(dataset.classes) == 1 and dataset.train.labels is not None
    if one_class and model.target in ("binary", "classes", "auto"):
        raise UserError(
            f"all samples of {dataset.name} have the same class, {dataset.classes[0]}: "
            "there is nothing to learn; check `target`"
        )


def load_dataset(settings: Settings) -> Dataset:
    """Return all samples of the dataset."""
    return data.load(
        settings.dataset,
        settings.table_options(),
        test_share=settings.test_share,
        data_dir=settings.data_dir,
        standardise=settings.standardise,
    )


def with_model(settings: Settings, dataset: Dataset, own: Model | None = None) -> Settings:
    """Return the settings with a model; by default one that fits the target of the data.

    Args:
      own: model object given from Python.
    """
    if settings.model is not None:
        return settings
    name = catalogue.default(dataset) if own is None else own_name(own)
    return replace(settings, model=name)


def own_name(model: Model) -> str:
    """Return the name of a model object in settings, never that of a built-in model."""
    taken = model.name in catalogue.MODELS and not isinstance(model, KernelModel)
    return f"own-{model.name}" if taken else model.name


def build_model(settings: Settings, dataset: Dataset) -> Model:
    """Return the model of the settings, with the size that the dataset needs."""
    if (own := own_model(settings)) is not None:
        _require_no_weights(settings)
        return own
    assert settings.model is not None
    options = catalogue.options(settings.model, vars(settings))
    return catalogue.build(
        settings.model,
        dataset,
        options,
        device=settings.device,
        class_weights=_class_weights(settings, dataset),
    )


def _require_no_weights(settings: Settings) -> None:
    if settings.class_weights is not None:
        raise UserError(
            "`class_weights` is for models that have a name; weight your own loss, or use "
            "TorchModel(..., class_weights=...)"
        )


def _class_weights(settings: Settings, dataset: Dataset) -> tuple[float, ...]:
    """Return the factor of each class's loss; empty if it is 1 for all."""
    weights = settings.class_weights
    if weights != "balanced":
        return weights or ()
    if dataset.train.labels is None:
        raise UserError(f"{dataset.name} has no classes for `class_weights` balanced")
    counts = np.bincount(dataset.train.labels, minlength=len(dataset.classes))
    balanced = counts.sum() / (len(counts) * np.maximum(counts, 1))
    return tuple(balanced.tolist())


def own_model(settings: Settings, overrides: Overrides = NOTHING) -> Model | None:
    """Return a custom model, from overrides or a file; None for a built-in model."""
    if overrides.model is not None:
        return overrides.model
    if settings.model is None or not python_file.is_reference(settings.model):
        return None
    return load_model(settings.model, device=settings.device)


def require_known_model(run: Path, model: str) -> None:
    """Refuse a model object of a run, which only its program can create again."""
    if model not in catalogue.MODELS and not python_file.is_reference(model):
        raise UserError(
            f"{run} has a model that was passed from Python, {model}: pass it again, or "
            "train with `model` net.py:NAME, which can be loaded again"
        )


def with_absolute_paths(settings: Settings) -> Settings:
    """Return the settings with absolute paths, to repeat the run from any folder."""
    if settings.dataset not in data.DATASETS:
        settings = replace(settings, dataset=str(Path(settings.dataset).resolve()))
    if settings.data_dir is not None:
        settings = replace(settings, data_dir=_absolute(settings.data_dir))
    return with_resolved_files(settings)


def with_resolved_files(settings: Settings) -> Settings:
    """Return the settings with the absolute paths of a custom model and a schema."""
    if settings.schema is not None:
        settings = replace(settings, schema=_absolute(settings.schema))
    if settings.model is None:
        return settings
    return replace(settings, model=python_file.resolved(settings.model))


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def distribute(settings: Settings, dataset: Dataset) -> tuple[Settings, partition.Rows]:
    """Return completed settings and the rows of each node."""
    settings = with_nodes(settings, dataset)
    assert settings.nodes is not None
    chosen = Partition.parse(str(settings.partition))
    if chosen.natural:
        return settings, partition.by_file(dataset.files)
    rng = generator(settings.seed, Stream.PARTITION)
    labels = dataset.partition_labels(settings.seed)
    return settings, partition.split(chosen, labels, settings.nodes, rng)


def with_nodes(settings: Settings, dataset: Dataset) -> Settings:
    """Return the settings with the number of nodes and the partition."""
    files = len(dataset.files)
    column = dataset.site_column
    default = f"by:{column}" if column else "files" if files else "case:1"
    chosen = Partition.parse(settings.partition or default)
    if chosen.by is not None and chosen.by != column:
        has = "no named columns" if column is None else f"the sites by:{column}"
        raise UserError(
            f"`partition` {chosen} does not fit {settings.dataset}: it has {has}"
        )
    nodes = settings.nodes or files or DEFAULT_NODES
    if chosen.natural and nodes != files:
        what = "file" if chosen.by is None else "site"
        raise UserError(
            f"`partition` {chosen} needs one {what} per node, but {settings.dataset} has "
            f"{files} for {nodes} nodes: omit `nodes`"
        )
    return replace(settings, nodes=nodes, partition=str(chosen))


def with_validation(settings: Settings, sizes: Sequence[int]) -> Settings:
    """Return the settings with the share of rows that nodes hold out.

    Args:
      sizes: number of samples of each node.
    """
    if settings.validation is not None:
        return settings
    share = share_for(sum(sizes)) if validates(settings) else 0.0
    # A masked sum over one or two nodes would reveal their losses.
    fewest = FEWEST if settings.secure_aggregation else 1
    if sum(held_out_rows(size, share) > 0 for size in sizes) < fewest:
        share = 0.0
    return replace(settings, validation=share)


def with_batch_size(settings: Settings, sizes: Sequence[int]) -> Settings:
    """Return the settings with the batch size, by default at most the median shard size."""
    if settings.batch_size is None and settings.privacy_unit == "sample":
        # Full shards need the least noise for their privacy cost (docs/guide/privacy.md).
        return replace(settings, batch_size="full")
    share = settings.validation or 0.0
    sizes = [size - held_out_rows(size, share) for size in sizes]
    if settings.batch_size is None:
        return replace(settings, batch_size=min(DEFAULT_BATCH, int(np.median(sizes))))
    batch = batch_of(settings)
    if batch is not None and batch > max(sizes):
        raise UserError(
            f"`batch_size` {batch} is larger than the largest shard, {max(sizes)} samples "
            f"of node {int(np.argmax(sizes))}; use a smaller batch, fewer nodes, or "
            "`batch_size` full"
        )
    return settings


def batch_of(settings: Settings) -> int | None:
    """Return the samples per mini-batch; None for full shards."""
    return settings.batch_size if isinstance(settings.batch_size, int) else None


OwnData = NodeData | Dataset | Shard | Callable[[], NodeData | Dataset | Shard]
"""Samples of a node: (x, y), y None without a target, or a function that returns them."""


def from_value(
    given: OwnData,
    name: str = "data",
    options: TableOptions = PLAIN,
    standardise: bool | None = None,
    *,
    test_share: float = 0.0,
    test: Any = None,
) -> NodeData:
    """Return samples given from Python as the data of one node.

    Args:
      name: name of the samples in errors.
      options: how a DataFrame is read.
      standardise: whether to standardise features over all nodes; by default only those of
        a DataFrame.
      test_share: fraction of the samples to hold out.
      test: separate samples to evaluate on, in the same form or in a file.
    """
    value: Any = files.readable(given() if callable(given) else given, name, options)
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
    """Return the samples of a table, a `.npz`, IDX files or FILE.py:NAME as one node.

    Args:
      options: how tables are read.
      labels: IDX file with the labels.
      standardise: whether to standardise features over all nodes; by default only those of
        tables.
      test_share: fraction of the samples to hold out.
      test: separate samples to evaluate on, in any of these forms.
    """
    held_back: Any = {"test_share": test_share, "test": test}
    if python_file.is_reference(str(path)):
        given = python_file.load(str(path))
        with as_user_error(f"{path} returns no samples"):
            return from_value(given, str(path), options, standardise, **held_back)
    if "idx" in path.name:
        return from_value(from_idx(path, labels), standardise=standardise, **held_back)
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the file of this node")
    if is_table(path):
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
    options = replace(options, site=None)  # a node is one site
    name = Path(table.name).name
    dataset = replace(files.from_tables(name, [table], options), files=())
    rows = [np.arange(len(table))]
    standardise = standardise is not False
    if options.schema is None:
        dataset = replace(dataset, raw=table)
        return NodeData(dataset, rows, standardise=standardise, impute=options.impute)
    if standardise:
        dataset = dataset.standardised(files.public_scale(options))
    return NodeData(dataset, rows)


def _with_test(
    data: NodeData, share: float, test: Any, options: TableOptions, standardise: bool | None
) -> NodeData:
    """Add samples to evaluate on: separate ones, or a held-out fraction."""
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
    raw = None if dataset.raw is None else dataset.raw.rows(rows)
    return replace(dataset, train=dataset.train.rows(rows), raw=raw)


def from_dataset(settings: Settings, shard: str) -> NodeData:
    """Return a shard of a dataset, the same as in `fedbudget run`, for trials.

    Args:
      settings: dataset, partition and seed.
      shard: 2/5 for the second of five nodes, 1-3/5 for the first three together.
    """
    first, last, nodes = _parse_shard(shard)
    dataset, rows = all_shares(settings, nodes)
    return NodeData(dataset, rows[first - 1 : last])


def all_shares(settings: Settings, nodes: int) -> tuple[Dataset, Rows]:
    """Return the dataset and the rows of each node."""
    dataset = load_dataset(settings).sample(
        settings.train_samples, settings.test_samples, settings.seed
    )
    return dataset, distribute(replace(settings, nodes=nodes), dataset)[1]


def dataset_to_test_on(name: str, settings: Settings) -> Dataset:
    """Return samples to test on, from a dataset or all of a file."""
    if name in data.DATASETS:
        return load_dataset(replace(settings, dataset=name))
    options = settings.table_options()
    if python_file.is_reference(name) or is_table(Path(name)):
        return from_file(Path(name), options, standardise=settings.standardise).dataset
    return files.load(Path(name), options, test_share=0.0, standardise=False)


def _parse_shard(text: str) -> tuple[int, int, int]:
    """Return the first and the last node, and the number of nodes.

    >>> _parse_shard("2/5"), _parse_shard("1-3/5")
    ((2, 2, 5), (1, 3, 5))
    """
    which, _, count = text.partition("/")
    first, _, last = which.partition("-")
    try:
        numbers = int(first), int(last or first), int(count)
    except ValueError:
        raise UserError(
            f"shard {text!r} must be I/N, such as 2/5 for the second of five nodes"
        ) from None
    if not 1 <= numbers[0] <= numbers[1] <= numbers[2]:
        raise UserError(f"shard {text}: shards are numbered from 1 to {numbers[2]}")
    return numbers
