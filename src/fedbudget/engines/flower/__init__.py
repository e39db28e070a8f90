"""Carries the conversation over a fleet of Flower's SuperNodes; a project names the apps of fedbudget.flower."""

import os

for _name, _value in (
    ("FLWR_TELEMETRY_ENABLED", "0"),
    ("FLWR_DISABLE_UPDATE_CHECK", "1"),
    ("RAY_USAGE_STATS_ENABLED", "0"),
):
    os.environ.setdefault(_name, _value)  # before Flower is imported, which looks at them
