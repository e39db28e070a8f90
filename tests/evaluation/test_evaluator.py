"""Runs that stop before their budget is spent, and which w they return."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import fedbudget
from fedbudget import data
from fedbudget.errors import UserError
from fedbudget.evaluation.evaluator import Evaluator
from fedbudget.evaluation.kept import KeptModel
from fedbudget.launch.execute import execute
from fedbudget.launch.prepared import Overrides, PreparedRun
from fedbudget.launch.simulate import SimulatedRun, simulate
from fedbudget.models import loss_over
from fedbudget.runs.folder import Run
from fedbudget.settings.settings import Settings

DIGITS = Overrides(dataset=data.load("digits"))
SMALL = Overrides(dataset=data.load("digits").sample(60, 300, 0))


def prepared(overrides: Overrides = DIGITS, **more: Any) -> SimulatedRun:
    return simulate(
        Settings(**{"model": "svm", "partition": "case:2", "budget": ("time=6s",), **more}),
        overrides,
    )


class TestTargets:
    @hypothesis_settings(max_examples=15, deadline=None)
    @given(
        st.sampled_from(["accuracy", "loss"]),
        st.floats(0.05, 0.95),
        st.sampled_from(["frugal", "paper", "centralized", "asynchronous"]),
        st.integers(0, 99),
        st.sampled_from([10, 100]),
    )
    def test_stopped_run_has_reached_its_target(
        self, metric: str, share: float, method: str, seed: int, batch: int
    ) -> None:
        """Targets lie between the value of w(0) and the best reachable value."""
        value = 0.5 + share * 0.42 if metric == "accuracy" else 0.5 - share * 0.26
        run = prepared(
            until=(f"{metric}={value}",),
            method=method,
            seed=seed,
            batch_size=batch,
            validation=0.0,
        )
        result = execute(run)
        figure = result.accuracy if metric == "accuracy" else result.loss
        assert figure is not None
        reached = figure >= value if metric == "accuracy" else figure <= value
        assert list(result.until.values()) == [reached]
        if result.stopped_by == "target":
            assert reached
            assert result.left["time"] == pytest.approx(6 - result.spent["time"], abs=1e-9)
            assert loss_over(run.model, result.w, run.train) == result.loss
        else:
            assert result.spent["time"] > 5

    def test_first_reached_target_stops_the_run(self) -> None:
        result = execute(prepared(until=("loss=0.01", "accuracy=0.8")))
        assert (result.stopped_by, result.until) == (
            "target",
            {"loss=0.01": False, "accuracy=0.8": True},
        )
        assert result.left["time"] > 3
        assert result.rounds[-1].accuracy == result.accuracy
        assert result.kept_round == result.rounds[-1].round

    def test_lucky_mini_batch_stops_no_run(self) -> None:
        """With mini-batches of two samples, the mini-batch loss falls below the target long
        before the loss over all samples does.
        """
        result = execute(prepared(until=("loss=0.27",), batch_size=2))
        first = next(record for record in result.rounds if record.loss <= 0.27)
        assert result.stopped_by == "target"
        assert result.validation_loss is not None
        assert result.validation_loss <= 0.27
        assert result.until == {"loss=0.27": True}
        assert first.round < result.rounds[-1].round

    def test_targets_without_central_samples(self) -> None:
        """The aggregator only has mini-batch losses. At most one of the stopped runs has a
        loss above the target.
        """
        wrong = []
        for seed in range(12):
            run = prepared(
                until=("loss=0.27",),
                seed=seed,
                batch_size=20,
                method="frugal",
                validation=0.0,
            )
            distributed: PreparedRun = replace(run, train=None)  # type: ignore[arg-type]
            result = execute(distributed)
            if result.stopped_by == "target":
                assert result.loss <= 0.27
                wrong.append(loss_over(run.model, result.w, run.train) > 0.27)
        assert len(wrong) >= 6
        assert sum(wrong) <= 1

    def test_target_adds_evaluations(self) -> None:
        def evaluations_of(**more: Any) -> int:
            return sum(
                each.accuracy is not None
                for each in execute(prepared(tau=1, **more)).rounds
            )

        assert 7 <= evaluations_of(evaluations=8) <= 10
        assert 26 <= evaluations_of(evaluations=8, until=("accuracy=1",)) <= 40

    def test_large_budget_delays_no_target(self) -> None:
        """1/200 of the large budget is hundreds of rounds. The run still spends at most 1.2
        times as much as with the small budget.
        """
        small, large = (
            execute(prepared(until=("accuracy=0.85",), tau=1, budget=(f"time={limit}",)))
            for limit in ("20s", "10000s")
        )
        assert (small.stopped_by, large.stopped_by) == ("target", "target")
        assert large.spent["time"] < 1.2 * small.spent["time"]

    def test_custom_metric_as_target(self) -> None:
        torch = pytest.importorskip("torch")
        from fedbudget.models import TorchModel

        def error(output: Any, y: Any) -> float:
            return float((output.argmax(1) != y).double().mean())

        model = TorchModel(
            torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
            metrics={"error": error},
        )
        result = fedbudget.train(
            model=model, dataset=DIGITS.dataset, until="error=0.3", budget="time=15s"
        )
        assert result.stopped_by == "target"
        assert result.metrics["error"] <= 0.3


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"until": ("loss=0.9",)},
            r"until loss=0.9 is reached before training: loss of w\(0\) is 0.5",
        ),
        (
            {"until": ("accuracy=0.2",)},
            r"until accuracy=0.2 is reached before training",
        ),
        (
            {"until": ("acuracy=0.9",)},
            "unknown metric of until 'acuracy'; did you mean accuracy?",
        ),
        (
            {"until": ("accuracy=0.9",), "model": "linear"},
            "until accuracy=0.9: linear has no accuracy",
        ),
    ],
)
def test_invalid_targets_are_refused(
    more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """No run folder is created."""
    with pytest.raises(UserError, match=message):
        execute(prepared(**more), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("more", [{"until": ("accuracy=0.9",)}, {"keep": "best-on-test"}])
def test_test_samples_are_required(more: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="needs test samples, and there are none"):
        execute(replace(prepared(**more), test=None))


def test_patience_stops_on_a_plateau() -> None:
    """The run stops at the first round after which ten rounds improved the loss by less
    than 1 %.
    """
    result = execute(prepared(patience=10, budget=("time=60s",), validation=0.0))
    losses = [record.loss for record in result.rounds]

    def gain(at: int) -> float:
        return 1 - float(np.mean(losses[at - 10 : at]) / np.mean(losses[at - 20 : at - 10]))

    assert (result.stopped_by, result.kept_round) == ("plateau", None)
    assert gain(len(losses)) < 0.01
    assert all(gain(at) >= 0.01 for at in range(20, len(losses)))
    assert result.left["time"] > 30


class TestKeep:
    def test_result_is_the_best_evaluated(self, tmp_path: Path) -> None:
        result = execute(
            prepared(SMALL, keep="best-on-test", batch_size=5),
            out=tmp_path / "run",
            plot=False,
        )
        evaluated = [each for each in result.rounds if each.accuracy is not None]
        best = min(
            evaluated,
            key=lambda each: (-(each.accuracy or 0), each.test_loss or 0, each.round),
        )
        assert (result.kept_round, result.accuracy) == (best.round, best.accuracy)
        assert best.round < evaluated[-1].round
        assert Run.open(tmp_path / "run").model().w.tobytes() == result.w.tobytes()
        kept = KeptModel.load(tmp_path / "run")
        assert kept is not None
        assert (kept.round, kept.w.tobytes()) == (best.round, result.w.tobytes())
        without_keep = execute(prepared(SMALL, batch_size=5)).accuracy
        assert without_keep is not None
        assert without_keep <= (best.accuracy or 0)

    def test_target_overrides_keep(self) -> None:
        result = execute(prepared(keep="best-on-test", until=("loss=0.3",)))
        assert (result.stopped_by, result.kept_round) == ("target", result.rounds[-1].round)

    def test_resumed_evaluator_has_the_same_state(self, tmp_path: Path) -> None:
        run = prepared(SMALL, keep="best-on-test", batch_size=5)
        result = execute(run, out=tmp_path / "run", plot=False)
        evaluator = Evaluator(run)
        evaluator.resume(result.rounds, tmp_path / "run")
        assert evaluator.kept is not None
        assert evaluator.kept.w.tobytes() == result.w.tobytes()
        assert not evaluator.due(result.rounds[-1].spent["time"] / 6)
        assert evaluator.due(1.1 * result.rounds[-1].spent["time"] / 6)
