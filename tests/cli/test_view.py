"""Output of a run: progress on standard error, the result on standard output."""

import io
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedbudget import data
from fedbudget.cli import view
from fedbudget.cli.view import (
    cells,
    nodes_table,
    preparing,
    print_privacy_remarks,
    print_result,
    watching,
)
from fedbudget.launch.execute import execute
from fedbudget.launch.prepared import Overrides
from fedbudget.launch.simulate import SimulatedRun, launch, simulate
from fedbudget.node_status import NodeStatus
from fedbudget.result import Result
from fedbudget.settings.settings import Settings
from fedbudget.settings.types import Tau

DIGITS = data.load("digits")


def plan_of(*budget: str, tau: Tau = "adaptive", validation: float = 0.0) -> SimulatedRun:
    return simulate(
        Settings(
            model="svm",
            budget=budget,
            tau=tau,
            partition="case:2",
            validation=validation,
        ),
        Overrides(dataset=DIGITS),
    )


def run_watched(plan: SimulatedRun, *, quiet: bool = False) -> Result:
    with watching(plan, quiet=quiet) as watch:
        return execute(plan, callbacks=watch)


class TestPlainLog:
    def test_selection_of_rounds(self, capsys: pytest.CaptureFixture[str]) -> None:
        result = run_watched(plan_of("time=20s", tau=1))
        output = capsys.readouterr()
        assert output.out == ""
        title, headings, *lines = output.err.splitlines()
        assert (
            title == "svm on digits, 5 nodes, case:2, τ = 1, accelerated; budget time=20s"
        )
        assert " ".join(headings.split()) == (
            "round τ η chosen by loss loss wᶠ accuracy ρ̂ β̂ δ̂ spent"
        )
        assert {len(line) for line in lines} == {len(headings)}
        numbers = [int(line.split()[0]) for line in lines]
        assert numbers[:3] == [1, 2, 3]
        assert numbers[-1] == len(result.rounds)
        assert 20 <= len(numbers) <= 30 < len(result.rounds)

    def test_lines_agree_with_records(self, capsys: pytest.CaptureFixture[str]) -> None:
        result = run_watched(plan_of("time=5s"))
        lines = {
            int(line.split()[0]): line for line in capsys.readouterr().err.splitlines()[2:]
        }
        for record in result.rounds:
            if record.round in lines:
                shown = lines[record.round]
                assert record.reason in shown
                assert f"{record.loss:.4f}" in shown
                assert shown.endswith(f"{record.spent['time'] / 5:.0%}")
                assert record.rho is None or f"{record.rho:.3f}" in shown

    def test_quiet_prints_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        run_watched(plan_of("time=1s"), quiet=True)
        assert capsys.readouterr() == ("", "")


def test_terminal_shows_budgets_and_rounds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm-256color")
    result = run_watched(plan_of("time=5s", "bytes=10MB"))
    output = capsys.readouterr()
    assert output.out == ""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.err)
    last = text[text.rindex("svm on digits") :]
    assert f"{result.spent['time']:.4g}s of 5s" in last
    assert "of 10MB" in last
    assert "━" in last
    assert f"{result.rounds[-1].loss:.4f}" in last
    assert "loss at the end" in last


class TestPrivateRun:
    """A private run reports ε and no loss."""

    PLAN = Settings(
        model="softmax", nodes=20, partition="case:1", budget=("time=2s", "privacy=4")
    )

    def test_log_shows_epsilon(self, capsys: pytest.CaptureFixture[str]) -> None:
        result = run_watched(simulate(self.PLAN, Overrides(dataset=DIGITS)))
        title, headings, *lines = capsys.readouterr().err.splitlines()
        assert (
            title == "softmax on digits, 20 nodes, case:1, adaptive τ, private nodes; "
            "budget time=2s, privacy=4"
        )
        assert " ".join(headings.split()) == "round τ η chosen by accuracy ε spent"
        assert {len(line) for line in lines} == {len(headings)}
        end = headings.index("ε") + 1
        shown = [float(line[:end].split()[-1]) for line in lines]
        assert shown == pytest.approx(
            [record.spent["privacy"] for record in result.rounds], rel=1e-3
        )

    @pytest.mark.parametrize(
        ("changes", "standardised", "remark"),
        [
            (
                {},
                False,
                "ε protects each node with all its samples; "
                "the noise follows from --seed and hides nothing",
            ),
            (
                {"privacy_unit": "sample"},
                False,
                "ε protects each sample; the noise follows from --seed",
            ),
            (
                {"privacy_delta": 0.06},
                False,
                "; --privacy-delta 0.06 allows one node to be published as it is: "
                "set it below 1/20;",
            ),
            (
                {"privacy_delta": 0.04},
                False,
                "each node with all its samples; the noise follows",
            ),
            (
                {"privacy_delta": 0.04, "privacy_unit": "sample"},
                False,
                "allows one sample to be published as it is: set it below",
            ),
            (
                {"privacy_noise": "secret"},
                False,
                "ε protects each node with all its samples\n",
            ),
            (
                {},
                True,
                "the exact means and deviations of columns, and ε does not cover them\n",
            ),
        ],
    )
    def test_privacy_remarks(
        self,
        changes: dict[str, Any],
        standardised: bool,
        remark: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        dataset = data.load("breast-cancer") if standardised else DIGITS
        print_privacy_remarks(
            simulate(replace(self.PLAN, **changes), Overrides(dataset=dataset))
        )
        printed = capsys.readouterr().err
        assert printed.startswith("privacy: ")
        assert remark in printed

    def test_no_remarks_without_privacy(self, capsys: pytest.CaptureFixture[str]) -> None:
        print_privacy_remarks(plan_of("time=2s"))
        assert capsys.readouterr() == ("", "")

    def test_terminal_shows_no_loss(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
        run_watched(simulate(self.PLAN, Overrides(dataset=DIGITS)))
        assert "loss" not in capsys.readouterr().err

    def test_result_shows_epsilon(self, capsys: pytest.CaptureFixture[str]) -> None:
        print_result(execute(simulate(self.PLAN, Overrides(dataset=DIGITS))))
        assert re.search(
            r"^privacy: ε = [\d.]+ of 4 spent \(accounted, at δ = 1e-05\)$",
            capsys.readouterr().out,
            re.M,
        )

    @pytest.mark.parametrize("tau", ["adaptive", 1])
    def test_result_without_training(
        self, tau: Tau, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for seconds, nothing in (("0.3s", True), ("0.5s", False)):
            settings = replace(self.PLAN, budget=(f"time={seconds}", "privacy=4"), tau=tau)
            print_result(execute(simulate(settings, Overrides(dataset=DIGITS))))
            assert (
                "nothing was trained: the run ended with the first round"
                in capsys.readouterr().out
            ) == nothing


class TestPrintResult:
    def test_all_lines(self, capsys: pytest.CaptureFixture[str]) -> None:
        result = replace(
            execute(plan_of("time=2s")),
            loss=0.25,
            accuracy=0.875,
            average_tau=12.34,
            aggregations=7,
            local_updates=80,
            spent={"time": 2.5, "bytes": 1_500_000.0},
            budget={"time": 2.0, "bytes": 20e6},
            overshoot={"time": 0.5, "bytes": 0.0},
            sources={"time": "measured", "bytes": "declared"},
            stopped_by="time",
            rounds=(),
            run=Path("runs/x"),
            metrics={"custom": 31.4159, "auc": 0.9, "f1": 0.75, "balanced_accuracy": 0.8},
            to_beat={"accuracy": 0.5},
            spread={"nodes": 3, "worst": 0.5, "tenth": 0.55, "median": 0.9},
        )
        print_result(result)
        assert capsys.readouterr().out.splitlines() == [
            "loss 0.2500, accuracy 0.8750 (majority class 0.5000), balanced 0.8000, "
            "F1 0.7500, AUC 0.9000, custom 31.42",
            "accuracy over 3 nodes: worst 0.5000, tenth percentile 0.5500, median 0.9000",
            "7 aggregations, 80 local updates per node, average τ 12.3; stopped by time",
            "time: 2.5s of 2s spent, 0.5s over (measured)",
            "bytes: 1.5MB of 20MB spent (declared)",
            "run: runs/x",
        ]

    def test_trial_rounds_are_reported(self, capsys: pytest.CaptureFixture[str]) -> None:
        measured = replace(
            execute(plan_of("time=2s")), trial_seconds=0.25, sources={"time": "measured"}
        )
        print_result(measured)
        assert (
            "not counted: 0.25s of trial rounds before the clock started"
            in capsys.readouterr().out
        )

    def test_forecast_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        print_result(execute(plan_of("time=10s")))
        assert re.search(
            r"^loss with 50 % more budget: 0\.24\d\d \(",
            capsys.readouterr().out,
            re.M,
        )

    def test_missing_values_are_omitted(self, capsys: pytest.CaptureFixture[str]) -> None:
        print_result(
            replace(execute(plan_of("time=2s")), accuracy=None, metrics={}, run=None)
        )
        out = capsys.readouterr().out
        assert "accuracy" not in out
        assert "run:" not in out


def test_troubled_nodes_come_first() -> None:
    nodes = [
        NodeStatus(f"node-{i}", (i,), 1000 + i, "at work", 7, 0, 0.002) for i in range(40)
    ]
    nodes[30] = replace(nodes[30], state="away")
    nodes[20] = replace(nodes[20], missed=3)
    printed = io.StringIO()
    Console(width=100, file=printed).print(nodes_table(nodes))
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    assert lines[1].split() == ["node-30", "1,030", "2.00", "7", "away"]
    assert lines[2].split() == ["node-20", "1,020", "2.00", "7", "3", "at", "work"]
    assert lines[-1].strip() == "and 29 more"
    assert len(lines) == 1 + 12


def test_row_shows_largest_budget_share() -> None:
    record = execute(plan_of("time=2s")).rounds[0]
    record = replace(record, spent={"time": 1.0, "bytes": 3.0})
    both = {"time": 2.0, "bytes": 4.0}
    final = replace(record, tau=0, rho=None)
    assert cells(record, both, validated=False)[-1] == "75%"
    assert cells(final, {"time": 2.0}, validated=True)[1] == ""


def test_log_has_no_preparation_notice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error while preparing is then the only line on standard error."""
    monkeypatch.setattr("fedbudget.cli.view._NOTICE_SECONDS", 0.0)
    with preparing(nullcontext(simulate(Settings(), Overrides(dataset=DIGITS)))):
        pass
    assert capsys.readouterr().err == ""


def test_terminal_shows_preparation_notice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The notice appears before the preparation starts."""
    monkeypatch.setattr(view, "_NOTICE_SECONDS", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with preparing(launch(Settings(budget=("time=1s",)))) as prepared:
        assert "kernels are compiled; this takes some seconds" in capsys.readouterr().err
        assert prepared.settings.nodes == 5
