"""What a program asks for from Python: arguments become settings, objects that take the place of what settings name,
and where to go on from.

The main path: a run that is ready is carried out, and gives a result and, where wanted, a run on disk.

The command line and the Python API both come through here.

Runs on real nodes, from Python: an aggregator and a node, each as the command of its name.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from fedbudget.budget.control import Controller
from fedbudget.budget.step_size import StepSize
from fedbudget.data.dataset import Dataset
from fedbudget.data.files import Shard, from_samples, from_shards
from fedbudget.data.shards import SampleSequence
from fedbudget.engines.engine import interruptible
from fedbudget.errors import UserError
from fedbudget.launch.execute import execute
from fedbudget.launch.inputs import own_name
from fedbudget.launch.prepared import Callback, Overrides
from fedbudget.launch.resume import CHANGEABLE, load_resumed
from fedbudget.launch.simulate import launch
from fedbudget.models.own import as_model
from fedbudget.protocol.combine import CombineRule
from fedbudget.protocol.update import UpdateRule
from fedbudget.result import Result
from fedbudget.runs.checkpoint import Checkpoint
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
    from fedbudget.models.own import OwnModel


@dataclass(frozen=True)
class RunArguments:
    """A run that is asked for.

    Args:
      out: its folder, if it is to have one.
      resumed: where it goes on from, if it does.
    """

    settings: Settings
    overrides: Overrides
    out: Path | None
    resumed: Checkpoint | None


def read_arguments(
    *,
    command: str,
    task: str | None,
    model: "str | OwnModel | None",
    budget: str | Sequence[str] | None,
    until: str | Sequence[str] | None,
    controller: Controller | None,
    step_size: float | str | StepSize | None,
    update: str | UpdateRule | None,
    combine: str | CombineRule | None,
    out: str | Path | None,
    resume: str | Path | None,
    options: SettingsOptions,
    case: int | None = None,
    dataset: str | Dataset | None = None,
    changeable: frozenset[str] = CHANGEABLE,
) -> RunArguments:
    """What a call of `fedbudget.train` or `fedbudget.serve` asks for.

    Args:
      command: the command that does the same, whose defaults are taken.
      changeable: settings that may be others when a run goes on.
    """
    own = (
        None
        if isinstance(model, str | None)
        else as_model(model, device=options.get("device", "auto"))
    )
    eta, own_step_size = (
        (step_size, None)
        if isinstance(step_size, int | float | str | None)
        else (None, step_size)
    )
    overrides = Overrides(
        dataset=dataset if isinstance(dataset, Dataset) else None,
        model=own,
        controller=controller,
        step_size=own_step_size,
        update=None if isinstance(update, str) else update,
        combine=None if isinstance(combine, str) else combine,
    )

    named: Any = {**options, "combine": combine} if isinstance(combine, str) else options

    def settings_with(**more: Any) -> Settings:
        return Settings.from_python(
            command=command,
            task=task,
            case=case,
            model=own_name(own)
            if own is not None
            else model
            if isinstance(model, str)
            else None,
            dataset=dataset.name if isinstance(dataset, Dataset) else dataset,
            until=until,
            step_size=eta,
            update=update if isinstance(update, str) else None,
            **more,
            **named,
        )

    if resume is None:
        return RunArguments(
            settings_with(budget=budget),
            overrides,
            None if out is None else Path(out),
            None,
        )
    if out is not None or task is not None:
        raise UserError(
            "`resume` goes on in the run's folder, with its settings; give neither `out` nor `task`"
        )
    folder = Path(resume)
    limits = (budget,) if isinstance(budget, str) else budget or ()
    settings, resumed = load_resumed(
        folder,
        lambda config: settings_with(config=config),
        limits,
        overrides,
        changeable=changeable,
    )
    return RunArguments(settings, overrides, folder, resumed)


if TYPE_CHECKING:
    from fedbudget.models.own import OwnModel


def train(
    *,
    task: str | None = None,
    model: "str | OwnModel | None" = None,
    dataset: str | Dataset | SampleSequence | None = None,
    shards: Sequence[Shard] | None = None,
    test: Shard | None = None,
    budget: str | Sequence[str] | None = None,
    until: str | Sequence[str] | None = None,
    case: int | None = None,
    controller: Controller | None = None,
    step_size: float | str | StepSize | None = None,
    update: str | UpdateRule | None = None,
    combine: str | CombineRule | None = None,
    callbacks: Sequence[Callback] = (),
    out: str | Path | None = None,
    resume: str | Path | None = None,
    track: str | Sequence[str] = (),
    engine: EngineName = "in-process",
    ray_address: str | None = None,
    actors: int | None = None,
    **options: Unpack[SettingsOptions],
) -> Result:
    """Trains a model under a budget; does what `fedbudget run` does.

    Args:
      task: settings by a name, such as `svm-sgd-mnist`, which the other arguments come before.
      model: a name, a PyTorch module or its class, or any `Model`, such as a `TorchModel` or a `FunctionModel` of your
        own.
      dataset: a name, a path, a `Dataset`, or samples to be given to nodes: a DataFrame with the column `target`, a
        map-style Dataset of PyTorch, or a list; not used when shards are given.
      shards: the nodes' data: (x, y) each, y None where there is nothing to predict, or samples as above.
      test: the same to test on, with shards or samples.
      budget: one limit or several, such as `["time=15s", "bytes=20MB"]`.
      until: one target or several, such as `"accuracy=0.95"`; the run ends when one is reached.
      case: 1 to 4, short for `partition="case:N"`.
      controller: chooses τ in place of the method's own.
      step_size: η, `auto`, or an object that chooses it.
      update: how the mean update moves w: a rule's name, such as `fedadam`, or an object; w becomes the mean when not
        given.
      combine: how nodes' updates become one: `mean`, `clipped`, `trimmed`, `median`, or an object.
      callbacks: each is called with the record of every round; the run ends after one for which it returns True.
      out: a folder for the run; nothing is written without it.
      resume: the folder of a run to go on with, by its own settings; objects that it was given are given again. With
        `budget` it has more to spend: `"time=+5s"` adds to its limit.
      track: where the run is followed besides its folder: `mlflow`, `tensorboard` or both.
      engine: `in-process`, `ray` for a cluster, or `network` for node processes on this machine.
      ray_address: of the Ray cluster; this machine when not given.
      actors: how many of Ray's processes share the nodes; one per core when not given.
      options: the other fields of `fedbudget.Settings`.

    >>> result = train(model="svm", dataset="digits", case=2, budget="time=2s")
    >>> result.stopped_by, sorted(result.spent)
    ('time', ['time'])
    """
    trackers = make_trackers((track,) if isinstance(track, str) else track)
    own_data = _own_data(dataset, shards, test, options)
    asked = read_arguments(
        command="run",
        task=task,
        case=case,
        model=model,
        dataset=dataset if own_data is None and isinstance(dataset, str) else own_data,
        budget=budget,
        until=until,
        controller=controller,
        step_size=step_size,
        update=update,
        combine=combine,
        out=out,
        resume=resume,
        options=options,
    )
    where: dict[str, Any] = {"engine": engine, "ray_address": ray_address, "actors": actors}
    with launch(
        asked.settings, asked.overrides, **where, resumed=asked.resumed
    ) as prepared:
        for warning in prepared.dataset.warnings:
            warnings.warn(str(UserError(warning)), stacklevel=2)
        return execute(prepared, out=asked.out, callbacks=callbacks, trackers=trackers)


def _own_data(
    dataset: str | Dataset | SampleSequence | None,
    shards: Sequence[Shard] | None,
    test: Shard | None,
    options: SettingsOptions,
) -> Dataset | None:
    """Data that was given from Python, if it was."""
    names = (
        "target",
        "drop",
        "categorical",
        "impute",
        "classes",
        "standardise",
        "test_share",
    )
    said: dict[str, Any] = {name: value for name, value in options.items() if name in names}
    settings = Settings(**said)
    tables = settings.table_options()
    standardise = settings.standardise
    if shards is not None:
        return from_shards(shards, test, tables, standardise=standardise)
    if isinstance(dataset, str | Dataset | None):
        return dataset if isinstance(dataset, Dataset) else None
    return from_samples(
        dataset, test, tables, test_share=settings.test_share, standardise=standardise
    )


if TYPE_CHECKING:
    from fedbudget.engines.remote.node_data import NodeData
    from fedbudget.launch.inputs import OwnData
    from fedbudget.models.own import OwnModel

File = str | os.PathLike[str]


def serve(
    address: str = "127.0.0.1:7700",
    *,
    model: "str | OwnModel | None" = None,
    budget: str | Sequence[str] | None = None,
    until: str | Sequence[str] | None = None,
    task: str | None = None,
    data: "OwnData | str | None" = None,
    test: "OwnData | str | None" = None,
    controller: Controller | None = None,
    step_size: float | str | StepSize | None = None,
    update: str | UpdateRule | None = None,
    combine: str | CombineRule | None = None,
    callbacks: Sequence[Callback] = (),
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
    """Is the aggregator: waits for nodes, and trains with them; does what `fedbudget serve` does.

    Args:
      address: HOST:PORT to listen on; port 0 for any, which is printed.
      model: a name; or your own, which nodes must have too: a PyTorch module or its class, any `Model`, what makes one
        of these, or a file and a name in it, such as `net.py:Net`.
      budget, until, task, controller, step_size, update, combine, callbacks, track: as of `fedbudget.train`.
      data: samples that the aggregator holds itself, as of `fedbudget.join`.
      test: what to test on: the same, or a dataset's name.
      out: a folder for the run, to go on from; nothing is written without it.
      resume: the folder of a run to go on with; a model that was given from Python is given again.
      cert, key: of this side, for TLS.
      client_ca: who signs the certificates that nodes must have, for mutual TLS.
      token_file: with the token of all nodes, or a line NAME TOKEN for each; the variable FEDBUDGET_TOKEN when not
        given.
      insecure: plain text, readable by all, also beyond this machine.
      max_nodes: the most nodes to let in.
      allow: names of the nodes that may come; any when not given.
      metrics_port: where /metrics is, for Prometheus: PORT, or HOST:PORT.
      energy_meter: of this machine, where it holds data.
      quiet: nothing is printed but what is wrong, and a port that nobody could know otherwise.
      options: the other fields of `fedbudget.Settings`; `nodes` is how many to wait for.
    """
    require_network()
    from fedbudget.launch.serve import Interrupted, serving, waiting

    trackers = make_trackers((track,) if isinstance(track, str) else track)
    asked = read_arguments(
        command="serve",
        task=task,
        model=model,
        budget=budget,
        until=until,
        controller=controller,
        step_size=step_size,
        update=update,
        combine=combine,
        out=None if out is None else Path(out),
        resume=None if resume is None else Path(resume),
        options=options,
        changeable=CHANGEABLE | {"nodes"},
    )
    settings = asked.settings
    own = _data(data, settings)
    tested = _tested(test, settings)
    security = _security(cert, key, token_file, insecure, client_ca=_path(client_ca))
    wanted = settings.nodes or settings.min_nodes or 1
    any_port = address.endswith(":0")
    with (
        waiting(wanted, quiet=quiet, any_port=any_port) as waits,
        interruptible(waits.wake) as interrupted,
    ):
        try:
            with serving(
                settings,
                ListenOptions(
                    address, max_nodes, allow=tuple(allow), metrics_port=metrics_port
                ),
                security,
                interrupted=interrupted,
                overrides=asked.overrides,
                own=own,
                energy_meter=energy_meter,
                test=tested,
                resumed=asked.resumed,
                opened=waits.opened,
                changed=waits.changed,
            ) as prepared:
                waits.over = True
                if not quiet:
                    for remark in prepared.dataset.remarks:
                        print(f"data: {UserError(remark)}", file=sys.stderr, flush=True)
                return execute(
                    prepared, out=asked.out, callbacks=callbacks, trackers=trackers
                )
        except Interrupted:
            raise KeyboardInterrupt from None


def join(
    address: str,
    *,
    data: "OwnData | str",
    model: "str | OwnModel | None" = None,
    name: str | None = None,
    target: str | None = None,
    drop: str | Sequence[str] | None = None,
    categorical: str | Sequence[str] | None = None,
    impute: Impute | None = None,
    classes: str | Sequence[str] | None = None,
    standardise: bool | None = None,
    labels: File | None = None,
    test_share: float = 0.0,
    test: "OwnData | str | None" = None,
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
    privacy_limit: float | None = None,
    privacy_account: File | None = None,
    privacy_delta: float = 1e-5,
    privacy_unit: PrivacyUnit = "node",
    secure_aggregation: bool = False,
    secure_threshold: float | None = None,
    identity: File | None = None,
    known_nodes: File | None = None,
    sent_log: File | None = None,
    give_up_after: float = 600.0,
    quiet: bool = False,
) -> int:
    """Is a node: trains on this machine's data until the run is over; does what `fedbudget join` does.

    Args:
      address: HOST:PORT of the aggregator.
      data: this node's samples, which stay here: (x, y), y None where there is nothing to predict; a map-style Dataset
        of PyTorch or a list of samples; a DataFrame; what gives one of these when it is called; a file, or a file and a
        name in it.
      model: your own, the same as the aggregator's, as of `fedbudget.serve`; not given for one that goes by a name.
      name: the node's; this machine's when not given.
      target: the column to predict, where data is a `.csv` or a DataFrame.
      drop, categorical, impute, classes, standardise: of such data, as in `fedbudget.Settings`; the same at all nodes.
      labels: the file with labels, where data is one of images in IDX.
      test_share: of the samples, how many are held back: the model is evaluated on them when the aggregator asks.
      test: samples to evaluate on, as of `data`, in place of a share.
      device: where PyTorch computes.
      ca: who signed the aggregator's certificate, for TLS.
      cert, key: of this node, for mutual TLS.
      token_file: with this node's token; the variable FEDBUDGET_TOKEN when not given.
      insecure: plain text, readable by all, also beyond this machine.
      energy_meter: what tells this machine's energy.
      pace, delay: to stand for a slower machine or network.
      min_batch, max_tau: the fewest samples in a mini-batch, and the most local updates in a round, that it will make.
      min_interval: seconds from one answer to the next, at least.
      privacy_limit, privacy_delta: the most ε, at this δ, that it tells in all private runs together.
      privacy_unit: what that ε is of: `node`, with all its samples, or each `sample`.
      privacy_account: the file that has what it told so far.
      secure_aggregation: take part only where sums are masked, so that the aggregator sees no report by itself.
      secure_threshold: the least share of a group, without which no sum is opened, that it agrees to.
      identity: the file of its key for masked sums, where it has no certificate; made where there is none.
      known_nodes: a file with a line NAME KEY for each other node.
      sent_log: a file that says what was sent.
      give_up_after: seconds until an aggregator that is not there is given up; `inf` for never.
      quiet: nothing is printed but what is wrong.

    Returns:
      in how many rounds it took part.
    """
    require_network()
    from fedbudget.launch.join import join as take_part

    said: dict[str, Any] = {
        "target": target,
        "drop": drop,
        "categorical": categorical,
        "classes": classes,
    }
    settings = Settings(**said, impute=impute, standardise=standardise)
    held = _data(data, settings, _path(labels), test_share=test_share, test=test)
    assert held is not None
    joining = JoinOptions(
        address,
        name=name,
        pace=pace,
        delay=delay,
        min_batch=min_batch,
        max_tau=max_tau,
        min_interval=min_interval,
        privacy_limit=privacy_limit,
        privacy_account=_path(privacy_account),
        privacy_delta=privacy_delta,
        privacy_unit=privacy_unit,
        secure_aggregation=secure_aggregation,
        secure_threshold=secure_threshold,
        identity=_path(identity),
        known_nodes=_path(known_nodes),
        sent_log=_path(sent_log),
        give_up_after=give_up_after,
        quiet=quiet,
    )
    security = _security(cert, key, token_file, insecure, ca=_path(ca))
    return take_part(
        joining,
        security,
        NodeOptions(energy_meter=energy_meter),
        held,
        model=model,
        device=device,
    )


def _security(
    cert: File | None,
    key: File | None,
    token_file: File | None,
    insecure: bool,
    **more: Path | None,
) -> SecurityOptions:
    own: dict[str, Any] = {
        "cert": _path(cert),
        "key": _path(key),
        "token_file": _path(token_file),
        **more,
    }
    return SecurityOptions(**own, insecure=insecure)


def _path(given: File | None) -> Path | None:
    return None if given is None else Path(given)


def _data(
    given: Any, settings: Settings, labels: Path | None = None, **held_back: Any
) -> "NodeData | None":
    from fedbudget.launch.inputs import from_file, from_value

    if given is None:
        return None
    options = settings.table_options()
    standardise = settings.standardise
    if isinstance(given, str | os.PathLike):
        return from_file(
            Path(given), options, labels=labels, standardise=standardise, **held_back
        )
    return from_value(given, "data", options, standardise, **held_back)


def _tested(given: Any, settings: Settings) -> Dataset | None:
    from fedbudget.launch.inputs import dataset_to_test_on, from_value

    if isinstance(given, str | None):
        return None if given is None else dataset_to_test_on(given, settings)
    return from_value(given, "test", settings.table_options()).dataset
