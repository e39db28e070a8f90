"""From settings to a run with nodes on other machines, and from files to what a node holds.

The counterpart of plan.py: there the data are here, and a plan is ready at once; here nodes have to come first. When
enough of them have, all agree on what is trained, and the plan is carried out by training.py like any other.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from fedbudget import data
from fedbudget.data import files
from fedbudget.data.dataset import Dataset
from fedbudget.data.images import from_idx
from fedbudget.data.shards import Table
from fedbudget.engines.network import engine
from fedbudget.engines.network import wire_pb2 as pb
from fedbudget.engines.network.compression import Kind, Shortener
from fedbudget.engines.network.credentials import Tokens, aggregator_credentials, require_privacy
from fedbudget.engines.network.holdings import Holdings
from fedbudget.engines.network.hub import Hub
from fedbudget.engines.network.members import Counters, Member
from fedbudget.engines.network.metrics import Metrics
from fedbudget.engines.network.metrics import serving as serving_metrics
from fedbudget.engines.network.task import Asked, Samples, Task, agree, rounds_ahead
from fedbudget.engines.network.wire import KINDS, Farewell, task_in, task_out
from fedbudget.engines.network.work import Work
from fedbudget.errors import UserError
from fedbudget.meters import network_meters
from fedbudget.meters.meter import Meters, RoundTrip
from fedbudget.meters.rapl import Rapl
from fedbudget.models import catalogue
from fedbudget.models.base import Model
from fedbudget.plan import DEFAULT_BATCH, Plan, distribute, load_dataset, meters_of
from fedbudget.protocol.aggregator import Aggregator
from fedbudget.protocol.messages import PeerError
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.runs.record import RoundRecord
from fedbudget.runs.saver import Append, Saver
from fedbudget.runs.settings import FEDERATED, Settings

NODES = "nodes"
"""The dataset of a run whose data nobody has seen as a whole."""


@dataclass(frozen=True)
class Listening:
    """Where an aggregator is to be found, and by whom.

    Args:
      address: HOST:PORT.
      cert, key: for TLS.
      client_ca: who signs the certificates that nodes must have.
      token_file: with the token of all nodes, or one for each.
      insecure: plain text is meant, also beyond this machine.
      most: the most nodes to let in.
      metrics: HOST:PORT of the metrics' page, if there is one.
    """

    address: str
    cert: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    token_file: Path | None = None
    insecure: bool = False
    most: int = 1000
    metrics: str | None = None


class Interrupted(Exception):
    """While nodes were still being waited for."""


@contextmanager
def serving(
    settings: Settings,
    listening: Listening,
    *,
    interrupted: Callable[[], bool],
    own: Holdings | None = None,
    test: Dataset | None = None,
    resumed: Checkpoint | None = None,
    opened: Callable[[Hub], None] = lambda hub: None,
    changed: Callable[[int], None] = lambda connected: None,
) -> Iterator[Plan]:
    """Listens, waits for nodes, and gives the plan of a run with them.

    Args:
      settings: `nodes` is how many to wait for.
      interrupted: whether to stop waiting.
      own: samples that the aggregator holds itself.
      test: samples to test on.
      resumed: where to go on from.
      opened: told when nodes can connect.
      changed: told how many nodes there are, when that changes.
    """
    if settings.method not in FEDERATED:
        raise UserError(f"{settings.method} descent is not made over a network; use --method {' or '.join(FEDERATED)}")
    credentials = aggregator_credentials(listening.cert, listening.key, listening.client_ca)
    require_privacy(listening.address, encrypted=credentials is not None, insecure=listening.insecure)
    tokens = Tokens.load(listening.token_file)
    with ExitStack() as stack:
        metrics = Metrics(settings.limits().limits)
        if listening.metrics is not None:
            stack.enter_context(serving_metrics(metrics, listening.metrics))
        shortener = Shortener(_kind(settings))
        hub = Hub(
            listening.address,
            run=secrets.token_hex(8) if resumed is None else str(resumed.engine["run"]),
            tokens=tokens,
            credentials=credentials,
            shortener=shortener,
            most=listening.most,
            changed=lambda connected: _told(connected, metrics, changed),
        )
        if own is not None:
            hub.hold(Work(own, device=settings.device, energy=Rapl.find()))
        hub.open()
        farewell = Farewell("the aggregator has stopped, and may go on later", again=True)
        try:
            opened(hub)
            plan = _gather(settings, hub, shortener, interrupted, test, resumed, metrics)
            yield plan
        except UserError as error:
            farewell = Farewell(str(error))
            raise
        except Interrupted:
            farewell = Farewell("the aggregator was interrupted")
            raise
        finally:
            hub.close(farewell)


def _told(connected: int, metrics: Metrics, changed: Callable[[int], None]) -> None:
    metrics.connected.set(connected)
    changed(connected)


def _gather(
    settings: Settings,
    hub: Hub,
    shortener: Shortener,
    interrupted: Callable[[], bool],
    test: Dataset | None,
    resumed: Checkpoint | None,
    metrics: Metrics,
) -> Plan:
    """Waits for nodes, and makes the plan."""
    least = settings.min_nodes or 1
    nodes = max(least, settings.nodes or 1)
    if resumed is None:
        if not hub.wait_for(nodes, interrupted):
            raise Interrupted
        settings, task, model = _agreed(settings, list(hub.descriptions().values()))
        hub.start(task)
    else:
        task = _recalled_task(resumed)
        model = _model(settings, task.samples)
        hub.start(task, _recalled_members(resumed))
    meters = meters_of(settings, network_meters)
    over = resumed is not None and resumed.memory.state == "done"  # only its summary is missing: nodes have gone home
    if not hub.wait_for(0 if over else nodes, interrupted, ready=True):
        raise Interrupted
    settings = replace(settings, nodes=nodes, dataset=NODES)
    options: dict[str, Any] = {
        "budget": meters.budget,
        "controller": settings.controller(),
        "step_size": settings.pacing(),
        "rounds": settings.rounds,
        "correct_drift": settings.corrects_drift,
        "delta": settings.delta_from,
        "settle": shortener.settle,
    }
    trial = engine.slowest(hub.trials())
    if resumed is None:
        vectors = 2 if settings.delta_from == "parameters" else 3
        wire_bytes = vectors * 4 * task.parameters * nodes
        trip = RoundTrip(
            1, nodes, wire_bytes, trial.step_seconds, trial.seconds, trial.step_cpu or 0.0, trial.cpu or 0.0
        )
        aggregator = Aggregator(model.initial(settings.seed), expected=meters.expect(trip), **options)
        aggregator.start()  # before the first checkpoint, which is of a run that has
    else:
        _restore(meters, hub.counters, resumed)
        aggregator = Aggregator.recall(resumed.memory, **options)
    keeper = _Keeper(aggregator, hub, meters, task, metrics, resumed)
    run = partial(
        engine.run,
        aggregator,
        hub,
        meters,
        least=least,
        timeout=settings.round_timeout,
        trial=trial,
        keep=keeper.keep_again,
    )
    described = task.samples.empty()
    return Plan(
        settings=settings,
        budget=meters.budget,
        dataset=replace(described, name=NODES),
        model=model,
        test=None if test is None else _test_table(test, task.samples, model),
        meters=meters,
        aggregator=aggregator,
        engine=run,
        repeatable=False,
        keeper=keeper,
        wake=hub.wake,
        resumed=resumed,
        attendance=hub.attendance,
        traffic=lambda: vars(hub.counters),
    )


def _agreed(settings: Settings, described: list[Samples]) -> tuple[Settings, Task, Model]:
    """What is trained, from what the nodes have."""
    samples = agree(described)
    smallest = min(size for each in described for size in each.sizes)
    if settings.batch_size is None:
        settings = replace(settings, batch_size=min(DEFAULT_BATCH, smallest))
    model = _model(settings, samples)
    controller, pacing = settings.controller(), settings.pacing()
    task = Task(
        settings.model,
        model.parameters,
        settings.batch_size if isinstance(settings.batch_size, int) else None,
        settings.seed,
        settings.clusters,
        _kind(settings),
        settings.tau if isinstance(settings.tau, int) else settings.tau_max,
        samples,
        Asked(
            estimate=controller.estimates or pacing.adapts,
            gradient=settings.delta_from == "gradient",
            curvature=pacing.adapts,
            drift=settings.corrects_drift,
            cpu="cpu" in settings.limits().limits,
        ),
    )
    for each in described:
        try:
            task.admit(each)
        except PeerError as error:
            raise UserError(f"a node's data do not fit: {error}") from None
    return settings, task, model


def _model(settings: Settings, samples: Samples) -> Model:
    dataset = samples.empty()
    model = catalogue.build(settings.model, dataset, clusters=settings.clusters, device=settings.device)
    dataset.table(dataset.train, model.target)  # refuses a target that the data have not
    return model


def _kind(settings: Settings) -> Kind:
    return next(kind for kind in KINDS if kind == (settings.compress or "none"))


def _test_table(test: Dataset, agreed: Samples, model: Model) -> Table:
    """Test samples as the model wants them, with everyone's class numbers and standardised as everyone's."""
    samples = test.train if test.test is None else test.test
    unknown = [name for name in test.classes if agreed.classes and name not in agreed.classes]
    if unknown:
        raise UserError(f"{test.name}, to test on, has class {unknown[0]!r}, which no node has")
    if test.features != prod(agreed.shape):
        raise UserError(f"{test.name}, to test on, has {test.features} features, and nodes' data {prod(agreed.shape)}")
    held = Holdings(replace(test, train=samples, test=None), [], standardise=True)
    dataset = held.as_agreed(agreed)
    return dataset.table(dataset.train, model.target)


# A run that goes on.


class _Keeper:
    """Saves where a run has come to."""

    def __init__(
        self, aggregator: Aggregator, hub: Hub, meters: Meters, task: Task, metrics: Metrics, resumed: Checkpoint | None
    ) -> None:
        self._aggregator = aggregator
        self._hub = hub
        self._meters = meters
        self._task = task_out(task).SerializeToString().hex()
        self._parameters = task.parameters
        self._metrics = metrics
        self._resumed = resumed
        self._saver: Saver | None = None

    def open(self, folder: Path, append: Append) -> None:
        records = () if self._resumed is None else self._resumed.records
        self._saver = Saver(folder, append, ahead=rounds_ahead(self._parameters), records=records)
        if self._resumed is None:
            self._save(None)
            self._saver.flush()  # there is something to go on from before the first node begins

    def keep(self, record: RoundRecord) -> None:
        self._save(record)
        self._metrics.observe(record)
        self._metrics.count(**vars(self._hub.counters))

    def keep_again(self) -> None:
        """With what was spent since the last round."""
        self._save(None)

    def close(self) -> None:
        if self._saver is not None:
            self._saver.flush()
            self._saver.close()

    def _save(self, record: RoundRecord | None) -> None:
        if self._saver is None:
            return
        members = {
            name: {
                "numbers": member.numbers.tolist(),
                "sizes": member.sizes.tolist(),
                "stands": member.stands,
                "lost": member.lost,
            }
            for name, member in self._hub.standing().items()
        }
        known = {
            "run": self._hub.run,
            "task": self._task,
            "members": members,
            "meters": self._meters.state(),
            "counters": vars(self._hub.counters).copy(),
        }
        self._saver.save(self._aggregator.memory(), known, record)


def _restore(meters: Meters, counters: Counters, resumed: Checkpoint) -> None:
    try:
        meters.restore(resumed.engine["meters"])
        for name, value in resumed.engine["counters"].items():
            setattr(counters, name, int(value))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the checkpoint does not say what the meters were at: {error}") from None


def _recalled_task(resumed: Checkpoint) -> Task:
    try:
        return task_in(pb.Task.FromString(bytes.fromhex(resumed.engine["task"])))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the checkpoint does not say what is trained: {error}") from None


def _recalled_members(resumed: Checkpoint) -> dict[str, Member]:
    try:
        return {str(name): _member(found) for name, found in resumed.engine["members"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the checkpoint does not say who takes part: {error}") from None


def _member(found: Mapping[str, Any]) -> Member:
    numbers, sizes = np.array(found["numbers"], np.int64), np.array(found["sizes"], np.int64)
    return Member(numbers, sizes, int(found["stands"]), bool(found["lost"]))


def same_settings(path: Path, saved: Settings, asked: Settings) -> None:
    """Refuses to go on with a run by other settings than its own."""
    for name, before in vars(saved).items():
        now = getattr(asked, name)
        if now != before:
            option = name.replace("_", "-")
            raise UserError(f"{path} goes on as it began: {option} is {before} there, and cannot be {now} now")


# What a node holds.


def from_file(path: Path, *, labels: Path | None = None, target: str | None = None) -> Holdings:
    """All samples of a `.csv`, a `.npz` or a pair of IDX files, as one node's."""
    if "idx" in path.name:
        dataset = from_idx(path, labels)
        return Holdings(dataset, [np.arange(len(dataset.train))])
    if path.is_dir():
        raise UserError(f"{path} is a folder; a node has a file of its own")
    dataset = files.load(path, target=target, test_share=0.0, standardise=False)
    return Holdings(dataset, [np.arange(len(dataset.train))], standardise=path.suffix == ".csv")


def from_dataset(settings: Settings, shard: str) -> Holdings:
    """A share of a dataset, as `fedbudget run` would give it to a node, for trials.

    Args:
      settings: the dataset, how it is given to nodes, and the seed.
      shard: 2/5 for the second of five nodes, 1-3/5 for the first three of them together.
    """
    first, last, of = _shard(shard)
    dataset = load_dataset(settings).sample(settings.train_samples, settings.test_samples, settings.seed)
    _, rows = distribute(replace(settings, nodes=of), dataset)
    return Holdings(dataset, rows[first - 1 : last])


def _shard(text: str) -> tuple[int, int, int]:
    """
    >>> _shard("2/5"), _shard("1-3/5")
    ((2, 2, 5), (1, 3, 5))
    """
    which, _, of = text.partition("/")
    first, _, last = which.partition("-")
    try:
        found = int(first), int(last or first), int(of)
    except ValueError:
        raise UserError(f"shard {text!r} is not understood; write I/N, such as 2/5 for the second of five") from None
    if not 1 <= found[0] <= found[1] <= found[2]:
        raise UserError(f"shard {text}: of {found[2]} shards there are 1 to {found[2]}")
    return found


def samples_to_test_on(name: str, settings: Settings) -> Dataset:
    """Samples to test on: those of a dataset, or all of a file that names none."""
    if name in data.DATASETS:
        return load_dataset(replace(settings, dataset=name))
    return files.load(Path(name), target=settings.target, test_share=0.0, standardise=False)
