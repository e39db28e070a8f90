"""Rounds over a fleet of Flower's SuperNodes: a ServerApp and a ClientApp, to be named in a project's pyproject.toml.

    [tool.flwr.app.components]
    serverapp = "fedbudget.engines.flower:server"
    clientapp = "fedbudget.engines.flower:client"

The aggregator is in the ServerApp, a node in every ClientApp. What is said between them is what is said over any other
network, as Flower's records. A ClientApp's process lasts for one message: it imports little, what it needs for one kind
of message only when that comes, and what a node remembers is in its context.

Nothing is told to Flower's or Ray's makers from here, unless the person has turned that on.
"""

import os

for _name, _value in (
    ("FLWR_TELEMETRY_ENABLED", "0"),
    ("FLWR_DISABLE_UPDATE_CHECK", "1"),
    ("RAY_USAGE_STATS_ENABLED", "0"),
):
    os.environ.setdefault(_name, _value)  # before Flower is imported, which looks at them

from fedbudget.engines.flower.apps import client_app, server_app  # noqa: E402

server = server_app()
client = client_app()

__all__ = ["client", "client_app", "server", "server_app"]
