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
from inspect import signature
from typing import TYPE_CHECKING, Any

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
    """The aggregator, with the settings of the run's configuration.

    Args:
      model: your own, the same as the nodes', in place of one that is named there: a PyTorch module or its class, any
        `Model`, or what makes one of these.
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
    """A node.

    Args:
      data: what the node holds, for data that are in no file: as of `fedbudget.join`, or a function from Flower's
        Context to that; from the node's configuration when not given.
      model: your own, the same as the ServerApp's; from the node's configuration when not given, if it is there.
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

        return node.reply(message, context, setup)

    return app


def aggregate(
    grid: Grid, context: Context, *, model: "OwnModel | None" = None, plot: bool = True
) -> "Result":
    """Makes the run that the configuration asks for; one whose nodes all fail is on disk too, as it was until then.

    Args:
      model: a person's own, in place of the one that is named there.
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
        asked = read_run(context.run_config, model)
        nodes = GridNodes(
            grid, run=secrets.token_hex(8), max_share=asked.settings.max_share
        )
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
    from fedbudget.runs.text import metrics_text, spread_text

    metrics = metrics_text(result.accuracy, result.metrics, result.to_beat)
    figures = ", ".join(filter(None, (f"loss {result.loss:.4f}", metrics)))
    nodes = (
        [spread_text(result.spread, "rmse" if result.accuracy is None else "accuracy")]
        if result.spread
        else []
    )
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
