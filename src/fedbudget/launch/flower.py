"""A run with the nodes of a Flower fleet, that are behind its grid."""

from dataclasses import replace
from typing import Any

from fedbudget.engines.flower.grid import GridNodes
from fedbudget.engines.remote.node_data import table_to_test_on
from fedbudget.launch.flower_configuration import FlowerRun
from fedbudget.launch.inputs import own_model, with_resolved_model
from fedbudget.launch.masking import require_no_masks
from fedbudget.launch.meters import build_meters
from fedbudget.launch.method import build_method, require_known_workload
from fedbudget.launch.node_data import dataset_to_test_on
from fedbudget.launch.prepared import PreparedRun
from fedbudget.launch.privacy import with_privacy
from fedbudget.launch.task import NODES, agree_on_task, compression_of, prepare_remote, warm_up
from fedbudget.models.description import describe


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
    settings = with_privacy(with_resolved_model(replace(settings, nodes=number, dataset=dataset)), simulated=False)
    if method.private is not None:
        method = replace(method, private=replace(method.private, nodes=number))
    meters = build_meters(settings, network=True)
    trials, delay = nodes.start(task, described), nodes.mailbox.round_trip
    compress = compression_of(settings)
    nodes.compressor.kind = "none" if compress == "auto" else compress
    known: Any = {"task": task, "model": model, "test": table, "compressor": nodes.compressor}
    return prepare_remote(settings, method, meters, nodes, **known, trials=trials, delay=delay)
