"""The Flower apps: what they import, and that telemetry is off."""

import json
import os
import subprocess
import sys

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.supercore.object_ref import load_app, validate

from fedbudget import flower
from support.flower_processes import EXAMPLE

SWITCHES = (
    "FLWR_TELEMETRY_ENABLED",
    "FLWR_DISABLE_UPDATE_CHECK",
    "RAY_USAGE_STATS_ENABLED",
)


def run_in_new_process(program: str, **environment: str) -> object:
    clean = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    command = [sys.executable, "-c", f"import json, os, sys\n{program}"]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**clean, **environment}
    )
    return json.loads(done.stdout)


def test_flower_loads_both_apps() -> None:
    for name, kind in (("server", ServerApp), ("client", ClientApp)):
        assert validate(f"fedbudget.flower:{name}", project_dir=EXAMPLE) == (True, None)
        assert isinstance(load_app(f"fedbudget.flower:{name}", ValueError), kind)
    assert set(flower.__all__) == {"client", "client_app", "server", "server_app"}


def test_telemetry_is_off_by_default() -> None:
    show = "import fedbudget.flower\n"
    show += f"print(json.dumps([os.environ[name] for name in {SWITCHES}]))"
    assert run_in_new_process(show) == ["0", "1", "0"]
    assert run_in_new_process(show, FLWR_TELEMETRY_ENABLED="1") == ["1", "1", "0"]


def test_node_imports_little() -> None:
    """Every message to a node starts a new process."""
    heavy = [
        "matplotlib",
        "sklearn",
        "torch",
        "prometheus_client",
        "typer.rich_utils",
        "fedbudget.engines.grpc.server",
    ]
    heavy += ["fedbudget.engines.ray", "fedbudget.api", "fedbudget.launch.flower"]
    show = (
        "import flwr.clientapp; before = set(sys.modules)\n"
        "import fedbudget.flower; first = set(sys.modules) - before\n"
        "import fedbudget.engines.flower.node\n"
        f"loaded = [name for name in {heavy} if name in set(sys.modules) - before]\n"
        "print(json.dumps([len(first), loaded]))"
    )
    counted = run_in_new_process(show)
    assert isinstance(counted, list)
    assert counted[0] < 10  # modules before the first message
    assert counted[1] == []


def test_core_does_not_import_flower() -> None:
    show = "import fedbudget.launch.serve, fedbudget.api\n"
    show += "print(json.dumps('flwr' in sys.modules))"
    assert run_in_new_process(show) is False
