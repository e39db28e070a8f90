"""Engine over Flower's SuperNodes; a Flower project names the apps of fedbudget.flower."""

import os

# Flower reads these when it is imported.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
