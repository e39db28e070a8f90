"""The configuration of a run: all that is needed to repeat it, as options of the command line and keys of a TOML file.

An option `--step-size` is the key `step-size` in a file and the field `step_size` here.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

import tomli_w

from fedbudget.budget import Budget
from fedbudget.control import AdaptiveTau, Controller, FixedTau
from fedbudget.data.dataset import require_test_share
from fedbudget.data.partition import Partition
from fedbudget.errors import UserError
from fedbudget.protocol.method import Delta
from fedbudget.step_size import AutoStep, FixedStep, StepSize

FEDERATED = ("frugal", "paper")
COMPRESSIONS = ("none", "16-bit", "8-bit")
METHODS = (*FEDERATED, "centralized", "asynchronous")


@dataclass(frozen=True)
class Settings:
    """What to train, on what, with which budget, and how.

    Args:
      model: a model's name.
      dataset: a dataset's name, or a path to a .csv, a .npz or a folder with one such file per node.
      data_dir: where datasets with a name are looked for first.
      target: the CSV column to predict; the last one when not given.
      test_share: held out for testing, where the data has no test samples.
      train_samples, test_samples: take only so many, others for each seed; all when not given.
      nodes: how many; 5 when not given, or as many as there are files.
      partition: how samples are given to nodes: case:1 to case:4, dirichlet:ALPHA, files; case:1 when not given, or
        files for a folder.
      method: `frugal` (drift is corrected, and no gradients are sent), `paper` (to the letter), or a baseline:
        `centralized` (all data in one place) or `asynchronous` (no node waits).
      drift_correction: whether local updates are corrected for drift; as the method has it when not given.
      delta: what δ is estimated from, `parameters` or `gradient`; as the method has it when not given.
      tau: `adaptive`, or a number of local updates.
      budget: limits, such as time=15s, energy=500J, bytes=20MB, cpu=30s, money=0.40.
      costs: `simulated` (the paper's measurements) or `measured` (this machine's clocks).
      aggregation_factor: how many times as long as in the paper's prototype an aggregation takes, simulated.
      speeds: of each node, with asynchronous descent; two of five 4 times as fast as the others when not given.
      participation: the chance of a node to take part in a round, simulated.
      batch_size: samples in a mini-batch, or `full`; 100 when not given, or the smallest shard if that is smaller.
      step_size: η, or `auto`; auto when the method is frugal and not given, else the paper's 0.01.
      phi: φ, the control parameter; 0.0025 when drift is corrected and not given, else the paper's: 5e-5 for its
        networks, 0.025 for all others.
      gamma: how many times larger than the last τ the next may be.
      tau_max: the largest τ.
      seed: of everything random.
      rounds: the most rounds to make, besides the budget.
      evaluations: accuracy is looked at, at no more than so many points of the run, evenly over the budget.
      clusters: of K-means.
      device: where PyTorch computes: `auto` (a GPU when there is one), `cpu`, `cuda`, ...
      min_nodes: over a network, the fewest nodes to make a round with; 1 when not given.
      round_timeout: over a network, seconds until nodes that have not reported are left out; from what rounds took so
        far when not given.
      compress: over a network, how parameters are sent: `none`, `16-bit` or `8-bit`.
      watts, joules_per_byte: what energy is figured from, per node.
      price_per_hour, price_per_gigabyte: what money is figured from, per node.
    """

    model: str = "svm"
    dataset: str = "digits"
    data_dir: str | None = None
    target: str | None = None
    test_share: float = 0.2
    train_samples: int | None = None
    test_samples: int | None = None
    nodes: int | None = None
    partition: str | None = None
    method: str = "frugal"
    drift_correction: bool | None = None
    delta: str | None = None
    tau: int | str = "adaptive"
    budget: tuple[str, ...] = ("time=15s",)
    costs: str = "simulated"
    aggregation_factor: float = 1.0
    speeds: tuple[float, ...] | None = None
    participation: float = 1.0
    batch_size: int | str | None = None
    step_size: float | str | None = None
    phi: float | None = None
    gamma: float = 10.0
    tau_max: int = 100
    seed: int = 0
    rounds: int | None = None
    evaluations: int = 50
    clusters: int = 4
    device: str = "auto"
    min_nodes: int | None = None
    round_timeout: float | None = None
    compress: str | None = None
    watts: float = 5.0
    joules_per_byte: float = 1e-6
    price_per_hour: float = 0.1
    price_per_gigabyte: float = 0.1

    def __post_init__(self) -> None:
        self.controller()
        self.limits()
        if self.partition is not None:
            Partition.parse(self.partition)
        if self.costs not in ("simulated", "measured"):
            raise UserError(f"costs must be simulated or measured, not {self.costs!r}")
        if self.method not in METHODS:
            raise UserError(f"method must be one of {', '.join(METHODS)}, not {self.method!r}")
        if self.delta not in (None, *get_args(Delta)):
            raise UserError(f"delta must be one of {', '.join(get_args(Delta))}, not {self.delta!r}")
        if self.method not in FEDERATED and (self.drift_correction or self.delta or self.participation != 1):
            raise UserError(f"{self.method} descent has no drift-correction, delta or participation")
        if not 0 < self.participation <= 1:
            raise UserError(f"participation must be more than 0 and at most 1, not {self.participation:g}")
        if not 0 < self.aggregation_factor < float("inf"):
            raise UserError(f"aggregation-factor must be a positive number, not {self.aggregation_factor:g}")
        self.pacing()
        if self.batch_size is not None and self.batch_size != "full" and not isinstance(self.batch_size, int):
            raise UserError(f"batch-size must be a whole number or full, not {self.batch_size!r}")
        if self.compress not in (None, *COMPRESSIONS):
            raise UserError(f"compress must be one of {', '.join(COMPRESSIONS)}, not {self.compress!r}")
        if self.round_timeout is not None and not 0 < self.round_timeout < float("inf"):
            raise UserError(f"round-timeout must be a positive number of seconds, not {self.round_timeout:g}")
        for name in ("nodes", "min_nodes", "rounds", "train_samples", "test_samples", "evaluations"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name.replace('_', '-')} must be at least 1, not {value}")
        require_test_share(self.test_share)
        if self.seed < 0:
            raise UserError(f"seed must not be negative, but is {self.seed}")

    def controller(self) -> Controller:
        if self.tau == "adaptive":
            return AdaptiveTau(self._phi(), self.gamma, self.tau_max, leap=self.delta_from == "parameters")
        if not isinstance(self.tau, int):
            raise UserError(f"tau must be adaptive or a whole number, not {self.tau!r}")
        return FixedTau(self.tau)

    def pacing(self) -> StepSize:
        step_size = ("auto" if self.method == "frugal" else 0.01) if self.step_size is None else self.step_size
        if step_size == "auto":
            if self.method not in FEDERATED:
                raise UserError(f"{self.method} descent needs a step-size that is a number")
            return AutoStep()
        if isinstance(step_size, str):
            raise UserError(f"step-size must be auto or a positive number, not {step_size!r}")
        return FixedStep(step_size)

    @property
    def corrects_drift(self) -> bool:
        return self.method == "frugal" if self.drift_correction is None else self.drift_correction

    @property
    def delta_from(self) -> Delta:
        if self.delta is None:
            return "parameters" if self.method == "frugal" else "gradient"
        return "gradient" if self.delta == "gradient" else "parameters"

    def _phi(self) -> float:
        if self.phi is not None:
            return self.phi
        if self.corrects_drift:
            return 0.0025
        return 5e-5 if self.model == "cnn" else 0.025

    def limits(self) -> Budget:
        return Budget.parse(self.budget)

    @classmethod
    def from_toml(cls, path: Path) -> dict[str, Any]:
        """The settings in a file, checked key by key, to be completed by options."""
        return checked(path, read_toml(path))

    def to_toml(self) -> str:
        values = {field.name.replace("_", "-"): getattr(self, field.name) for field in fields(self)}
        return tomli_w.dumps(
            {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in values.items()
                if value is not None
            }
        )


def read_toml(path: Path) -> dict[str, Any]:
    """What is in a TOML file, unchecked."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None


def checked(path: Path, found: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among the keys of a file, as fields; errors name the file."""
    known = {field.name.replace("_", "-"): field for field in fields(Settings)}
    fit: dict[str, Any] = {}
    for key, value in found.items():
        if key not in known:
            raise UserError(f"{path}: unknown key {key!r}; known are {', '.join(known)}")
        name = known[key].name
        if name == "budget":
            texts = [value] if isinstance(value, str) else value
            if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
                value = tuple(texts)
        if name == "speeds" and isinstance(value, list) and all(type(each) in (int, float) for each in value):
            value = tuple(map(float, value))
        allowed = _TYPES.get(name, type(known[key].default))
        if isinstance(value, int) and not isinstance(value, bool) and allowed in (float, (float, str)):
            value = float(value)
        if isinstance(value, bool) is not (allowed is bool) or not isinstance(value, allowed):
            raise UserError(f"{path}: {key} = {value!r} has the wrong type")
        fit[name] = value
    return fit


_TYPES: Mapping[str, Any] = {
    "data_dir": str,
    "target": str,
    "train_samples": int,
    "test_samples": int,
    "nodes": int,
    "partition": str,
    "drift_correction": bool,
    "delta": str,
    "tau": (int, str),
    "speeds": tuple,
    "batch_size": (int, str),
    "step_size": (float, str),
    "phi": float,
    "rounds": int,
    "min_nodes": int,
    "round_timeout": float,
    "compress": str,
}
"""Types of the fields whose default does not tell."""
