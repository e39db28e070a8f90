"""A model that is kept instead of w^f.

With `--keep best-on-test`, the best model so far is stored as `kept.safetensors` in the run
folder, so that a resumed run still has it.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedbudget.arrays import Float32
from fedbudget.errors import UserError
from fedbudget.file_contents import parsed_json, require_tensors

KEPT = "kept.safetensors"


@dataclass(frozen=True)
class KeptModel:
    """A w and its quality.

    Args:
      round: the round that started with this w.
      w: parameters, [parameters].
      loss: training loss, as far as it is known.
      rank: sort key among candidates; the smallest is the best.
    """

    round: int
    w: Float32
    loss: float
    rank: tuple[float, float] = (0.0, 0.0)

    def to_bytes(self) -> bytes:
        """Return the contents of `kept.safetensors`."""
        known = {"round": self.round, "loss": self.loss, "rank": self.rank}
        return save({"w": self.w}, {"fedbudget": json.dumps(known)})

    @classmethod
    def load(cls, folder: Path) -> "KeptModel | None":
        """Read the kept model of a run folder. Returns None if there is none."""
        path = folder / KEPT
        if not path.is_file():
            return None
        try:
            require_tensors(path)
            with safe_open(path, framework="numpy") as file:
                known = parsed_json(file.metadata()["fedbudget"])
                first, second = known["rank"]
                rank = (float(first), float(second))
                w = file.get_tensor("w")
                return cls(int(known["round"]), w, float(known["loss"]), rank)
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"cannot read {path}: {error}") from None
