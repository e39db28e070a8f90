"""Ledgers of privacy: what the samples of one dataset have paid in all runs.

A ledger is a file that outlives runs:

    {"rho": 0.31, "runs": {"5f0c...": {"rho": 0.31, "round": 12, "data": "9ab0..."}}}

- ρ adds up over all runs. Everything that is charged to one file adds up, also if the
  samples have changed: a few new rows do not give the old ones a new budget.
- A charge is on disk before the values that it pays for leave the process.
- Privacy of a node and privacy of a sample do not add up. A ledger is for one of them; one
  for samples has "unit": "sample".
- Processes lock the file in turn.
"""

import fcntl
import hashlib
import json
import math
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedbudget import durable_files
from fedbudget.data.dataset import Dataset, Part
from fedbudget.errors import UserError, WorkError
from fedbudget.resources.privacy import epsilon_of

UNITS = {False: "nodes", True: "single samples"}

_MOST_OBJECTS = 1000
_DIGEST = 16  # bytes


@dataclass(frozen=True)
class PrivacyLedger:
    """A ledger on disk.

    Args:
      path: of the file.
      per_sample: whether it protects each sample, not a node with all its samples.
      data: fingerprint of the samples, recorded with each run; empty if not known.
    """

    path: Path
    per_sample: bool = False
    data: str = ""

    def read(self) -> dict[str, Any]:
        """Return the content; raise `UserError` if the file is something else."""
        unit = "sample" if self.per_sample else "node"
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if not (0 <= content["rho"] < math.inf and isinstance(content["runs"], dict)):
                raise ValueError(f"ρ is {content['rho']}")
            if content.get("unit", "node") != unit:
                raise ValueError(
                    f"it is for {UNITS[not self.per_sample]}, unlike `privacy_unit`"
                )
        except FileNotFoundError:
            content = {"rho": 0.0, "runs": {}}
            return content | {"unit": unit} if self.per_sample else content
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(f"{self.path} is not an account of privacy: {error}") from None
        return dict(content)

    def spent(self, delta: float) -> float:
        """Return ε of all runs at δ."""
        return epsilon_of(self.read()["rho"], delta)


def charge(
    ledgers: Iterable[PrivacyLedger],
    run: str,
    round_: int,
    rho: float,
    require: Callable[[PrivacyLedger, dict[str, Any]], None] = lambda ledger, content: None,
) -> None:
    """Charge a round to all ledgers, and return only once that is on disk.

    Args:
      ledgers: of the same samples.
      run: name of the run.
      require: called with each ledger and its content first; raises if the charge is not
        allowed.
    """
    ordered = sorted(ledgers, key=lambda ledger: ledger.path)
    with ExitStack() as stack:
        for ledger in ordered:
            stack.enter_context(_locked(ledger.path))
        contents = [ledger.read() for ledger in ordered]
        for ledger, content in zip(ordered, contents, strict=True):
            require(ledger, content)
        for ledger, content in zip(ordered, contents, strict=True):
            before = content["runs"].get(run, {"rho": 0.0})
            paid = {"rho": before["rho"] + rho, "round": round_}
            content["runs"][run] = paid | ({"data": ledger.data} if ledger.data else {})
            content["rho"] += rho
            try:
                durable_files.replace(ledger.path, json.dumps(content).encode())
            except OSError as error:
                raise WorkError(
                    f"{ledger.path} cannot be written: {error.strerror}"
                ) from None


def fingerprint(samples: Iterable[tuple[Dataset, Part]]) -> str:
    """Return a digest of rows that does not depend on their order or division.

    Of samples that are no rows of an array, it covers up to a thousand of each part.
    """
    total = 0
    for dataset, part in samples:
        for row in _rows(dataset, part):
            digest = hashlib.blake2b(row, digest_size=_DIGEST).digest()
            total += int.from_bytes(digest, "big")
    return f"{total % 2 ** (8 * _DIGEST):0{2 * _DIGEST}x}"


def _rows(dataset: Dataset, part: Part) -> Iterator[bytes]:
    """The bytes of each sample with its target."""
    if dataset.store is not None:
        step = math.ceil(len(part) / _MOST_OBJECTS) or 1
        for index in part.x[::step, 0].tolist():
            yield pickle.dumps(dataset.store[index])
        return
    features = np.ascontiguousarray(part.x)
    for row in range(len(part)):
        target = b"" if part.values is None else part.values[row].tobytes()
        if part.labels is not None and dataset.classes:
            target += dataset.classes[part.labels[row]].encode()
        yield features[row].tobytes() + target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Exclude other processes on this machine."""
    try:
        durable_files.make_folder(path.parent)
        with path.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise WorkError(f"{path} cannot be locked: {error.strerror}") from None
