"""The options that commands share and that are not settings, each declared once; and how options become settings."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from glob import escape, glob
from pathlib import Path
from typing import Any

from fedbudget import tasks
from fedbudget.errors import UserError
from fedbudget.option import REQUIRED, declarations, option
from fedbudget.settings import EngineName, Settings, defaults_of

_ONE_RUN = ("run", "serve", "local")
_OWN_DATA = ("serve", "join")


class Given(dict[str, Any]):
    """What was given on the command line, by name; None where it was not."""


def run_folders(start: str) -> list[str]:
    """Folders of runs whose path begins so."""
    configs = [glob(f"{escape(start)}{more}/config.toml") for more in ("*", "*/*")]  # noqa: PTH207, may be absolute
    return sorted(str(Path(path).parent) for paths in configs for path in paths)


RUN: Path = option(REQUIRED, "The folder of a run.", argument=True, values=run_folders)
JOBS: int | None = option(None, "How many runs at a time.", "engine", shown="one per core")


@dataclass(frozen=True)
class SourceOptions:
    """Where settings are taken from, and a short way to write one."""

    task: str | None = option(
        None,
        "Settings by a name, such as svm-sgd-mnist; see fedbudget tasks.",
        "most used",
        Settings.COMMANDS,
        values=lambda _: tasks.names(),
    )
    config: Path | None = option(
        None, "A TOML file with settings; options given here come first.", "most used", Settings.COMMANDS
    )
    case: int | None = option(
        None,
        "How data is spread: the paper's case 1, 2, 3 or 4; short for --partition case:N.",
        "most used",
        (*_ONE_RUN, "join"),
        shown="1",
    )


@dataclass(frozen=True)
class OutputOptions:
    """Where a run is written and shown."""

    out: Path | None = option(
        None,
        "The run's folder.",
        "most used",
        (*_ONE_RUN, "sweep"),
        shown="a new one in runs/",
        helps={"sweep": "The sweep's folder.  [default: sweeps/ and the file's name]"},
    )
    track: tuple[str, ...] = option(
        (),
        "Where the run is followed too: mlflow or tensorboard; may be repeated.",
        "output",
        _ONE_RUN,
        values=("mlflow", "tensorboard"),
    )
    dashboard: bool = option(False, "Show the run in a web page while it is made.", "output", _ONE_RUN)
    json: bool = option(False, "Print one JSON object and nothing else.", "output")


@dataclass(frozen=True)
class EngineOptions:
    """What makes a run."""

    engine: EngineName = option("in-process", "What makes the run: in-process, or ray, on a cluster.", "engine")
    ray_address: str | None = option(
        None, "Of the Ray cluster: HOST:PORT, ray://HOST:PORT or auto.", "engine", shown="this machine"
    )
    actors: int | None = option(
        None, "How many of Ray's processes share the nodes.", "engine", ("run",), shown="one per core"
    )

    def __post_init__(self) -> None:
        if self.ray_address is not None and self.engine != "ray":
            raise UserError("`ray_address` goes with `engine` ray")


@dataclass(frozen=True)
class SecurityOptions:
    """How a side of a connection shows who it is."""

    cert: Path | None = option(
        None, "This side's certificate, for TLS; a node needs one for mutual TLS. See fedbudget certs.", "network"
    )
    key: Path | None = option(None, "Its key.", "network")
    ca: Path | None = option(None, "Who signed the aggregator's certificate, for TLS.", "network", ("join",))
    client_ca: Path | None = option(
        None, "Who signs the certificates that nodes must have, for mutual TLS.", "network", ("serve",)
    )
    token_file: Path | None = option(
        None, "A file with the token of all nodes, or a line NAME TOKEN for each.", "network", shown="FEDBUDGET_TOKEN"
    )
    insecure: bool = option(False, "Plain text, readable by all, also beyond this machine.", "network")


@dataclass(frozen=True)
class NodeOptions:
    """What a machine that holds data has."""

    data: Path | None = option(
        None, "The node's own samples: a .csv, a .npz, or images in IDX (…-images-idx3-ubyte).", "most used", _OWN_DATA
    )
    labels: Path | None = option(None, "The labels that go with --data in IDX.", "data", _OWN_DATA, shown="beside it")
    shard: str | None = option(
        None,
        "For trials, in place of --data: of --dataset the share of node I among N, as I/N or I-J/N.",
        "data",
        _OWN_DATA,
    )
    energy_meter: str | None = option(
        None,
        "What tells a node's energy: rapl (its processors), codecarbon (an estimate), declared (the aggregator's "
        "--watts), or auto: rapl where it can be read, else declared.",
        "budget",
        shown="auto",
        values=("auto", "rapl", "codecarbon", "declared"),
    )


def settings_from(given: Mapping[str, Any], command: str = "run", **more: Any) -> Settings:
    """Settings from a command's options: those of `--config` or `--task`, if any, and before them those given.

    Args:
      more: takes the place of what was given.
    """
    given, known = {**given, **more}, declarations(Settings)
    return Settings.combined(
        {name: known[name].converted(value, text=True) for name, value in was_given(given, known)},
        **dict(was_given(given, declarations(SourceOptions))),
        defaults=defaults_of(command),
    )


def was_given(given: Mapping[str, Any], names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """What was given, of these names."""
    return ((name, given[name]) for name in names if given.get(name) not in (None, [], ()))
