"""A node in the run of a remote aggregator, until the run ends or the user stops it."""

import asyncio
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import platformdirs

from fedbudget import python_file
from fedbudget.engines.grpc.credentials import (
    is_local,
    join_address,
    node_credentials,
    require_privacy,
    split_address,
)
from fedbudget.engines.grpc.masking_node import MaskingOptions
from fedbudget.engines.grpc.node import RefusedByAggregator, run_node
from fedbudget.engines.grpc.tokens import check_name, node_token
from fedbudget.engines.remote.node_data import NodeData
from fedbudget.engines.remote.node_limits import (
    BeyondLimits,
    NodeLimits,
    PrivacyAccount,
)
from fedbudget.engines.remote.worker import Worker
from fedbudget.errors import UserError, WorkError, flag, requires_package
from fedbudget.models.base import Model
from fedbudget.models.compiling import COMPILING, on_compiling
from fedbudget.models.own import as_model, load_model
from fedbudget.resources.energy import energy_reader
from fedbudget.secure.graph import FEWEST, THRESHOLD
from fedbudget.settings.compatibility import require_compatible
from fedbudget.settings.network import JoinOptions, NodeOptions, SecurityOptions
from fedbudget.settings.option import choices_text
from fedbudget.settings.types import PrivacyUnit
from fedbudget.trained.personal import save_result

if TYPE_CHECKING:
    from fedbudget.models.own import OwnModel

_FAREWELL = 0.5
"""Seconds for a stopping node to notify the aggregator."""


class SentLog:
    """Log of everything sent, one line of JSON for each report.

    Args:
      path: file to append to; None for no log.
      address: address of the aggregator.
    """

    def __init__(self, path: Path | None, address: str) -> None:
        self._path = path
        self._address = address
        if path is not None:
            self._write(path, {"sent": "description of samples", "to": address})

    def report(self, number: int, size: int) -> None:
        if self._path is not None:
            sent = {"sent": "report", "round": number, "bytes": size}
            self._write(self._path, {**sent, "to": self._address})

    def _write(self, path: Path, what: dict[str, object]) -> None:
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"time": round(time.time(), 3), **what}) + "\n")
        except OSError as error:
            raise WorkError(f"{path} cannot be written to: {error.strerror}") from None


def join(
    options: JoinOptions,
    security: SecurityOptions,
    node: NodeOptions,
    data: NodeData,
    *,
    model: "OwnModel | str | None" = None,
    device: str = "auto",
    log: Callable[[str, str], None] = lambda name, text: print(
        f"{name}: {text}", file=sys.stderr, flush=True
    ),
    exits: bool = False,
) -> int:
    """Take part until the end of the run or a signal; return the number of rounds.

    Args:
      data: samples of the node.
      model: custom model, its FILE:NAME such as `net.py:Net`, or the only accepted name.
      device: device for PyTorch.
      log: called with the name of the node and a message, unless `options.quiet`.
      exits: whether a signal may end this process during a computation, which cannot be
        stopped otherwise.
    """
    if not 1 <= options.pace < float("inf"):
        raise UserError(f"`pace` must be at least 1, not {options.pace:g}")
    if not 0 <= options.delay < float("inf"):
        raise UserError(f"`delay` must be at least 0 seconds, not {options.delay:g}")
    name = node_name(options.name, node.shard)
    where = join_address(*split_address(options.address))
    credentials = node_credentials(security.ca, security.cert, security.key)
    token = node_token(security.token_file)
    require_privacy(where, encrypted=credentials is not None, insecure=security.insecure)
    readers = {"energy": energy_reader(node.energy_meter)}
    limits = NodeLimits(options.min_batch, options.max_tau, options.min_interval)
    own = _own_model(model, device)
    own_title = model if isinstance(model, str) else None
    account = privacy_account(options, name, data)
    _require_identities(options, security, where)
    worker = Worker(
        data,
        device=device,
        pace=options.pace,
        model=own,
        readers=readers,
        limits=limits,
        account=account,
        keep_figures=options.keep_figures,
        batch_secret=None if options.seeded_batches else secrets.randbits(128),
        on_result=lambda result: report(save_result(result, options.save_model, own_title)),
    )
    with _refusals():
        worker.require_public()
    sent = SentLog(options.sent_log, where)
    masking = MaskingOptions(
        options.secure_aggregation,
        options.secure_threshold or THRESHOLD,
        options.secure_least,
        cert=security.cert,
        key=security.key,
        ca=security.ca,
        identity=options.identity,
        known=options.known_nodes,
    )

    def report(text: str) -> None:
        if not options.quiet:
            log(name, text)

    for remark in (*data.dataset.remarks, *data.dataset.warnings):
        report(UserError(remark).spelled(flag))

    async def until_the_end() -> None:
        taking_part = run_node(
            where,
            worker,
            name=name,
            token=token,
            credentials=credentials,
            patience=options.give_up_after,
            delay=options.delay,
            masking=masking,
            notify=report,
            on_report=sent.report,
        )
        node = asyncio.ensure_future(taking_part)
        loop = asyncio.get_running_loop()

        def stop() -> None:
            node.cancel()
            if exits:  # a computation in another thread ends only with the process
                loop.call_later(_FAREWELL, os._exit, 0)

        # Other threads receive no signals.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop)
        try:
            farewell = await node
            report(f"{farewell.reason}; took part in {worker.made} rounds")
        except asyncio.CancelledError:
            report(f"leaving; took part in {worker.made} rounds")
            if exits and worker.busy:
                sys.stderr.flush()
                os._exit(0)

    try:
        with (
            _refusals(),
            on_compiling(lambda: report(COMPILING)),
            ThreadPoolExecutor(1) as other_thread,
        ):
            if _has_event_loop():  # in a notebook
                other_thread.submit(asyncio.run, until_the_end()).result()
            else:
                asyncio.run(until_the_end())
    except RefusedByAggregator as refused:
        raise WorkError(str(refused)) from None
    return worker.made


@contextmanager
def _refusals() -> Iterator[None]:
    """Report what this node refuses as failed work: the command was not wrong."""
    try:
        yield
    except BeyondLimits as error:
        raise WorkError(error.args[0]) from None


def privacy_account(
    options: JoinOptions, name: str, data: NodeData
) -> PrivacyAccount | None:
    """Return the account of spent privacy, if the node has a limit.

    By default it has a file for the name of the node, and one for its samples.
    """
    require_compatible(
        privacy_limit=options.privacy_limit,
        privacy_account=options.privacy_account,
        privacy_delta=options.privacy_delta,
        privacy_unit=options.privacy_unit,
    )
    if options.privacy_limit is None:
        return None
    if options.privacy_unit not in get_args(PrivacyUnit):
        raise UserError(
            f"`privacy_unit` must be {choices_text(get_args(PrivacyUnit))}, not "
            f"{options.privacy_unit!r}"
        )
    per_sample = options.privacy_unit == "sample"
    given = options.privacy_account
    samples = data.fingerprint
    folder = platformdirs.user_state_path("fedbudget")
    prefix = "privacy-samples-" if per_sample else "privacy-"
    account = PrivacyAccount(
        given or folder / f"{prefix}{name}.json",
        options.privacy_limit,
        options.privacy_delta,
        per_sample,
        others=() if given else (folder / "privacy-of-data" / f"{prefix}{samples}.json",),
        data=samples,
    )
    account.require_readable()
    return account


def _require_identities(
    options: JoinOptions, security: SecurityOptions, where: str
) -> None:
    """Refuse invalid key files, and keys that nobody verifies, before connecting."""
    if options.secure_least is not None and options.secure_least < FEWEST:
        raise UserError(f"`secure_least` must be at least {FEWEST}")
    verified = security.cert is not None or options.known_nodes is not None
    if options.trust_first and verified:
        raise UserError(
            "`trust_first` is for nodes without `cert` and `known_nodes`, which verify keys"
        )
    if options.secure_aggregation and not (
        verified or options.trust_first or is_local(where)
    ):
        raise UserError(
            "`secure_aggregation` needs verified keys of other nodes, or the aggregator "
            "could replace them: give this node a certificate (`cert`, `key`, `ca`) or the "
            "keys of the others (`known_nodes`), or accept the first key of each with "
            "`trust_first`"
        )
    if options.identity is None and options.known_nodes is None:
        return
    with requires_package("secure aggregation", "network"):
        from fedbudget.secure.identity import identity_of, trust_of
    trust_of(security.ca if security.cert is not None else None, options.known_nodes)
    identity_of(security.cert, security.key, options.identity)


def _has_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _own_model(given: "OwnModel | str | None", device: str) -> Model | str | None:
    if isinstance(given, str) and python_file.is_reference(given):
        return load_model(given, device=device)
    if given is None or isinstance(given, str):
        return given
    return as_model(given, device=device)


def node_name(name: str | None, shard: str | None) -> str:
    """Return the checked name of a node, by default from its shard or its machine."""
    if name is None:
        name = socket.gethostname() if shard is None else "node-" + shard.partition("/")[0]
    return check_name(name)
