"""Runs with remote nodes: agree on a task from their descriptions, then prepare the run.

All engines with remote nodes (gRPC and Flower) use this file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fedbudget.arrays import Flags
from fedbudget.budget.control import AdaptiveTau, Controller, FixedTau
from fedbudget.budget.spending import CarefulSpending
from fedbudget.data.agreement import describe_uneven_classes
from fedbudget.data.columns import category_name
from fedbudget.data.dataset import Dataset
from fedbudget.data.files import public_scale
from fedbudget.data.shards import Table
from fedbudget.engines.engine import RoundEngine
from fedbudget.engines.remote.members import OWN, samples_cap
from fedbudget.engines.remote.node_data import public_description
from fedbudget.engines.remote.policy import (
    CompressionChoice,
    Deadlines,
    Participation,
    RemotePolicy,
)
from fedbudget.engines.remote.round import RemoteNodes, capped_costs, evaluation_usage
from fedbudget.engines.remote.slow_nodes import SlowNodes
from fedbudget.engines.remote.tallies import expected_bytes
from fedbudget.engines.remote.task import (
    MOST_UPDATES,
    DataTerms,
    SamplesDescription,
    Task,
    agree,
)
from fedbudget.errors import UserError, flag
from fedbudget.launch.inputs import (
    batch_of,
    build_model,
    with_batch_size,
    with_model,
    with_validation,
)
from fedbudget.launch.method import (
    build_aggregator,
    build_method,
    solver_text,
    validation_of,
)
from fedbudget.launch.prepared import PreparedRun, attendance, evaluation_points
from fedbudget.launch.privacy import is_private
from fedbudget.models import catalogue
from fedbudget.models.base import Model, loss_over
from fedbudget.models.description import describe
from fedbudget.models.per_sample import require_per_sample
from fedbudget.protocol import sums
from fedbudget.protocol.features.compression import BroadcastCompressor, Compression
from fedbudget.protocol.features.feature import FeatureSettings
from fedbudget.protocol.features.newton import Newton
from fedbudget.protocol.features.sample_privacy import SamplePrivacy
from fedbudget.protocol.messages import CurvatureRound, PeerError
from fedbudget.protocol.method import Method
from fedbudget.resources import round_usage
from fedbudget.resources.meters import Meters
from fedbudget.resources.resource import Usage
from fedbudget.runs.checkpoint import Checkpoint
from fedbudget.settings.settings import Settings

NODES = "nodes"
"""Name of the dataset of a run whose data stays on its nodes."""

_SEEDS = 5
"""Nodes that all others are compared with, to find the majority."""

_MOST_REPORTED = 140_000
"""Numbers of all nodes of a process in a report; a message has a little more space."""

_CLOSING = 0.05
"""Seconds reserved to close a round in time on a busy machine."""


def agree_on_task(
    settings: Settings,
    method: Method,
    descriptions: Sequence[SamplesDescription],
    own: Model | None = None,
    *,
    names: Sequence[str] = (),
) -> tuple[Settings, Method, Task, Model]:
    """Return completed settings and method, the task and the model for the nodes' data.

    Args:
      own: custom model, if any.
      names: names of the nodes, for errors.
    """
    terms = data_terms(settings)
    for each in descriptions:
        try:
            terms.require(each)
        except PeerError as error:
            raise UserError(f"a node's data do not fit: {error}") from None
    samples = agree(descriptions, names, settings.classes)
    settings = with_model(settings, samples.empty(), own)
    sizes = [size for each in descriptions for size in each.sizes]
    settings = with_batch_size(with_validation(settings, sizes), sizes)
    model = model_for(settings, samples, own)
    if settings.method == "newton":
        method = build_method(settings, sizes=sizes, model=model)
        _require_short_reports(method, max(len(each.sizes) for each in descriptions))
    else:
        method = replace(
            method,
            validation=validation_of(settings, model),
            solver=solver_text(settings, model, sizes),
        )
    if any(isinstance(each, SamplePrivacy) for each in method.features):
        require_per_sample(model)
    assert settings.model is not None
    task = Task(
        settings.model if own is None else describe(own),
        model.parameters,
        batch_of(settings),
        settings.seed,
        catalogue.options(settings.model, vars(settings)) if own is None else {},
        compression_of(settings),
        _most_updates(method.controller),
        samples,
        tuple(map(FeatureSettings.of, method.features)),
        readings=tuple(settings.limits().limits),
        most_counted=(
            samples_cap([sum(each.sizes) for each in descriptions], settings.max_share)
            if settings.secure_aggregation
            else None
        ),
    )
    for each in descriptions:
        try:
            task.admit(each)
        except PeerError as error:
            raise UserError(f"a node's data do not fit: {error}") from None
    return settings, method, task, model


def _require_short_reports(method: Method, nodes: int) -> None:
    """Refuse derivatives of more nodes in one process than a message has space for."""
    assert isinstance(method.newton, Newton)
    numbers = len(method.newton.reported_finally(CurvatureRound).numbers)
    most = _MOST_REPORTED // numbers
    if nodes > most:
        raise UserError(
            f"with `method` newton and {numbers:,} numbers in a report, a process may have "
            f"at most {most} nodes, not {nodes}: use `method` accelerated"
        )


def with_newton_of(method: Method, task: Task) -> Method:
    """Return the method with the feature of Newton's method in a task, if it has one."""
    found = [each for each in task.built_features if isinstance(each, Newton)]
    return replace(method, newton=found[0]) if found else method


def data_terms(settings: Settings) -> DataTerms:
    """Return what the data of nodes must fulfil."""
    options = settings.table_options()
    classes = options.classes
    private = is_private(settings)
    if options.schema is not None:
        schema = options.schema
        dataset = Dataset.without_samples(
            "schema",
            (schema.layout.features,),
            "float64",
            schema.classes,
            values=not schema.classes,
            layout=schema.layout,
        )
        if settings.standardise is not False:
            dataset = dataset.standardised(public_scale(options))
        return DataTerms(None, private, public_description(dataset))
    allowed = None if classes is None else tuple(map(category_name, classes))
    return DataTerms(allowed, private)


def misfits(descriptions: Mapping[str, SamplesDescription]) -> dict[str, str]:
    """Return why data differ from the majority, by node; those of the aggregator are right.

    Raises `UserError` if no more than half of the nodes agree.
    """
    names = list(descriptions)
    try:
        agree(list(descriptions.values()), names)
        return {}
    except UserError as error:
        disagreement = error
    seeds = [OWN] if OWN in names else names[:_SEEDS]
    fewest = min((_misfits_with(seed, descriptions) for seed in seeds), key=len)
    rest = {name: each for name, each in descriptions.items() if name not in fewest}
    if not fewest or (OWN not in names and 2 * len(fewest) >= len(names)):
        raise disagreement
    agree(list(rest.values()), list(rest))
    return fewest


def _misfits_with(
    seed: str, descriptions: Mapping[str, SamplesDescription]
) -> dict[str, str]:
    reasons = {}
    for name, description in descriptions.items():
        try:
            if name != seed:
                agree([descriptions[seed], description], [seed, name])
        except UserError as error:
            reasons[name] = error.spelled(flag)
    return reasons


def remarks_on(descriptions: Mapping[str, SamplesDescription]) -> tuple[str, ...]:
    """Return remarks on the data of the nodes, for the user."""
    remark = describe_uneven_classes(
        {name: each.classes for name, each in descriptions.items()}
    )
    return () if remark is None else (remark,)


def _most_updates(controller: Controller) -> int:
    """Return the largest τ that nodes must accept."""
    if isinstance(controller, FixedTau):
        return controller.tau
    return controller.tau_max if isinstance(controller, AdaptiveTau) else MOST_UPDATES


def model_for(
    settings: Settings, samples: SamplesDescription, own: Model | None = None
) -> Model:
    """Return the custom model or that of the settings; refuse a missing target."""
    dataset = samples.empty()
    model = own or build_model(settings, dataset)
    dataset.table(dataset.train, model.target)
    return model


def compression_of(settings: Settings) -> Compression:
    """Return how vectors are encoded; masks and noise need all bits."""
    if settings.secure_aggregation or is_private(settings) or settings.method == "newton":
        return "none"
    return settings.compress or "auto"


def warm_up(model: Model, test: Table | None) -> None:
    """Load or compile everything that the aggregator uses, before the first round."""
    sums.prepare()
    if test is not None:
        w = model.initial(0)
        one = replace(test, x=test.x[:1], y=test.y[:1])
        loss_over(model, w, one)
        model.accuracy(w, one)


def prepare_remote(
    settings: Settings,
    method: Method,
    meters: Meters,
    nodes: RemoteNodes,
    *,
    task: Task,
    model: Model,
    trials: Sequence[Usage],
    delay: float = 0.0,
    test: Table | None = None,
    resumed: Checkpoint | None = None,
    compressor: BroadcastCompressor | None = None,
    remarks: tuple[str, ...] = (),
) -> PreparedRun:
    """Prepare a run with nodes that have their task and have made a trial round.

    Args:
      settings: `nodes` is the number of nodes.
      trials: costs of the trial round of each node.
      delay: seconds of a round that nodes cannot measure.
      test: samples to test on; without them, nodes with test samples evaluate.
      resumed: checkpoint to resume from.
      compressor: encoder of vectors with fewer bits.
      remarks: remarks on the data of the nodes.
    """
    assert settings.nodes is not None
    start: Any = resumed
    trials, _ = capped_costs(trials, time=True)
    trial = round_usage(trials).delayed(delay)
    nodes_test = test is None and task.samples.test_samples > 0
    if method.private is not None:
        nodes_test = False  # evaluations would reveal test samples
    if resumed is None:
        vectors = 2 if method.delta == "parameters" else 3
        wire_bytes = vectors * 4 * task.parameters * settings.nodes
        start = model.initial(settings.seed), trial.as_round_of(settings.nodes, wire_bytes)
    if meters.time.source == "measured" and isinstance(method.spending, CarefulSpending):
        closing = min(_CLOSING, 0.01 * meters.budget.limits.get("time", 0.0))
        evaluation = _evaluation_costs(meters, task, trials) if nodes_test else {}
        method = replace(
            method,
            spending=replace(method.spending, closing=closing, evaluation=evaluation),
        )
    quantize = None if compressor is None else compressor.quantize
    choice = None
    if compressor is not None and task.compress == "auto":
        measured = meters.time.source == "measured"
        budgeted = "bytes" in meters.budget.limits
        choice = CompressionChoice.first(
            compressor, task.parameters, budgeted=budgeted, measured=measured
        )
    aggregator = build_aggregator(
        method,
        meters,
        start,
        rounds=settings.rounds,
        quantize=quantize,
        statistics=model.statistics,
    )
    participation = None
    if settings.participation != 1:
        participation = Participation(partial(_attendance, settings))
    slow = None
    if settings.round_timeout is None and meters.time.source == "measured":
        slow = SlowNodes()
    evaluation_seconds = evaluation_usage(trials, 0).seconds if nodes_test else 0.0
    policy = RemotePolicy(
        nodes,
        meters,
        settings.min_nodes or 1,
        Deadlines(meters, settings.round_timeout, trial, evaluation_seconds),
        evaluation_points(settings) if nodes_test else None,
        choice,
        participation,
        slow,
    )
    return PreparedRun(
        settings=settings,
        dataset=replace(task.samples.empty(), name=settings.dataset, remarks=remarks),
        model=model,
        test=test,
        meters=meters,
        aggregator=aggregator,
        engine=RoundEngine(aggregator, nodes, meters, policy),
        repeatable=False,
        resumed=resumed,
        trial_seconds=trial.seconds,
        nodes_test=nodes_test,
    )


def _attendance(settings: Settings) -> Iterator[Flags]:
    """Draw who takes part in each round, as in a simulated run."""
    drawn = attendance(settings)
    assert drawn is not None
    return drawn


def _evaluation_costs(
    meters: Meters, task: Task, trials: Sequence[Usage]
) -> dict[str, float]:
    """Return the expected cost of an evaluation by all nodes, per resource."""
    testing = sum(bool(each.evaluation) for each in trials)
    tally = expected_bytes(
        task.samples.test_samples // max(1, testing), len(task.samples.classes)
    )
    costs = meters.expect(evaluation_usage(trials, testing * tally))
    return meters.budget.label(costs.step + costs.aggregation)
