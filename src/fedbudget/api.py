"""The Python API: `train`, `serve` and `join`, and how their arguments become settings.

The command line calls the same functions of launch/. An argument may be a name, which
becomes a setting, or an object, which replaces the part of the run that the setting would
name.
"""

from __future__ import annotations  # `help(train)` shows these annotations as written

import os
import sys
import warnings
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from fedbudget.budget.control import Controller
from fedbudget.budget.step_size import StepSize
from fedbudget.data.dataset import Dataset
from fedbudget.data.files import Shard, from_samples, from_shards
from fedbudget.errors import UserError
from fedbudget.launch.execute import execute
from fedbudget.launch.inputs import dataset_to_test_on, from_file, from_value, own_name
from fedbudget.launch.prepared import Callback, Overrides, PreparedRun
from fedbudget.launch.progress import showing_progress
from fedbudget.launch.resume import CHANGEABLE, load_resumed
from fedbudget.launch.simulate import launch
from fedbudget.models.own import as_model
from fedbudget.protocol.combine import CombineRule
from fedbudget.protocol.features.feature import Feature
from fedbudget.protocol.update import UpdateRule
from fedbudget.result import Result
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.settings.compatibility import require_compatible
from fedbudget.settings.network import (
    JoinOptions,
    ListenOptions,
    NodeOptions,
    SecurityOptions,
    require_network,
)
from fedbudget.settings.option import Impute
from fedbudget.settings.settings import Settings
from fedbudget.settings.types import EngineName, PrivacyUnit, SettingsOptions
from fedbudget.trackers import make_trackers

if TYPE_CHECKING:
    from fedbudget.engines.remote.node_data import NodeData
    from fedbudget.launch.inputs import OwnData
    from fedbudget.models.own import OwnModel

File = str | os.PathLike[str]

_DATA_SETTINGS = (
    "target",
    "drop",
    "categorical",
    "impute",
    "missing",
    "classes",
    "standardise",
    "schema",
    "test_share",
    "partition",
)
"""Settings that describe how samples are read."""


def train(
    *,
    task: str | None = None,
    model: str | OwnModel | None = None,
    dataset: str | Dataset | Shard | None = None,
    shards: Sequence[Shard] | None = None,
    test: Shard | None = None,
    budget: str | Sequence[str] | None = None,
    until: str | Sequence[str] | None = None,
    nodes: int | str | None = None,
    case: int | None = None,
    controller: Controller | None = None,
    step_size: float | str | StepSize | None = None,
    update: str | UpdateRule | None = None,
    combine: str | CombineRule | None = None,
    features: Sequence[Feature] = (),
    callbacks: Callback | Sequence[Callback] = (),
    out: str | Path | None = None,
    resume: str | Path | None = None,
    track: str | Sequence[str] = (),
    engine: EngineName = "in-process",
    ray_address: str | None = None,
    actors: int | None = None,
    progress: bool | None = None,
    **options: Unpack[SettingsOptions],
) -> Result:
    """Train a model under a budget; the same as `fedbudget run`.

    Args:
      task: name of predefined settings, such as `svm-sgd-mnist`; other arguments override
        them.
      model: a name, a PyTorch module or its class, or any `Model`, such as a `TorchModel`
        or a `FunctionModel`.
      dataset: a name, a path, a `Dataset`, or samples to distribute over nodes: arrays
        (x, y), a DataFrame with the column `target`, a map-style Dataset of PyTorch or its
        DataLoader, a Dataset of Hugging Face, or a list. Use this or `shards`.
      shards: data of each node: (x, y), with y None without a target, or samples as above.
      test: test samples in the same form, with shards or samples.
      budget: one limit or several, such as `["time=15s", "bytes=20MB"]`.
      until: one target or several, such as `"accuracy=0.95"`; the run stops at the first
        one that is reached.
      nodes: number of nodes, or the column of tables whose values are the nodes; the same
        as `partition="by:COLUMN"`.
      case: 1 to 4, short for `partition="case:N"`.
      controller: object that chooses τ instead of the method.
      step_size: η, `auto`, or an object that chooses it.
      update: how the mean update changes w: the name of a rule, such as `fedadam`, or an
        object. By default the method decides.
      combine: how the updates of nodes are combined: `mean`, `clipped`, `trimmed`,
        `median`, or an object.
      features: additions of your own to every round; see `Feature`.
      callbacks: a function or several, called with the record of every round; the run stops
        when one returns True.
      out: folder of the run; without it nothing is written.
      resume: folder of a run to resume with its own settings. Pass again the objects that
        it was given. A `budget` extends its limits: `"time=+5s"`.
      track: additional trackers: `mlflow`, `tensorboard`, `wandb`.
      engine: `in-process`, `ray` for a cluster, or `network` for node processes on this
        machine.
      ray_address: address of the Ray cluster; this machine by default.
      actors: number of Ray processes that share the nodes; one per core by default.
      progress: whether to show a line with the last round; by default in a terminal and in
        a notebook.
      options: the other fields of `fedbudget.Settings`.

    Returns:
      the figures, the model and the record of every round.

    Raises:
      RunInterrupted: a KeyboardInterrupt, after Ctrl-C or SIGTERM. The run is saved, and
        the exception has its result.

    >>> result = train(model="svm", dataset="digits", case=2, budget="time=2s")
    >>> result.stopped_by, sorted(result.spent)
    ('time', ['time'])
    """
    trackers = make_trackers((track,) if isinstance(track, str) else track)
    if isinstance(nodes, str):
        if options.get("partition") is not None:
            raise UserError("`nodes` names a column already: omit `partition`")
        options["partition"] = f"by:{nodes}"
        nodes = None
    settings, overrides, folder, resumed = _read_arguments(
        "run",
        options,
        task=task,
        case=case,
        budget=budget,
        out=out,
        resume=resume,
        model=model,
        dataset=_own_dataset(dataset, shards, test, options),
        until=until,
        nodes=nodes,
        controller=controller,
        step_size=step_size,
        update=update,
        combine=combine,
        features=tuple(features) or None,
    )
    with launch(
        settings,
        overrides,
        engine=engine,
        ray_address=ray_address,
        actors=actors,
        resumed=resumed,
    ) as prepared:
        for warning in prepared.dataset.warnings:
            warnings.warn(str(UserError(warning)), stacklevel=2)
        with showing_progress(prepared, progress) as shown:
            result = execute(
                prepared,
                out=folder,
                callbacks=(*_listed(callbacks), *shown),
                trackers=trackers,
            )
    return result.uninterrupted()


def serve(
    address: str = "127.0.0.1:7700",
    *,
    model: str | OwnModel | None = None,
    budget: str | Sequence[str] | None = None,
    until: str | Sequence[str] | None = None,
    task: str | None = None,
    nodes: int | None = None,
    data: OwnData | str | None = None,
    test: OwnData | str | None = None,
    controller: Controller | None = None,
    step_size: float | str | StepSize | None = None,
    update: str | UpdateRule | None = None,
    combine: str | CombineRule | None = None,
    features: Sequence[Feature] = (),
    callbacks: Callback | Sequence[Callback] = (),
    out: File | None = None,
    resume: File | None = None,
    track: str | Sequence[str] = (),
    cert: File | None = None,
    key: File | None = None,
    client_ca: File | None = None,
    token_file: File | None = None,
    insecure: bool = False,
    max_nodes: int = 1000,
    allow: Sequence[str] = (),
    metrics_port: str | None = None,
    energy_meter: str | None = None,
    quiet: bool = False,
    **options: Unpack[SettingsOptions],
) -> Result:
    """Run the aggregator: wait for nodes and train; the same as `fedbudget serve`.

    Args:
      address: HOST:PORT to listen on; port 0 selects a free port, which is printed.
      model: a name, or a custom model that nodes need too: a PyTorch module or its class,
        any `Model`, a function that creates one, or a file and a name in it, such as
        `net.py:Net`.
      budget, until, task, controller, step_size, update, combine, features, callbacks,
        track: see `fedbudget.train`.
      nodes: number of nodes to wait for before the first round.
      data: samples of the aggregator itself, in a form of `fedbudget.join`.
      test: test samples in the same form, or the name of a dataset.
      out: folder of the run, needed to resume it; without it nothing is written.
      resume: folder of a run to resume; pass a custom model object again.
      cert, key: certificate and key of this aggregator, for TLS.
      client_ca: certificate authority of the nodes, for mutual TLS.
      token_file: file with one token for all nodes, or a line NAME TOKEN for each; the
        environment variable FEDBUDGET_TOKEN by default.
      insecure: allow unencrypted connections from other machines.
      max_nodes: maximum number of nodes.
      allow: names of the nodes that may join; all by default.
      metrics_port: PORT or HOST:PORT of the Prometheus metrics.
      energy_meter: energy meter of this machine, if it holds data.
      quiet: print only errors, and the port if `address` does not fix it.
      options: the other fields of `fedbudget.Settings`.

    Returns:
      the figures, the model and the record of every round.
    """
    require_network()
    from fedbudget.launch.serve import serve_run

    trackers = make_trackers((track,) if isinstance(track, str) else track)
    settings, overrides, folder, resumed = _read_arguments(
        "serve",
        options,
        task=task,
        budget=budget,
        out=out,
        resume=resume,
        model=model,
        until=until,
        nodes=nodes,
        controller=controller,
        step_size=step_size,
        update=update,
        combine=combine,
        features=tuple(features) or None,
    )
    require_compatible(settings, engine="network", data=data, energy_meter=energy_meter)

    def run(prepared: PreparedRun) -> Result:
        if not quiet:
            for remark in prepared.dataset.remarks:
                print(f"data: {UserError(remark)}", file=sys.stderr, flush=True)
        return execute(
            prepared, out=folder, callbacks=_listed(callbacks), trackers=trackers
        )

    result = serve_run(
        settings,
        ListenOptions(address, max_nodes, allow=tuple(allow), metrics_port=metrics_port),
        SecurityOptions(
            cert=_path(cert),
            key=_path(key),
            client_ca=_path(client_ca),
            token_file=_path(token_file),
            insecure=insecure,
        ),
        run,
        overrides=overrides,
        own=None if data is None else _node_data(data, settings),
        energy_meter=energy_meter,
        test=_test_dataset(test, settings),
        resumed=resumed,
        quiet=quiet,
    )
    return result.uninterrupted()


def join(
    address: str,
    *,
    data: OwnData | str,
    model: str | OwnModel | None = None,
    name: str | None = None,
    target: str | None = None,
    drop: str | Sequence[str] | None = None,
    categorical: str | Sequence[str] | None = None,
    impute: Impute | None = None,
    missing: str | Sequence[str] | None = None,
    classes: str | Sequence[str] | None = None,
    standardise: bool | None = None,
    schema: File | None = None,
    labels: File | None = None,
    test_share: float = 0.0,
    test: OwnData | str | None = None,
    device: str = "auto",
    ca: File | None = None,
    cert: File | None = None,
    key: File | None = None,
    token_file: File | None = None,
    insecure: bool = False,
    energy_meter: str | None = None,
    pace: float = 1.0,
    delay: float = 0.0,
    min_batch: int = 8,
    max_tau: int = 10_000,
    min_interval: float = 0.0,
    seeded_batches: bool = False,
    privacy_limit: float | None = None,
    privacy_account: File | None = None,
    privacy_delta: float = 1e-5,
    privacy_unit: PrivacyUnit = "node",
    secure_aggregation: bool = False,
    secure_threshold: float | None = None,
    identity: File | None = None,
    known_nodes: File | None = None,
    secure_least: int | None = None,
    trust_first: bool = False,
    sent_log: File | None = None,
    save_model: File | None = None,
    keep_figures: bool = False,
    give_up_after: float = 600.0,
    quiet: bool = False,
) -> int:
    """Run a node: train on the data of this machine; the same as `fedbudget join`.

    Args:
      address: HOST:PORT of the aggregator.
      data: samples of this node, which stay here: (x, y), with y None without a target; a
        map-style Dataset of PyTorch or a list of samples; a DataFrame; a function that
        returns one of these; a file, or a file and a name in it.
      model: custom model, the same as that of the aggregator (see `fedbudget.serve`); omit
        it for a model with a name.
      name: name of the node; the host name by default.
      target: column to predict, if data is a `.csv` or a DataFrame.
      drop, categorical, impute, classes, standardise: how such data is read, as in
        `fedbudget.Settings`; use the same values at all nodes.
      schema: TOML file with public ranges, categories and classes of a table.
      labels: file with the labels, if data is an IDX file of images.
      test_share: fraction of the samples to hold out; the aggregator may request an
        evaluation on them.
      test: samples to evaluate on, in a form of `data`, instead of `test_share`.
      device: device for PyTorch.
      ca: certificate authority of the aggregator, for TLS.
      cert, key: certificate and key of this node, for mutual TLS.
      token_file: file with the token of this node; the environment variable FEDBUDGET_TOKEN
        by default.
      insecure: allow an unencrypted connection to another machine.
      energy_meter: how this machine measures energy.
      pace, delay: simulate a slower machine or network.
      min_batch, max_tau: smallest mini-batch and largest number of local updates in a round
        that this node accepts.
      min_interval: minimum number of seconds between two replies.
      seeded_batches: draw mini-batches from the aggregator's seed, so that a run can be
        repeated to the bit. The aggregator then knows which samples are in each.
      privacy_limit, privacy_delta: largest total ε of all private runs, at this δ.
      privacy_unit: unit of that ε: `node`, with all its samples, or each `sample`.
      privacy_account: file with the privacy spent so far.
      secure_aggregation: join only runs with secure aggregation.
      secure_threshold: smallest fraction of a group that may open a sum.
      identity: file with the key of this node for secure aggregation, if it has no
        certificate; created if missing.
      known_nodes: file with a line NAME KEY for each other node.
      secure_least: smallest number of nodes in a masked sum at the start of a round; by
        default those in `known_nodes`, or 3.
      trust_first: trust the first key of each other node, without a certificate and
        `known_nodes`. The aggregator could replace it.
      sent_log: file that lists time and size of each report.
      save_model: folder for the models of this node at the end of a run with `personal`:
        its own in `model.safetensors`, and the global one in `global.safetensors`.
      keep_figures: do not send figures of this node's personal model.
      give_up_after: seconds to retry an unreachable aggregator; `inf` to retry forever.
      quiet: print only errors.

    Returns:
      the number of rounds in which the node took part.
    """
    require_network()
    from fedbudget.launch.join import join as take_part

    tables: dict[str, Any] = {
        "target": target,
        "drop": drop,
        "categorical": categorical,
        "missing": missing,
        "classes": classes,
        "schema": None if schema is None else str(schema),
    }
    settings = Settings(**tables, impute=impute, standardise=standardise)
    held_back = {"test_share": test_share, "test": test}
    options = JoinOptions(
        address,
        name=name,
        pace=pace,
        delay=delay,
        min_batch=min_batch,
        max_tau=max_tau,
        min_interval=min_interval,
        seeded_batches=seeded_batches,
        privacy_limit=privacy_limit,
        privacy_account=_path(privacy_account),
        privacy_delta=privacy_delta,
        privacy_unit=privacy_unit,
        secure_aggregation=secure_aggregation,
        secure_threshold=secure_threshold,
        identity=_path(identity),
        known_nodes=_path(known_nodes),
        secure_least=secure_least,
        trust_first=trust_first,
        sent_log=_path(sent_log),
        save_model=_path(save_model),
        keep_figures=keep_figures,
        give_up_after=give_up_after,
        quiet=quiet,
    )
    security = SecurityOptions(
        cert=_path(cert),
        key=_path(key),
        ca=_path(ca),
        token_file=_path(token_file),
        insecure=insecure,
    )
    return take_part(
        options,
        security,
        NodeOptions(energy_meter=energy_meter),
        _node_data(data, settings, _path(labels), **held_back),
        model=model,
        device=device,
    )


def _read_arguments(
    command: str,
    options: SettingsOptions,
    *,
    task: str | None,
    budget: str | Sequence[str] | None,
    out: File | None,
    resume: File | None,
    case: int | None = None,
    **given: Any,
) -> tuple[Settings, Overrides, Path | None, Checkpoint | None]:
    """Separate names, which become settings, from objects, which become overrides.

    Args:
      command: command of the same name, whose defaults apply.
      given: arguments that may be names or objects.

    Returns:
      settings, overrides, the folder of the run and the checkpoint to resume, if any.
    """
    named: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for name, value in given.items():
        if value is not None:
            is_setting = isinstance(value, Real | str) or name == "until"
            (named if is_setting else objects)[name] = value
    if "model" in objects:
        objects["model"] = as_model(objects["model"], device=options.get("device", "auto"))
        named["model"] = own_name(objects["model"])
    if "dataset" in objects:
        named["dataset"] = objects["dataset"].name
    overrides = Overrides(**objects)
    given_dataset = overrides.dataset
    own_data = given_dataset is not None and not given_dataset.published
    own = own_data or overrides.model is not None

    def settings_with(config: Path | None, **limits: Any) -> Settings:
        given = {**named, **limits}
        given = {name: value for name, value in given.items() if value is not None}
        return Settings.combined(
            {**options, **given},
            task=task,
            config=config,
            case=case,
            command=command,
            own=own,
        )

    if resume is None:
        limits = {} if budget is None else {"budget": budget}
        return settings_with(None, **limits), overrides, _path(out), None
    require_compatible(resume=resume, out=out, task=task)
    folder = Path(resume)
    settings, resumed = load_resumed(
        folder,
        settings_with,
        (budget,) if isinstance(budget, str) else budget or (),
        overrides,
        given=[*named, *objects],
        changeable=CHANGEABLE | {"nodes"} if command == "serve" else CHANGEABLE,
    )
    return settings, overrides, folder, resumed


def _own_dataset(
    dataset: str | Dataset | Shard | None,
    shards: Sequence[Shard] | None,
    test: Shard | None,
    options: SettingsOptions,
) -> str | Dataset | None:
    """Return data given as objects as a `Dataset`, and the name of a dataset as it is."""
    if shards is not None and dataset is not None:
        raise UserError("give `dataset` or `shards`, not both")
    given: Any = {name: value for name, value in options.items() if name in _DATA_SETTINGS}
    settings = Settings(**given)
    tables = settings.table_options()
    standardise = settings.standardise
    if shards is not None:
        share = options.get("test_share", 0.0)  # by default, shards are for training only
        return from_shards(shards, test, tables, test_share=share, standardise=standardise)
    if isinstance(dataset, str | Dataset | None):
        if test is not None:
            raise UserError(
                "`test` is for samples given from Python, as `dataset` or `shards`"
            )
        return dataset
    share = 0.0 if test is not None else settings.test_share
    return from_samples(dataset, test, tables, test_share=share, standardise=standardise)


def _node_data(
    given: Any, settings: Settings, labels: Path | None = None, **held_back: Any
) -> NodeData:
    options = settings.table_options()
    standardise = settings.standardise
    if isinstance(given, str | os.PathLike):
        return from_file(
            Path(given), options, labels=labels, standardise=standardise, **held_back
        )
    return from_value(given, "data", options, standardise, **held_back)


def _test_dataset(given: Any, settings: Settings) -> Dataset | None:
    if given is None:
        return None
    if isinstance(given, str):
        return dataset_to_test_on(given, settings)
    options = settings.table_options()
    return from_value(given, "test", options, settings.standardise).dataset


def _listed(callbacks: Callback | Sequence[Callback]) -> Sequence[Callback]:
    listed = callbacks if isinstance(callbacks, Sequence) else (callbacks,)
    if wrong := [each for each in listed if not callable(each)]:
        raise UserError(
            f"`callbacks` must be a function or a sequence of functions, not {wrong[0]!r}"
        )
    return listed


def _path(given: File | None) -> Path | None:
    return None if given is None else Path(given)
