"""What a person has written: a run's configuration becomes settings, a node's becomes what it holds.

The keys of a run's configuration are those of a run's config.toml. Flower has no lists in it, so that several limits of
a budget are one text with commas; and it lets a key be given on the command line only where the project has it, so that
an empty text stands for what is not given.

A run with the nodes of a Flower fleet, that are behind its grid.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import UserConfigValue

from fedbudget.engines.flower.grid import GridNodes
from fedbudget.engines.flower.node import NodeSetup
from fedbudget.engines.remote.node_data import NodeData, table_to_test_on
from fedbudget.errors import UserError, key
from fedbudget.launch.inputs import (
    OwnData,
    all_shares,
    dataset_to_test_on,
    from_file,
    from_value,
    own_model,
    own_name,
    with_resolved_model,
)
from fedbudget.launch.method import build_meters, build_method, require_known_workload
from fedbudget.launch.prepared import NOTHING, Overrides, PreparedRun
from fedbudget.launch.privacy import require_no_masks, with_privacy
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
from fedbudget.settings.option import in_words
from fedbudget.settings.settings import FEDERATED, Settings, defaults_of, read_settings

if TYPE_CHECKING:
    from fedbudget.models.own import OwnModel

Config = Mapping[str, UserConfigValue]
"""As Flower reads it: names, and texts, numbers or truths."""

PARTITION = "partition-id"
PARTITIONS = "num-partitions"
"""Flower's own keys of a node's configuration, for its share of a dataset."""

_WHERE = "[tool.flwr.app.config]"


@dataclass(frozen=True)
class FlowerRun:
    """A run that is asked for.

    Args:
      out: its folder, at the ServerApp; a new one in runs/ when not given.
      test: what to test on, at the ServerApp: a dataset's name, or a file.
      overrides: what was given to the ServerApp from Python.
    """

    settings: Settings
    out: Path | None = None
    test: str | None = None
    overrides: Overrides = NOTHING


def read_run(config: Config, model: "OwnModel | None" = None) -> FlowerRun:
    """What a run's configuration asks for.

    Args:
      model: a person's own, in place of the one that is named there.
    """
    given = {name: value for name, value in config.items() if value != ""}
    out = _text(given, "out")
    test = _text(given, "test")
    found = read_settings(given, _WHERE, also=("out", "test"))
    try:
        settings = Settings(**{**defaults_of("flower"), **found})
    except UserError as error:
        raise UserError(f"{_WHERE}: {error.spelled(key)}") from None
    if settings.method not in FEDERATED:
        raise UserError(
            f"{_WHERE}: method = {settings.method!r} has no nodes; use {in_words(FEDERATED)}"
        )
    folder = None if out is None else Path(out).expanduser()
    if model is None:
        return FlowerRun(settings, folder, test)
    own = as_model(model, device=settings.device)
    return FlowerRun(
        replace(settings, model=own_name(own)), folder, test, Overrides(model=own)
    )


def node_data(node: Config, run: Config) -> NodeData:
    """What a node holds, by its configuration and the run's."""
    if "data" in node:
        path = _text(node, "data")
        labels = _text(node, "labels")
        settings = read_run(run).settings
        options = settings.table_options()
        options = replace(options, target=_text(node, "target") or options.target)
        how: Any = {
            "labels": None if labels is None else Path(labels),
            "standardise": settings.standardise,
        }
        return from_file(Path(path or ""), options, **how, **_held_back(node))
    if PARTITION in node and PARTITIONS in node:
        number = _whole(node, PARTITION)
        of = _whole(node, PARTITIONS)
        if not 0 <= number < of:
            raise UserError(
                f"{PARTITION}={number}: of {of} partitions there are 0 to {of - 1}"
            )
        dataset, rows = _shares(read_run(run).settings, of)
        return NodeData(dataset, [rows[number]])
    raise UserError(
        f"a node has no data: start its SuperNode with --node-config \"data='FILE'\", or with "
        f'"{PARTITION}=I {PARTITIONS}=N" for a share of the run\'s dataset (there is {", ".join(node) or "nothing"})'
    )


def partition_of(node: Config) -> int | None:
    """Which share of the run's dataset a node has, if that is what it has."""
    return (
        _whole(node, PARTITION)
        if PARTITION in node and PARTITIONS in node and "data" not in node
        else None
    )


def node_setup(
    node: Config, run: Config, own: OwnData | None = None, model: "OwnModel | None" = None
) -> NodeSetup:
    """How a node takes part.

    Args:
      own: what it holds, for data that are in no file.
      model: its own, in place of one that its configuration says where to find.
    """
    asked = read_run(run).settings
    if own is None:
        data = node_data(node, run)
    else:
        data = from_value(
            own, "data", asked.table_options(), asked.standardise, **_held_back(node)
        )
    device = asked.device
    where = _text(node, "model")
    trained: Model | None = None
    if model is not None:
        trained = as_model(model, device=device)
    elif where is not None:
        trained = load_model(where, device=device)
    return NodeSetup(data, None if own is not None else partition_of(node), device, trained)


# In a simulation one process is many nodes, one after the other.
_shares = lru_cache(maxsize=1)(all_shares)


def _text(config: Config, name: str) -> str | None:
    value = config.get(name)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{name} = {value!r} must be a text, in quotes")
    return value


def _held_back(config: Config) -> dict[str, Any]:
    """What a node evaluates on, if anything."""
    share = config.get("test-share", 0.0)
    if isinstance(share, str | bool) or not 0 <= share < 1:
        raise UserError(
            f"test-share = {share!r} must be a number of at least 0 and below 1"
        )
    return {"test_share": float(share), "test": _text(config, "test")}


def _whole(config: Config, name: str) -> int:
    value = config[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{name} = {value!r} must be a whole number")
    return value


def on_flower(nodes: GridNodes, asked: FlowerRun) -> PreparedRun:
    """Waits for nodes, and gives a run with them."""
    settings = asked.settings
    test = None if asked.test is None else dataset_to_test_on(asked.test, settings)
    require_known_workload(settings)
    require_no_masks(settings)
    method = build_method(settings)
    own = own_model(settings, asked.overrides)
    trained = settings.model if own is None else describe(own)
    described = nodes.describe(max(settings.min_nodes or 1, settings.nodes or 1), trained)
    samples = [each.samples for each in described]
    settings, task, model = agree_on_task(settings, method, samples, own)
    table = None if test is None else table_to_test_on(test, task.samples, model)
    warm_up(model, table)
    shared = all(each.partition is not None for each in described)
    number = sum(len(each.samples.sizes) for each in described)
    dataset = settings.dataset if shared else NODES
    settings = with_privacy(
        with_resolved_model(replace(settings, nodes=number, dataset=dataset)),
        simulated=False,
    )
    if method.private is not None:
        method = replace(method, private=replace(method.private, nodes=number))
    meters = build_meters(settings, network=True)
    trials = nodes.start(task, described)
    delay = nodes.mailbox.round_trip
    compress = compression_of(settings)
    nodes.compressor.kind = "none" if compress == "auto" else compress
    known: Any = {
        "task": task,
        "model": model,
        "test": table,
        "compressor": nodes.compressor,
    }
    return prepare_remote(
        settings, method, meters, nodes, **known, trials=trials, delay=delay
    )
