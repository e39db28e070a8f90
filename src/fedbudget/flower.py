"""ServerApp and ClientApp for Flower, to be named in the pyproject.toml of a project.

    [tool.flwr.app.components]
    serverapp = "fedbudget.flower:server"
    clientapp = "fedbudget.flower:client"

The ServerApp is the aggregator, each ClientApp is a node. Their messages are those of every
network, as Flower's records. The process of a ClientApp lasts for one message, so imports
are lazy, and the state of a node is in its context.

Telemetry of Flower and Ray stays off unless the user has switched it on.
"""

from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Any

import fedbudget.engines.flower  # noqa: F401  # switches telemetry off, before flwr is imported

# isort: split
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

if TYPE_CHECKING:
    from fedbudget.engines.flower.node import NodeSetup
    from fedbudget.launch.inputs import OwnData
    from fedbudget.models.own import OwnModel
    from fedbudget.result import Result
    from fedbudget.runs.record import RoundRecord

__all__ = ["client", "client_app", "server", "server_app"]


def server_app(model: "OwnModel | None" = None) -> ServerApp:
    """Return the aggregator, with the settings of the run configuration.

    Args:
      model: custom model that replaces the configured one, the same as that of the nodes: a
        PyTorch module or its class, any `Model`, or a function that creates one.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        aggregate(grid, context, model=model)

    return app


def client_app(
    data: "OwnData | Callable[[Context], OwnData] | None" = None,
    *,
    model: "OwnModel | None" = None,
) -> ClientApp:
    """Return a node.

    Args:
      data: samples in a form of `fedbudget.join`, or a function from Flower's Context to
        samples; by default the node configuration names a file.
      model: custom model, the same as that of the ServerApp; by default that of the node
        configuration, if any.
    """
    app = ClientApp()

    def setup(context: Context) -> "NodeSetup":
        from fedbudget.launch.flower import node_setup

        own: Any = data
        if callable(own) and signature(own).parameters:
            own = own(context)
        return node_setup(context.node_config, context.run_config, own, model)

    @app.train()
    @app.query("trial")
    @app.query("describe")
    def reply(message: Message, context: Context) -> Message:
        from fedbudget.engines.flower import node
        from fedbudget.launch.flower import is_private_run

        private = is_private_run(context.run_config)
        return node.reply(message, context, setup, private=private)

    return app


def aggregate(
    grid: Grid, context: Context, *, model: "OwnModel | None" = None, plot: bool = True
) -> "Result":
    """Execute the configured run; it is on disk even if all nodes fail.

    Args:
      model: custom model that replaces the configured one.
    """
    import secrets

    from fedbudget.engines.flower.grid import LOG, GridNodes
    from fedbudget.errors import UserError, WorkError
    from fedbudget.launch.execute import default_folder, execute
    from fedbudget.launch.flower import on_flower, read_run

    def log_round(record: "RoundRecord") -> None:
        spent = ", ".join(
            f"{name} {record.spent[name]:.4g}" for name in prepared.budget.limits
        )
        LOG.info(
            "round %d: τ %d, loss %.4f, spent %s",
            record.round,
            record.tau,
            record.loss,
            spent,
        )

    try:
        run = read_run(context.run_config, model)
        nodes = GridNodes(grid, run=secrets.token_hex(8), max_share=run.settings.max_share)
        prepared = on_flower(nodes, run)
        out = (run.out or default_folder(prepared.settings)).absolute()
        result = execute(prepared, out=out, callbacks=[log_round], plot=plot)
        for line in summary(result):
            LOG.info("%s", line)
        if nodes.error:
            raise WorkError(nodes.error)
    except (UserError, WorkError) as error:
        LOG.error("%s", error)
        raise
    return result


def summary(result: "Result") -> list[str]:
    """Return the lines that report a result."""
    from fedbudget.runs.text import metrics_text, spread_text

    metrics = metrics_text(result.accuracy, result.metrics, result.to_beat)
    figures = ", ".join(filter(None, (f"loss {result.loss:.4f}", metrics)))
    name = "rmse" if result.accuracy is None else "accuracy"
    nodes = [spread_text(result.spread, name)] if result.spread else []
    spent = ", ".join(
        f"{name} {result.spent[name]:.4g} of {limit:.4g}"
        for name, limit in result.budget.items()
    )
    rounds = f"{result.aggregations} rounds, average τ {result.average_tau:.1f}"
    return [
        f"fedbudget: {figures}, {rounds}",
        *(f"fedbudget: {line}" for line in nodes),
        f"fedbudget: spent {spent}; stopped by {result.stopped_by}",
        f"fedbudget: the run is in {result.run}",
    ]


server = server_app()
client = client_app()
