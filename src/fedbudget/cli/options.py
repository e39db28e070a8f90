"""The options of training, said once for all commands that train, and how they become settings.

No option has a default here: what is not given comes from `--config` or `--task`, and what is not there, from
`Settings`.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedbudget import tasks
from fedbudget.errors import UserError
from fedbudget.settings import Settings

Task = Annotated[str | None, typer.Option(help="Settings by a name, such as svm-sgd-mnist; see fedbudget tasks.")]
Model = Annotated[
    str | None, typer.Option(help="What is trained: svm, linear, kmeans, softmax, mlp or cnn.  [default: svm]")
]
Dataset = Annotated[
    str | None,
    typer.Option(
        help="digits, mnist, fashion-mnist, cifar-10, energy, user-knowledge, or a path: a .csv, a .npz, or a folder "
        "with one per node.  [default: digits]"
    ),
]
DataDir = Annotated[
    str | None,
    typer.Option(help="Where datasets are looked for first.  [default: FEDBUDGET_DATA, then the cache folder]"),
]
TrainSamples = Annotated[int | None, typer.Option(help="Train on only so many samples, others for each seed.")]
TestSamples = Annotated[int | None, typer.Option(help="Test on only so many samples, others for each seed.")]
Target = Annotated[str | None, typer.Option(help="The CSV column to predict.  [default: the last]")]
TestShare = Annotated[
    float | None, typer.Option(help="Held out for testing, where data has no test samples.  [default: 0.2]")
]
Nodes = Annotated[int | None, typer.Option(help="How many nodes.  [default: 5, or one per file]")]
Case = Annotated[int | None, typer.Option(help="How data is spread: the paper's case 1, 2, 3 or 4.  [default: 1]")]
Partition = Annotated[
    str | None, typer.Option(help="The same in general: case:N, dirichlet:ALPHA, draw:SAMPLES or files.")
]
Method = Annotated[
    str | None,
    typer.Option(
        help="frugal (drift corrected, no gradients sent), paper (to the letter), or a baseline: centralized or "
        "asynchronous gradient descent.  [default: frugal]"
    ),
]
DriftCorrection = Annotated[
    bool | None,
    typer.Option(
        "--drift-correction/--no-drift-correction",
        help="Correct local updates for drift.  [default: as the method has it]",
    ),
]
Delta = Annotated[
    str | None, typer.Option(help="Estimate δ from parameters or gradient.  [default: as the method has it]")
]
Participation = Annotated[
    float | None, typer.Option(help="The chance of a node to take part in a round, simulated.  [default: 1]")
]
AggregationFactor = Annotated[
    float | None,
    typer.Option(help="How many times as long as the prototype's a simulated aggregation takes.  [default: 1]"),
]
Speeds = Annotated[
    str | None, typer.Option(help="Of each node, with asynchronous: 4,4,1,1,1.  [default: two of five are fast]")
]
Tau = Annotated[str | None, typer.Option(help="adaptive, or a fixed number of local updates.  [default: adaptive]")]
Budget = Annotated[
    list[str] | None,
    typer.Option(
        help="What may be spent, once for each resource: time=15s, energy=500J, bytes=20MB, cpu=30s, money=0.40.  "
        "[default: time=15s]"
    ),
]
Costs = Annotated[
    str | None,
    typer.Option(help="simulated (the paper's prototype) or measured (this machine's clocks).  [default: simulated]"),
]
BatchSize = Annotated[str | None, typer.Option(help="Samples in a mini-batch, or full.  [default: 100]")]
StepSize = Annotated[str | None, typer.Option(help="Step size η, or auto.  [default: auto with frugal, else 0.01]")]
Phi = Annotated[
    float | None,
    typer.Option(
        help="Control parameter φ; larger gives smaller τ.  [default: 0.0025 with drift correction; else 0.025, or "
        "5e-5 for cnn]"
    ),
]
Gamma = Annotated[float | None, typer.Option(help="How many times the last τ the next may be.  [default: 10]")]
TauMax = Annotated[int | None, typer.Option(help="The largest τ.  [default: 100]")]
Seed = Annotated[int | None, typer.Option(help="Of everything random.  [default: 0]")]
Rounds = Annotated[int | None, typer.Option(help="The most rounds to make, besides the budget.")]
Evaluations = Annotated[
    int | None, typer.Option(help="At how many points of a run, at most, accuracy is looked at.  [default: 50]")
]
Device = Annotated[str | None, typer.Option(help="Where PyTorch computes: auto, cpu, cuda.  [default: auto]")]
Clusters = Annotated[int | None, typer.Option(help="Clusters of kmeans.  [default: 4]")]
MinNodes = Annotated[int | None, typer.Option(help="The fewest nodes to make a round with.  [default: 1]")]
RoundTimeout = Annotated[
    float | None,
    typer.Option(
        help="Seconds until nodes that have not reported are left out of a round.  [default: from what rounds took]"
    ),
]
Compress = Annotated[str | None, typer.Option(help="How parameters are sent: none, 16-bit or 8-bit.  [default: none]")]
Data = Annotated[
    Path | None, typer.Option(help="The node's own samples: a .csv, a .npz, or images in IDX (…-images-idx3-ubyte).")
]
Labels = Annotated[Path | None, typer.Option(help="The labels that go with --data in IDX.  [default: beside it]")]
Shard = Annotated[
    str | None,
    typer.Option(help="For trials, in place of --data: of --dataset the share of node I among N, as I/N or I-J/N."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(help="A file with the token of all nodes, or a line NAME TOKEN for each.  [default: FEDBUDGET_TOKEN]"),
]
EnergyMeter = Annotated[
    str | None,
    typer.Option(
        help="What tells a node's energy: rapl (its processors), codecarbon (an estimate), declared (the aggregator's "
        "--watts), or auto: rapl where it can be read, else declared.  [default: auto]"
    ),
]
Watts = Annotated[float | None, typer.Option(help="Power of a node, for energy.  [default: 5]")]
JoulesPerByte = Annotated[float | None, typer.Option(help="Energy of sending a byte.  [default: 1e-6]")]
PricePerHour = Annotated[float | None, typer.Option(help="Of a node, for money.  [default: 0.1]")]
PricePerGigabyte = Annotated[float | None, typer.Option(help="Of sending, for money.  [default: 0.1]")]
Config = Annotated[Path | None, typer.Option(help="A TOML file with settings; options given here come first.")]
Jobs = Annotated[int | None, typer.Option(help="How many runs at a time.  [default: one per core]")]
Track = Annotated[
    list[str] | None,
    typer.Option(help="Where the run is followed too: mlflow or tensorboard; may be repeated."),
]
Dashboard = Annotated[bool, typer.Option("--dashboard", help="Show the run in a web page while it is made.")]
Engine = Annotated[
    str | None, typer.Option(help="What makes the run: in-process, or ray, on a cluster.  [default: in-process]")
]
RayAddress = Annotated[
    str | None, typer.Option(help="Of the Ray cluster: HOST:PORT, ray://HOST:PORT or auto.  [default: this machine]")
]
Actors = Annotated[
    int | None, typer.Option(help="How many of Ray's processes share the nodes.  [default: one per core]")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def settings_from(given: Mapping[str, Any], **defaults: Any) -> Settings:
    """Settings from a command's options: those of `--config`, if any, and before them those that were given.

    Args:
      defaults: of this command, where they are not those of `Settings`.
    """
    names = {field.name for field in fields(Settings)}
    chosen = {name: value for name, value in given.items() if name in names and value not in (None, [])}
    case = given.get("case")
    if case is not None:
        if "partition" in chosen:
            raise UserError("give --case or --partition, not both")
        chosen["partition"] = f"case:{case}"
    if "budget" in chosen:
        chosen["budget"] = tuple(chosen["budget"])
    if "speeds" in chosen:
        chosen["speeds"] = tuple(number("speeds", part) for part in chosen["speeds"].split(","))
    if chosen.get("step_size", "auto") != "auto":
        chosen["step_size"] = number("step-size", chosen["step_size"])
    for name, word in (("tau", "adaptive"), ("batch_size", "full")):
        if name in chosen and chosen[name] != word:
            chosen[name] = whole_number(name.replace("_", "-"), chosen[name], f" or {word}")
    return Settings(**{**defaults, **_from_file(given.get("config"), given.get("task")), **chosen})


def _from_file(config: Path | None, task: str | None) -> dict[str, Any]:
    """What `--config` or `--task` says."""
    if config is not None and task is not None:
        raise UserError("give --task or --config, not both; fedbudget tasks NAME prints a task's settings as a file")
    if task is not None:
        config = tasks.path(task)
    return {} if config is None else Settings.from_toml(config)


def engine(name: str | None, ray_address: str | None) -> Literal["in-process", "ray"]:
    """What `--engine` says."""
    if name not in (None, "in-process", "ray"):
        raise UserError(f"unknown engine {name!r}; use in-process or ray")
    if ray_address is not None and name != "ray":
        raise UserError("--ray-address goes with --engine ray")
    return "ray" if name == "ray" else "in-process"


def whole_number(option: str, text: str, otherwise: str = "") -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{option} must be a whole number{otherwise}, not {text!r}") from None


def number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{option} must be numbers, not {text!r}") from None


def whole_numbers(option: str, text: str) -> list[int]:
    """Reads `1,2,5`."""
    return [whole_number(option, part.strip()) for part in text.split(",")]
