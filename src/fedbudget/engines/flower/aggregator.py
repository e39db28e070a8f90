"""The aggregator, as Flower's ServerApp is called: from the run's configuration to a run on disk.

The counterpart of deployment.py, for nodes that are behind Flower's grid: when enough have come all agree on what is
trained, and the plan is carried out by the network engine and training.py like any other.
"""

import secrets
from collections.abc import Callable
from dataclasses import replace

from flwr.app import Context
from flwr.serverapp import Grid

from fedbudget.agreement import NODES, agreed, table_to_test_on
from fedbudget.engines.flower.configuration import Wanted, wanted
from fedbudget.engines.flower.grid import LOG, GridNodes
from fedbudget.engines.remote import engine
from fedbudget.engines.simulation import Observer
from fedbudget.errors import UserError, WorkError
from fedbudget.plan import Plan, meters_of
from fedbudget.protocol.aggregator import Aggregator, Outcome
from fedbudget.resources import round_usage
from fedbudget.runs.record import RoundRecord
from fedbudget.shares import samples_to_test_on
from fedbudget.training import Result, default_folder, execute


def aggregate(grid: Grid, context: Context, *, plot: bool = True) -> Result:
    """Makes the run that the configuration asks for; one whose nodes all fail is on disk too, as it was until then."""
    try:
        asked = wanted(context.run_config)
        nodes = GridNodes(grid, run=secrets.token_hex(8))
        plan = prepare(nodes, asked)
        out = (asked.out or default_folder(plan.settings)).absolute()
        result = execute(plan, out=out, watch=_tell(plan), plot=plot)
        for line in summary(result):
            LOG.info("%s", line)
        if nodes.trouble:
            raise WorkError(nodes.trouble)
    except (UserError, WorkError) as error:
        LOG.error("%s", error)
        raise
    return result


def prepare(nodes: GridNodes, asked: Wanted) -> Plan:
    """Waits for nodes, and gives the plan of a run with them."""
    settings, test = asked.settings, asked.test
    tested = None if test is None else samples_to_test_on(test, settings)
    least = settings.min_nodes or 1
    described = nodes.describe(max(least, settings.nodes or 1))
    settings, task, model = agreed(settings, [each.samples for each in described])
    table = None if tested is None else table_to_test_on(tested, task.samples, model)
    shared = all(each.partition is not None for each in described)
    number = sum(len(each.samples.sizes) for each in described)
    settings = replace(settings, nodes=number, dataset=settings.dataset if shared else NODES)
    meters = meters_of(settings, network=True)
    trial = round_usage(nodes.start(task, described)).delayed(nodes.round_trip)
    wire_bytes = (2 if settings.delta_from == "parameters" else 3) * 4 * task.parameters * number
    aggregator = Aggregator(
        model.initial(settings.seed),
        budget=meters.budget,
        controller=settings.controller(),
        step_size=settings.pacing(),
        expected=meters.expect(trial.as_round_of(number, wire_bytes)),
        rounds=settings.rounds,
        correct_drift=settings.corrects_drift,
        delta=settings.delta_from,
    )

    def run(*, observe: Observer, interrupted: Callable[[], bool]) -> Outcome:
        return engine.run(
            aggregator,
            nodes,
            meters,
            least=least,
            timeout=settings.round_timeout,
            trial=trial,
            observe=observe,
            interrupted=lambda: interrupted() or bool(nodes.trouble),
            keep=lambda: None,
        )

    return Plan(
        settings=settings,
        budget=meters.budget,
        dataset=replace(task.samples.empty(), name=settings.dataset),
        model=model,
        test=table,
        meters=meters,
        aggregator=aggregator,
        engine=run,
        repeatable=False,
        wake=nodes.wake,
        traffic=lambda: vars(nodes.counters),
    )


def summary(result: Result) -> list[str]:
    """What a run has come to, for people."""
    accuracy = "" if result.accuracy is None else f", accuracy {result.accuracy:.4f}"
    spent = ", ".join(f"{name} {result.spent[name]:.4g} of {limit:.4g}" for name, limit in result.budget.items())
    rounds = f"{result.aggregations} rounds, average τ {result.average_tau:.1f}"
    return [
        f"fedbudget: loss {result.loss:.4f}{accuracy}, {rounds}",
        f"fedbudget: spent {spent}; stopped by {result.stopped_by}",
        f"fedbudget: the run is in {result.run}",
    ]


def _tell(plan: Plan) -> Callable[[RoundRecord], None]:
    def tell(record: RoundRecord) -> None:
        spent = ", ".join(f"{name} {record.spent[name]:.4g}" for name in plan.budget.limits)
        LOG.info("round %d: τ %d, loss %.4f, spent %s", record.round, record.tau, record.loss, spent)

    return tell
