"""Rounds over a fleet of Flower's SuperNodes: a ServerApp and a ClientApp, to be named in a project's pyproject.toml.

    [tool.flwr.app.components]
    serverapp = "fedbudget.flower:server"
    clientapp = "fedbudget.flower:client"

The aggregator is in the ServerApp, a node in every ClientApp. What is said between them is what is said over any other
network, as Flower's records. A ClientApp's process lasts for one message: it imports little, what it needs for one kind
of message only when that comes, and what a node remembers is in its context.

Nothing is told to Flower's or Ray's makers from here, unless the person has turned that on.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

import fedbudget.engines.flower  # before Flower itself, which looks at what it sets  # noqa: F401

if TYPE_CHECKING:
    from fedbudget.engines.flower.node import NodeSetup
    from fedbudget.engines.remote.node_data import NodeData
    from fedbudget.result import Result
    from fedbudget.runs.record import RoundRecord

__all__ = ["client", "client_app", "server", "server_app"]


def server_app() -> ServerApp:
    """The aggregator, with the settings of the run's configuration."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        aggregate(grid, context)

    return app


def client_app(data: "Callable[[Context], NodeData] | None" = None) -> ClientApp:
    """A node.

    Args:
      data: what the node holds, for data that are in no file; from the node's configuration when not given.
    """
    app = ClientApp()

    def setup(context: Context) -> "NodeSetup":
        from fedbudget.launch.flower_configuration import node_setup

        return node_setup(context.node_config, context.run_config, None if data is None else data(context))

    @app.train()
    @app.query("trial")
    @app.query("describe")
    def reply(message: Message, context: Context) -> Message:
        from fedbudget.engines.flower import node

        return node.reply(message, context, setup)

    return app


def aggregate(grid: Grid, context: Context, *, plot: bool = True) -> "Result":
    """Makes the run that the configuration asks for; one whose nodes all fail is on disk too, as it was until then."""
    import secrets

    from fedbudget.engines.flower.grid import LOG, GridNodes
    from fedbudget.errors import UserError, WorkError
    from fedbudget.launch.flower import on_flower
    from fedbudget.launch.flower_configuration import read_run
    from fedbudget.training import default_folder, execute

    def log_round(record: "RoundRecord") -> None:
        spent = ", ".join(f"{name} {record.spent[name]:.4g}" for name in prepared.budget.limits)
        LOG.info("round %d: τ %d, loss %.4f, spent %s", record.round, record.tau, record.loss, spent)

    try:
        asked = read_run(context.run_config)
        nodes = GridNodes(grid, run=secrets.token_hex(8))
        prepared = on_flower(nodes, asked)
        out = (asked.out or default_folder(prepared.settings)).absolute()
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
    """What a run has come to, for people."""
    accuracy = "" if result.accuracy is None else f", accuracy {result.accuracy:.4f}"
    spent = ", ".join(f"{name} {result.spent[name]:.4g} of {limit:.4g}" for name, limit in result.budget.items())
    rounds = f"{result.aggregations} rounds, average τ {result.average_tau:.1f}"
    return [
        f"fedbudget: loss {result.loss:.4f}{accuracy}, {rounds}",
        f"fedbudget: spent {spent}; stopped by {result.stopped_by}",
        f"fedbudget: the run is in {result.run}",
    ]


server = server_app()
client = client_app()
