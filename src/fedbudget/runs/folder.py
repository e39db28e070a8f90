"""A run on disk: one folder.

    config.toml         the settings, enough to repeat the run
    rounds.jsonl        one record per round, written as it goes
    summary.json        how it ended
    model.safetensors   w^f, and how features were standardised
    plot.png            the picture of the run

`RunWriter` writes one, `Run` reads one. A folder appears only when a run really starts, and whole files are written
beside their place and then moved there, so that nobody ever reads half of one.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedbudget.arrays import Float32
from fedbudget.data.dataset import Standardization
from fedbudget.errors import UserError
from fedbudget.runs.record import RoundRecord
from fedbudget.runs.settings import Settings

CONFIG, ROUNDS, SUMMARY, MODEL, PLOT = "config.toml", "rounds.jsonl", "summary.json", "model.safetensors", "plot.png"


class RunWriter:
    """Makes the folder and fills it as the run goes on."""

    def __init__(self, path: Path, config: str) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise UserError(f"{path} is not empty; a run needs a folder of its own")
            self.replace(CONFIG, config.encode())
            self._rounds: TextIO = (path / ROUNDS).open("w", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path} cannot be written to: {error.strerror}") from None

    def append(self, record: RoundRecord) -> None:
        self._rounds.write(record.to_json() + "\n")
        self._rounds.flush()

    def finish(self, summary: Mapping[str, Any], model: bytes) -> None:
        self._rounds.close()
        self.replace(MODEL, model)
        self.replace(SUMMARY, (json.dumps(summary, indent=2) + "\n").encode())

    def replace(self, name: str, content: bytes) -> None:
        """Writes a whole file in one step."""
        beside = self.path / f".{name}.new"
        beside.write_bytes(content)
        beside.replace(self.path / name)


@dataclass(frozen=True)
class Run:
    """A run that was made, or is being made."""

    path: Path
    settings: Settings
    rounds: list[RoundRecord]
    summary: dict[str, Any] | None

    @classmethod
    def open(cls, path: Path) -> "Run":
        if not (path / CONFIG).is_file() or not (path / ROUNDS).is_file():
            raise UserError(f"{path} is not the folder of a run: {CONFIG} or {ROUNDS} is missing")
        try:
            lines = (path / ROUNDS).read_text(encoding="utf-8").splitlines()
            rounds = [RoundRecord.from_json(line) for line in lines]
            summary = json.loads((path / SUMMARY).read_text()) if (path / SUMMARY).exists() else None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: the run's records cannot be read: {error}") from None
        return cls(path, Settings(**Settings.from_toml(path / CONFIG)), rounds, summary)

    def model(self) -> "SavedModel":
        return SavedModel.load(self.path / MODEL)


@dataclass(frozen=True)
class SavedModel:
    """w^f, with what is needed to apply it: the classes it knows, and how features were standardised."""

    w: Float32
    model: str
    classes: tuple[str, ...]
    standardization: Standardization | None

    def to_bytes(self) -> bytes:
        tensors: dict[str, np.ndarray[Any, Any]] = {"w": self.w}
        how = self.standardization
        if how is not None:
            tensors |= {"feature_mean": how.mean, "feature_deviation": how.deviation}
            tensors["target"] = np.array([how.target_mean, how.target_deviation])
        known = json.dumps({"model": self.model, "classes": self.classes})
        return save(tensors, {"fedbudget": known})  # one key, because several are written in any order

    @classmethod
    def load(cls, path: Path) -> "SavedModel":
        try:
            with safe_open(path, framework="numpy") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
                known = json.loads(file.metadata()["fedbudget"])
            how = None
            if "feature_mean" in tensors:
                mean, deviation = tensors["target"]
                how = Standardization(
                    tensors["feature_mean"], tensors["feature_deviation"], float(mean), float(deviation)
                )
            return cls(tensors["w"], known["model"], tuple(known["classes"]), how)
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"{path}: the trained model cannot be read: {error}") from None
