"""Private runs over Flower's grid: the same as in one process where noise can be repeated,
and else secret.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.flower_runs import here, run

PRIVATE: dict[str, Any] = {"model": "softmax", "tau": 4, "rounds": 4}
BUDGET = "time=1000s,privacy=8"


def test_the_same_as_in_one_process(tmp_path: Path) -> None:
    found = run(tmp_path, **PRIVATE, budget=BUDGET, privacy_noise="seeded")
    expected = here(**PRIVATE, budget=BUDGET.split(","))
    assert found.w.tobytes() == expected.w.tobytes()
    assert found.spent["privacy"] == expected.spent["privacy"] <= 8


def test_noise_is_secret(tmp_path: Path) -> None:
    found = run(tmp_path, **PRIVATE, budget=BUDGET)
    assert not np.allclose(found.w, here(**PRIVATE, budget=BUDGET.split(",")).w)
    assert (tmp_path / "run" / "privacy.jsonl").is_file()


def test_samples_are_protected_by_noise_of_the_nodes_own(tmp_path: Path) -> None:
    """Whose parameters are never the same, and whose ε is what the same run costs in one
    process.
    """
    options = {**PRIVATE, "privacy_unit": "sample"}
    found = run(tmp_path, **options, budget=BUDGET)
    expected = here(**options, budget=BUDGET.split(","))
    assert found.spent["privacy"] == pytest.approx(expected.spent["privacy"], rel=1e-6)
    assert found.spent["privacy"] <= 8
    assert not np.allclose(found.w, expected.w)
