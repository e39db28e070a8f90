"""A w that was chosen in place of w^f; and `kept.safetensors`, where the one that was best on test samples so far is on
disk while a run is made, so that a run that goes on has it still.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedbudget.arrays import Float32
from fedbudget.errors import UserError

KEPT = "kept.safetensors"


@dataclass(frozen=True)
class KeptModel:
    """A w, and what is known of it.

    Args:
      round: the round that began with it.
      w: [parameters].
      loss: on training samples, as well as it is known.
      rank: by which others are compared with it; the least is the best.
    """

    round: int
    w: Float32
    loss: float
    rank: tuple[float, float] = (0.0, 0.0)

    def to_bytes(self) -> bytes:
        known = {"round": self.round, "loss": self.loss, "rank": self.rank}
        return save({"w": self.w}, {"fedbudget": json.dumps(known)})

    @classmethod
    def load(cls, folder: Path) -> "KeptModel | None":
        """That of a run's folder; None where there is none."""
        path = folder / KEPT
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="numpy") as file:
                known = json.loads(file.metadata()["fedbudget"])
                best, loss = known["rank"]
                return cls(
                    int(known["round"]),
                    file.get_tensor("w"),
                    float(known["loss"]),
                    (float(best), float(loss)),
                )
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None
