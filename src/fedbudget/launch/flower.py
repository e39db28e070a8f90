"""Runs on Flower: settings from the run configuration, data from node configurations.

The keys of a run configuration are those of config.toml. Flower has no lists in it, so
several limits of a budget are one text with commas. Flower accepts a key on its command
line only if the project defines it, so an empty text means that a key is not given.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import UserConfigValue

from fedbudget.data.tables import TableOptions
from fedbudget.engines.flower.grid import LOG, GridNodes
from fedbudget.engines.flower.node import NodeSetup
from fedbudget.engines.remote.node_data import NodeData, evaluation_table
from fedbudget.errors import UserError, key
from fedbudget.launch.inputs import (
    OwnData,
    all_shares,
    dataset_to_test_on,
    from_file,
    from_value,
    own_model,
    own_name,
    with_resolved_files,
)
from fedbudget.launch.method import build_meters, build_method
from fedbudget.launch.prepared import NOTHING, Overrides, PreparedRun
from fedbudget.launch.privacy import is_private, with_privacy
from fedbudget.launch.task import (
    NODES,
    agree_on_task,
    compression_of,
    prepare_remote,
    warm_up,
)
from fedbudget.models.base import Model
from fedbudget.models.description import describe
from fedbudget.models.own import as_model, load_model
from fedbudget.settings.compatibility import require_compatible
from fedbudget.settings.settings import Settings, defaults_of, read_settings
from fedbudget.trained.personal import save_result

if TYPE_CHECKING:
    from fedbudget.models.own import OwnModel

Config = Mapping[str, UserConfigValue]
"""A configuration as Flower reads it: texts, numbers and booleans by name."""

PARTITION = "partition-id"
PARTITIONS = "num-partitions"
"""Flower's keys of a node configuration for its part of a dataset."""

_SECTION = "[tool.flwr.app.config]"


@dataclass(frozen=True)
class FlowerRun:
    """A run as its configuration requests it.

    Args:
      out: folder at the ServerApp; a new one in runs/ by default.
      test: test samples at the ServerApp: the name of a dataset, or a file.
      overrides: objects given to the ServerApp.
    """

    settings: Settings
    out: Path | None = None
    test: str | None = None
    overrides: Overrides = NOTHING


def read_run(config: Config, model: "OwnModel | None" = None) -> FlowerRun:
    """Read the configuration of a run.

    Args:
      model: custom model that replaces the configured one.
    """
    given = {name: value for name, value in config.items() if value != ""}
    out = _text(given, "out")
    test = _text(given, "test")
    values = read_settings(given, _SECTION, also=("out", "test"))
    try:
        settings = Settings(**{**defaults_of("flower"), **values})
        require_compatible(settings, engine="flower")
    except UserError as error:
        raise UserError(f"{_SECTION}: {error.spelled(key)}") from None
    folder = None if out is None else Path(out).expanduser()
    if model is None:
        return FlowerRun(settings, folder, test)
    own = as_model(model, device=settings.device)
    return FlowerRun(
        replace(settings, model=own_name(own)), folder, test, Overrides(model=own)
    )


def node_data(node: Config, run: Config) -> NodeData:
    """Return the data of a node from its configuration and that of the run."""
    if "data" in node:
        labels = _text(node, "labels")
        settings = read_run(run).settings
        options = _table_options(node, settings)
        return from_file(
            Path(_text(node, "data") or ""),
            options,
            labels=None if labels is None else Path(labels),
            standardise=settings.standardise,
            **_held_back(node),
        )
    if PARTITION in node and PARTITIONS in node:
        number = _whole(node, PARTITION)
        of = _whole(node, PARTITIONS)
        if not 0 <= number < of:
            raise UserError(
                f"{PARTITION}={number}: partitions are numbered from 0 to {of - 1}"
            )
        dataset, rows = _shares(read_run(run).settings, of)
        return NodeData(dataset, [rows[number]])
    raise UserError(
        "a node has no data: start its SuperNode with --node-config \"data='FILE'\", or "
        "with "
        f'"{PARTITION}=I {PARTITIONS}=N" for a part of the dataset of the run (its keys: '
        f"{', '.join(node) or 'none'})"
    )


def partition_of(node: Config) -> int | None:
    """Return the number of a node's part of the dataset, if it has one."""
    if PARTITION in node and PARTITIONS in node and "data" not in node:
        return _whole(node, PARTITION)
    return None


def node_setup(
    node: Config, run: Config, own: OwnData | None = None, model: "OwnModel | None" = None
) -> NodeSetup:
    """Return the data and the model of a node.

    Args:
      own: data object, if the data is not in a file.
      model: custom model that replaces the configured one.
    """
    settings = read_run(run).settings
    device = settings.device
    if own is None:
        data = node_data(node, run)
        partition = partition_of(node)
    else:
        options = _table_options(node, settings)
        data = from_value(own, "data", options, settings.standardise, **_held_back(node))
        partition = None
    reference = _text(node, "model")
    trained: Model | None = None
    if model is not None:
        trained = as_model(model, device=device)
    elif reference is not None:
        trained = load_model(reference, device=device)
    folder = _text(node, "save-model")
    where = None if folder is None else Path(folder)
    return NodeSetup(
        data,
        partition,
        device,
        trained,
        keep_figures=bool(node.get("keep-figures", False)),
        batch_secret=_batch_secret(node, partition),
        on_result=lambda result: LOG.info("%s", save_result(result, where, reference)),
    )


def is_private_run(run: Config) -> bool:
    """Whether the configuration of a run limits privacy."""
    try:
        return is_private(read_run(run).settings)
    except UserError:
        return False  # such a run does not begin


# A process of a simulation is many nodes, one after the other.
_shares = lru_cache(maxsize=1)(all_shares)


def _table_options(node: Config, settings: Settings) -> TableOptions:
    """Return how the table of a node is read; its own keys replace those of the run."""
    schema = _text(node, "schema") or settings.schema
    options = replace(settings, schema=schema).table_options()
    return replace(options, target=_text(node, "target") or options.target)


def _text(config: Config, name: str) -> str | None:
    value = config.get(name)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{name} = {value!r} must be a text, in quotes")
    return value


def _batch_secret(node: Config, partition: int | None) -> int | None:
    """Return a secret of a node with own data; None if its mini-batches may be known.

    A part of the run's dataset is no secret of a node.
    """
    if partition is not None or node.get("seeded-batches", False):
        return None
    return secrets.randbits(128)


def _held_back(config: Config) -> dict[str, Any]:
    """Return which samples a node holds out to evaluate on."""
    share = config.get("test-share", 0.0)
    if isinstance(share, str | bool) or not 0 <= share < 1:
        raise UserError(f"test-share = {share!r} must be a number from 0 to below 1")
    return {"test_share": float(share), "test": _text(config, "test")}


def _whole(config: Config, name: str) -> int:
    value = config[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{name} = {value!r} must be a whole number")
    return value


def on_flower(nodes: GridNodes, run: FlowerRun) -> PreparedRun:
    """Wait for nodes and prepare a run with them."""
    settings = run.settings
    test = None if run.test is None else dataset_to_test_on(run.test, settings)
    method = build_method(settings)
    own = own_model(settings, run.overrides)
    trained = settings.model if own is None else describe(own)
    described = nodes.describe(max(settings.min_nodes or 1, settings.nodes or 1), trained)
    samples = [each.samples for each in described]
    settings, method, task, model = agree_on_task(settings, method, samples, own)
    table = None if test is None else evaluation_table(test, task.samples, model)
    warm_up(model, table)
    shared = all(each.partition is not None for each in described)
    number = sum(len(each.samples.sizes) for each in described)
    dataset = settings.dataset if shared else NODES
    settings = replace(settings, nodes=number, dataset=dataset)
    settings = with_privacy(with_resolved_files(settings))
    if method.private is not None:
        method = replace(method, private=replace(method.private, nodes=number))
    meters = build_meters(settings, network=True)
    trials = nodes.start(task, described)
    compress = compression_of(settings)
    nodes.compressor.kind = "none" if compress == "auto" else compress
    return prepare_remote(
        settings,
        method,
        meters,
        nodes,
        task=task,
        model=model,
        trials=trials,
        delay=nodes.mailbox.round_trip,
        test=table,
        compressor=nodes.compressor,
    )
