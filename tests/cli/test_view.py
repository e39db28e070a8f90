"""Output of a run: progress on standard error, the result on standard output."""

import io
import re
from contextlib import nullcontext, redirect_stderr
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedbudget import data
from fedbudget.cli import view
from fedbudget.cli.options import OutputOptions
from fedbudget.cli.view import (
    cells,
    headings,
    make_run,
    nodes_table,
    preparing,
    print_privacy_remarks,
    print_result,
    rounds_table,
    watching,
)
from fedbudget.errors import UserError
from fedbudget.launch.execute import execute
from fedbudget.launch.prepared import Overrides
from fedbudget.launch.simulate import SimulatedRun, launch, simulate
from fedbudget.node_status import NodeStatus
from fedbudget.result import Result, SiteLoss
from fedbudget.runs.folder import Run
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
        headings, *lines = output.err.splitlines()
        lines = [line for line in lines if line.split()[0].isdigit()]  # not the hint
        assert headings.split() == ["round", "τ", "loss", "accuracy", "spent", "left"]
        ends = {line.index("%") for line in lines}
        assert ends == {headings.index("spent") + len("spent") - 1}
        numbers = [int(line.split()[0]) for line in lines]
        assert numbers[:3] == [1, 2, 3]
        assert numbers[-1] == len(result.rounds)
        assert 20 <= len(numbers) <= 30 < len(result.rounds)

    def test_lines_agree_with_records(self, capsys: pytest.CaptureFixture[str]) -> None:
        plan = plan_of("time=5s")
        with watching(plan, quiet=False, verbose=True) as watch:
            result = execute(plan, callbacks=watch)
        headings, *rows = capsys.readouterr().err.splitlines()
        assert " ".join(headings.split()) == (
            "round τ η chosen by loss loss wᶠ accuracy ρ̂ β̂ δ̂ spent left"
        )
        lines = {int(line.split()[0]): line for line in rows}
        for record in result.rounds:
            if record.round in lines:
                shown = lines[record.round]
                assert record.reason in shown
                assert f"{record.loss:.4f}" in shown
                assert f"{record.spent['time'] / 5:.0%}" in shown.split()
                assert record.rho is None or f"{record.rho:.3g}" in shown

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
    last = text[text.rindex("time ") :]
    assert f"{result.spent['time']:.4g}s of 5s" in last
    assert "of 10MB" in last
    assert "━" in last
    assert f"{result.rounds[-1].loss:.4f}" in last


class TestPrivateRun:
    """A private run reports ε and no loss."""

    PLAN = Settings(
        model="softmax", nodes=20, partition="case:1", budget=("time=2s", "privacy=4")
    )

    def test_log_shows_epsilon(self, capsys: pytest.CaptureFixture[str]) -> None:
        result = run_watched(simulate(self.PLAN, Overrides(dataset=DIGITS)))
        headings, *lines = capsys.readouterr().err.splitlines()
        assert " ".join(headings.split()) == "round τ accuracy ε spent left"
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
                "the noise follows from --seed and hides nothing from those who know the "
                "seed, so ε is only simulated",
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
        assert "privacy: at most ε = 4 if a" in printed

    @pytest.mark.parametrize("kept", [True, False])
    def test_exact_metrics_are_announced(
        self, kept: bool, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Metrics on test samples of one's own data are exact, each time."""
        dataset = replace(DIGITS, published=False)
        if not kept:
            dataset = replace(dataset, test=None)
        print_privacy_remarks(simulate(self.PLAN, Overrides(dataset=dataset)))
        printed = capsys.readouterr().err
        note = "metrics of 360 test samples are exact, in every evaluated round"
        assert (note in printed) == kept
        assert ("(--test-share 0 holds out none)" in printed) == kept

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
            r"^privacy: ε = [\d.]+ of 4 spent \(simulated, at δ = 1e-05\); "
            r"ε = [89][\d.]+ if a node is replaced, not left out$",
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

    def test_useless_model_is_reported(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The warnings come first, and are in summary.json too."""
        useless = replace(
            execute(plan_of("time=2s")),
            accuracy=0.45,
            to_beat={"accuracy": 0.5},
            validation_loss=0.7,
            validation_start=0.7,
            sites={"clinic": SiteLoss(0.7, 0.9), "ward": SiteLoss(0.7, 0.7)},
        )
        print_result(useless)
        lines = capsys.readouterr().out.splitlines()
        assert lines[:4] == [
            "warning: training did not help: no parameters have a lower validation loss "
            "than the initial ones, 0.7",
            "warning: the model is worse than no model: its accuracy is 0.4500, and 0.5000 "
            "if the most common class is always predicted",
            "warning: the model is worse than untrained for clinic: its validation loss is "
            "0.9, and 0.7 with the initial parameters",
            lines[3],
        ]
        assert not lines[3].startswith("warning")
        assert [f"warning: {each}" for each in useless.to_json()["warnings"]] == lines[:3]

    def test_error_above_that_of_the_mean(self) -> None:
        result = replace(
            execute(plan_of("time=2s")),
            accuracy=None,
            metrics={"rmse": 12.5},
            to_beat={"rmse": 12.0},
        )
        assert result.warnings == (
            "the model is worse than no model: its RMSE is 12.5, and 12 if the mean is "
            "always predicted",
        )
        assert replace(result, metrics={"rmse": 12.0}).warnings == ()

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
    assert cells(record, both, headings(both, validated=False))[-1] == "75%"
    assert cells(final, {"time": 2.0}, ("round", "τ")) == ("1", "")


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_table_fits_the_terminal(width: int) -> None:
    """No number is cut: columns are left out instead, τ and the loss never."""
    record = replace(
        execute(plan_of("time=2s", validation=0.2)).rounds[-2],
        round=99_999,
        loss=41856957.37,
        validation=1.234e-6,
        rho=123456.7,
    )
    printed = io.StringIO()
    for verbose in (False, True):
        table = rounds_table([record], {"time": 2.0}, verbose=verbose, width=width)
        Console(width=width, file=printed).print(table)
    text = printed.getvalue()
    assert "…" not in text
    for line in text.splitlines()[1::2]:
        assert "4.19e+07" in line
        assert line.split()[1] == str(record.tau)
    if width >= 60:
        assert text.count("1.23e-06") == 2
    if width >= 120:
        assert "1.23e+05" in text


class TestAnnouncement:
    """The lines before the first round."""

    def lines(self, capsys: pytest.CaptureFixture[str], folder: Path, **how: Any) -> str:
        prepared = simulate(Settings(partition="case:2", **how), Overrides(dataset=DIGITS))
        make_run(prepared, OutputOptions(out=folder / "run"), ())
        self.rounds = len(Run.open(folder / "run").rounds)
        return capsys.readouterr().err

    def test_first_line_names_the_costs(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        budget = ("time=10s", "bytes=20MB")
        title, simulated, *_ = self.lines(capsys, tmp_path, budget=budget).splitlines()
        assert title.endswith("; budget time=10s (simulated), bytes=20MB (declared)")
        assert "--costs measured" in simulated

    def test_measured_costs(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        how = {"budget": ("time=10min",), "costs": "measured", "rounds": 3}
        title, expected, *_ = self.lines(capsys, tmp_path, **how).splitlines()
        assert title.endswith("; budget time=10min (measured)")
        assert expected == "expected: about 3 rounds"

    @pytest.mark.parametrize("tau", [1, 50, "adaptive"])
    def test_expected_rounds(
        self, tau: Tau, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        text = self.lines(
            capsys, tmp_path, budget=("time=15s",), tau=tau, validation=0, step_size=0.1
        )
        found = re.search(
            r"^expected: about ([\d,]+) rounds, .* on this machine$", text, re.M
        )
        assert found is not None
        assert int(found[1].replace(",", "")) == pytest.approx(self.rounds, rel=0.15)

    def test_refused_folder_is_the_only_line(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        (tmp_path / "run").write_text("")
        with pytest.raises(UserError):
            self.lines(capsys, tmp_path)
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("width", [60, 80, 120])
def test_live_view_fits_the_terminal(width: int) -> None:
    """The forecast of the end is shown until the end is near."""
    plan = plan_of("time=15s", "bytes=20MB", validation=0.2)
    rounds = execute(plan).rounds
    printed = io.StringIO()
    console = Console(width=width, height=24, file=printed)
    live = view._LiveView(plan, console, verbose=False)
    for number, record in enumerate(rounds, 1):
        shown = live.add(record)
        if number in (len(rounds) // 2, len(rounds)):
            console.print(shown)
            printed.write("|")
    half, end, _ = printed.getvalue().split("|")
    assert "loss at the end" in half
    assert "loss at the end" not in end
    for text in (half, end):
        assert "…" not in text
        assert text.count("\n") <= 24
        assert max(map(len, text.splitlines())) <= width


def test_slow_run_prints_lines_by_time() -> None:
    """A run that has spent nothing of its budget still shows that it goes on."""
    plan = plan_of("time=1000h")
    record = execute(plan_of("time=2s")).rounds[0]
    printed = io.StringIO()
    with watching(plan, quiet=False) as (watch,), redirect_stderr(printed):
        for second in range(1, 1001):
            watch(replace(record, round=second, wall=float(second), best_loss=0.5))
    rows = [line.split() for line in printed.getvalue().splitlines()[1:]]
    shown = [int(row[0]) for row in rows if row[0].isdigit()]
    pauses = [late - early for early, late in pairwise(shown)]
    assert shown[:3] == [1, 2, 3]
    assert max(pauses) <= 51
    assert len(shown) < 100
    assert (
        sum(
            "improved the best loss by less than 1 %" in line
            for line in printed.getvalue().splitlines()
        )
        == 1
    )


def test_hint_needs_a_flat_half() -> None:
    record = execute(plan_of("time=2s")).rounds[0]
    falling = [replace(record, best_loss=1 / (1 + n)) for n in range(200)]
    assert view._convergence_hint(falling) == ""
    assert "--patience" in view._convergence_hint([record] * 200)
    assert view._convergence_hint([record] * 50) == ""


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
