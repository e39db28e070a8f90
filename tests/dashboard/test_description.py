"""The paragraph says what the figures say."""

from pathlib import Path
from typing import Any

from fedbudget.dashboard.series import describe
from fedbudget.runs.folder import Run
from fedbudget.settings.settings import Settings
from support.made_runs import SETTINGS, make_run, record


def test_a_run_that_ended_is_told_from_beginning_to_end(tmp_path: Path) -> None:
    run = Run.open(make_run(tmp_path / "run", summary={"loss": 0.25, "accuracy": 0.875}))
    # Rounds 1 and 2 have one update, the other 18 have five: 92 / 20 on average.
    assert describe(run) == (
        "The run made 20 aggregations, with 92 local updates on every node (average τ 4.6). "
        "It spent 2s of 20s (time) and 100kB of 2MB (bytes). "
        "The loss went from 1 to 0.25, and accuracy on the test samples from 50.0% to 87.5%. "
        "It ended because the budget for time was used up."
    )


def test_a_run_that_goes_on_is_told_so_far(tmp_path: Path) -> None:
    told = describe(Run.open(make_run(tmp_path / "run", 3, finished=False)))
    assert told.startswith(
        "The run made 3 aggregations so far, with 7 local updates on every node"
    )
    assert told.endswith("It has not ended.")


def test_what_was_spent_beyond_the_budget_is_told(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", [record(1, spent={"time": 20.5, "bytes": 1e6})])
    assert "20.5s of 20s (time, 0.5s over the budget)" in describe(Run.open(path))


def test_a_run_with_no_round_yet_and_one_without_accuracy(tmp_path: Path) -> None:
    assert (
        describe(Run.open(make_run(tmp_path / "none", 0, finished=False)))
        == "No round has finished yet."
    )
    path = make_run(
        tmp_path / "blind", [record(1, accuracy=None)], summary={"accuracy": None}
    )
    assert "accuracy" not in describe(Run.open(path))


def test_what_a_fixed_tau_gave_is_told_where_the_rest_was_the_same(tmp_path: Path) -> None:
    def run(name: str, loss: float, **changes: Any) -> Run:
        settings = Settings(**{**vars(SETTINGS), **changes})
        return Run.open(
            make_run(tmp_path / name, settings=settings, summary={"loss": loss})
        )

    adaptive, ten, one = (
        run("adaptive", 0.2),
        run("ten", 0.3, tau=10),
        run("one", 0.4, tau=1),
    )
    other = run("other", 0.1, tau=5, seed=9)
    told = describe(adaptive, [adaptive, ten, one, other])
    assert told.endswith(
        "With the same budget and a fixed τ, the loss was 0.4 with τ = 1 and 0.3 with τ = 10."
    )
    assert "fixed" not in describe(ten, [adaptive, one])
    assert "fixed" not in describe(adaptive, [adaptive, other])
