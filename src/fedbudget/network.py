"""Runs on real nodes, from Python: an aggregator and a node, each as the command of its name."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from fedbudget.control import Controller
from fedbudget.data.dataset import Dataset
from fedbudget.engines.interrupt import interruptible
from fedbudget.errors import UserError
from fedbudget.launch.arguments import read_arguments
from fedbudget.launch.options import JoinOptions, ListenOptions, NodeOptions, SecurityOptions, require_network
from fedbudget.launch.prepared import Callback
from fedbudget.launch.resume import CHANGEABLE
from fedbudget.option import Impute
from fedbudget.protocol.combine import CombineRule
from fedbudget.protocol.update import UpdateRule
from fedbudget.result import Result
from fedbudget.setting_types import PrivacyUnit, SettingsOptions
from fedbudget.settings import Settings
from fedbudget.step_size import StepSize
from fedbudget.trackers import make_trackers
from fedbudget.training import execute

if TYPE_CHECKING:
    from fedbudget.engines.remote.node_data import NodeData
    from fedbudget.launch.node_data import OwnData
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
    from fedbudget.launch.serve import Interrupted, serving
    from fedbudget.launch.waiting import waiting

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
    own, tested = _data(data, settings), _tested(test, settings)
    security = _security(cert, key, token_file, insecure, client_ca=_path(client_ca))
    wanted, any_port = settings.nodes or settings.min_nodes or 1, address.endswith(":0")
    with waiting(wanted, quiet=quiet, any_port=any_port) as waits, interruptible(waits.wake) as interrupted:
        try:
            with serving(
                settings,
                ListenOptions(address, max_nodes, allow=tuple(allow), metrics_port=metrics_port),
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
                return execute(prepared, out=asked.out, callbacks=callbacks, trackers=trackers)
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

    said: dict[str, Any] = {"target": target, "drop": drop, "categorical": categorical, "classes": classes}
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
    return take_part(joining, security, NodeOptions(energy_meter=energy_meter), held, model=model, device=device)


def _security(
    cert: File | None, key: File | None, token_file: File | None, insecure: bool, **more: Path | None
) -> SecurityOptions:
    own: dict[str, Any] = {"cert": _path(cert), "key": _path(key), "token_file": _path(token_file), **more}
    return SecurityOptions(**own, insecure=insecure)


def _path(given: File | None) -> Path | None:
    return None if given is None else Path(given)


def _data(given: Any, settings: Settings, labels: Path | None = None, **held_back: Any) -> "NodeData | None":
    from fedbudget.launch.node_data import from_file, from_value

    if given is None:
        return None
    options, standardise = settings.table_options(), settings.standardise
    if isinstance(given, str | os.PathLike):
        return from_file(Path(given), options, labels=labels, standardise=standardise, **held_back)
    return from_value(given, "data", options, standardise, **held_back)


def _tested(given: Any, settings: Settings) -> Dataset | None:
    from fedbudget.launch.node_data import dataset_to_test_on, from_value

    if isinstance(given, str | None):
        return None if given is None else dataset_to_test_on(given, settings)
    return from_value(given, "test", settings.table_options()).dataset
