"""What is trained on what: the dataset, the model, and which samples each node has."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedbudget import data, python_file
from fedbudget.data import partition
from fedbudget.data.dataset import Dataset
from fedbudget.data.partition import Partition
from fedbudget.data.shards import Table
from fedbudget.errors import UserError
from fedbudget.launch.masking import require_no_masks
from fedbudget.launch.prepared import NOTHING, Overrides
from fedbudget.models import catalogue
from fedbudget.models.base import KernelModel, Model
from fedbudget.models.own import load_model
from fedbudget.randomness import Stream, generator
from fedbudget.settings import Settings

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
        dataset = dataset.sample(settings.train_samples, settings.test_samples, settings.seed)
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
    return replace(settings, model=catalogue.default(dataset) if own is None else own_name(own))


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
    if overrides.model is not None or settings.model is None or not python_file.is_reference(settings.model):
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
        settings = replace(settings, data_dir=str(Path(settings.data_dir).expanduser().resolve()))
    return with_resolved_model(settings)


def with_resolved_model(settings: Settings) -> Settings:
    """The same with a model of a person's own, if it is one, by a path that is right from any folder."""
    return settings if settings.model is None else replace(settings, model=python_file.resolved(settings.model))


def distribute(settings: Settings, dataset: Dataset) -> tuple[Settings, partition.Rows]:
    """The rows of each node, and the settings with what was decided."""
    settings = with_nodes(settings, dataset)
    assert settings.nodes is not None
    if settings.partition == "files":
        return settings, partition.by_file(dataset.files)
    rng = generator(settings.seed, Stream.PARTITION)
    labels = dataset.partition_labels(settings.seed)
    return settings, partition.split(Partition.parse(str(settings.partition)), labels, settings.nodes, rng)


def with_nodes(settings: Settings, dataset: Dataset) -> Settings:
    """The settings with how many nodes there are, and how data is given to them."""
    files = len(dataset.files)
    chosen = Partition.parse(settings.partition or ("files" if files else "case:1"))
    nodes = settings.nodes or files or DEFAULT_NODES
    if str(chosen) == "files" and nodes != files:
        raise UserError(f"partition files gives each node a file, but {settings.dataset} has {files} for {nodes} nodes")
    return replace(settings, nodes=nodes, partition=str(chosen))


def with_batch_size(settings: Settings, sizes: Sequence[int]) -> Settings:
    """The settings with the size of mini-batches, from those of shards: no more than half of them have."""
    if settings.batch_size is None and settings.privacy_unit == "sample":
        return replace(settings, batch_size="full")  # with which noise is the least for what it costs (docs/privacy.md)
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
