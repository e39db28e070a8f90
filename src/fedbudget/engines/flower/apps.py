"""The two apps. What they do is imported when they do it: a process has one of them, and many last for one message."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

if TYPE_CHECKING:
    from fedbudget.engines.remote.node_data import NodeData


def server_app() -> ServerApp:
    """The aggregator, with the settings of the run's configuration."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from fedbudget.engines.flower.aggregator import aggregate

        aggregate(grid, context)

    return app


def client_app(data: "Callable[[Context], NodeData] | None" = None) -> ClientApp:
    """A node.

    Args:
      data: what the node holds, for data that are in no file; from the node's configuration when not given.
    """
    app = ClientApp()

    @app.query("describe")
    def describe(message: Message, context: Context) -> Message:
        from fedbudget.engines.flower import node

        return node.describe(message, context, data)

    @app.query("trial")
    def trial(message: Message, context: Context) -> Message:
        from fedbudget.engines.flower import node

        return node.trial(message, context, data)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        from fedbudget.engines.flower import node

        return node.train(message, context, data)

    return app
