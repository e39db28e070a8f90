"""A run with the nodes of a Flower fleet, that are behind its grid."""

from dataclasses import replace

from fedbudget.engines.flower.grid import GridNodes
from fedbudget.launch.flower_configuration import FlowerRun
from fedbudget.launch.inputs import own_model
from fedbudget.launch.meters import build_meters
from fedbudget.launch.method import build_method
from fedbudget.launch.node_data import dataset_to_test_on
from fedbudget.launch.prepared import PreparedRun
from fedbudget.launch.task import NODES, agree_on_task, prepare_remote, table_to_test_on, warm_up
from fedbudget.models.description import describe
from fedbudget.python_file import resolved
from fedbudget.resources import round_usage


def on_flower(nodes: GridNodes, asked: FlowerRun) -> PreparedRun:
    """Waits for nodes, and gives a run with them."""
    settings = asked.settings
    test = None if asked.test is None else dataset_to_test_on(asked.test, settings)
    method = build_method(settings)
    own = own_model(settings, asked.overrides)
    trained = settings.model if own is None else describe(own)
    described = nodes.describe(max(settings.min_nodes or 1, settings.nodes or 1), trained)
    settings, task, model = agree_on_task(settings, method, [each.samples for each in described], own)
    table = None if test is None else table_to_test_on(test, task.samples, model)
    warm_up(model, table)
    shared = all(each.partition is not None for each in described)
    number = sum(len(each.samples.sizes) for each in described)
    dataset = settings.dataset if shared else NODES
    settings = replace(settings, nodes=number, dataset=dataset, model=resolved(settings.model))
    meters = build_meters(settings, network=True)
    trial = round_usage(nodes.start(task, described)).delayed(nodes.mailbox.round_trip)
    return prepare_remote(settings, method, meters, nodes, task=task, model=model, trial=trial, test=table)
