"""Claims of the paper about single runs and about asynchronous descent."""

from collections.abc import Mapping
from typing import Any

import pytest

from fedbudget.experiments.cells import PROTOTYPE
from fedbudget.experiments.figures import FIGURES
from fedbudget.experiments.figures.figure import CASES, Claim, GridSize, Row, Rows

NOTHING: Mapping[str, dict[int, float]] = {}
LOSS_AFTER = ("time=5s", "time=100s")


def claims(name: str, rows: Rows) -> dict[str, Claim]:
    """Claims of a figure by their text without the title."""
    return {claim.text.partition(": ")[2]: claim for claim in FIGURES[name].claims(rows)}


class TestSingleRun:
    @staticmethod
    def rows(changed: Mapping[str, dict[int, float]] = NOTHING, last: int = 3) -> list[Row]:
        """Ten rounds in each case as in the paper, except for changed values."""
        values_by_case = {
            "delta": {1: 0.3, 2: 1.0, 3: 0.0, 4: 2.0},
            "rho": {1: 0.1, 2: 0.5, 3: 0.0, 4: 0.6},
            "beta": {1: 2.0, 2: 5.0, 3: 0.0, 4: 6.0},
            "c_time": {1: 0.02, 2: 0.02, 3: 0.09, 4: 0.02},
            "jump": dict.fromkeys(CASES, 40.0),
            "wave": dict.fromkeys(CASES, 0.5),
        } | dict(changed)
        results = []
        for case in CASES:
            values = {name: by_case[case] for name, by_case in values_by_case.items()}
            jump, wave, c = values.pop("jump"), values.pop("wave"), values.pop("c_time")
            for number, tau in enumerate([1, 10, 40, 40, 40, 40, 40, 40, jump, last]):
                estimates: dict[str, Any] = (
                    dict(values) if number else dict.fromkeys(values)
                )
                b = 0.1 * (1 + wave * (-1) ** number)
                times = {"c_time": c, "b_time": b, "spent_time": 3.0 * (number + 1)}
                results.append({"case": case, "tau": tau, **times, **estimates})
        return results

    def test_claims_hold(self) -> None:
        results = claims("instantaneous-dgd", self.rows())
        assert {text for text, claim in results.items() if claim.holds} == {
            "τ* is stable after it has adapted",
            "τ* falls at the end",
            "δ̂ is larger in Cases 2 and 4",
            "ρ̂ and β̂ are larger in Cases 2 and 4",
            "in Case 3 ρ̂ and β̂ are zero",
            "a step takes much longer in Case 3",
            "b fluctuates",
        }
        assert all(claim.holds and claim.quote for claim in results.values())

    @pytest.mark.parametrize(
        ("text", "changed"),
        [
            ("δ̂ is larger in Cases 2 and 4", {"delta": {1: 0.3, 2: 0.2, 3: 0.0, 4: 2.0}}),
            (
                "ρ̂ and β̂ are larger in Cases 2 and 4",
                {"rho": {1: 0.1, 2: 0.5, 3: 0.0, 4: 0.09}},
            ),
            (
                "ρ̂ and β̂ are larger in Cases 2 and 4",
                {"beta": {1: 5.0, 2: 5.0, 3: 0.0, 4: 6.0}},
            ),
            ("in Case 3 ρ̂ and β̂ are zero", {"rho": {1: 0.1, 2: 0.5, 3: 1e-9, 4: 0.6}}),
            (
                "τ* is stable after it has adapted",
                {"jump": {1: 40.0, 2: 400.0, 3: 40.0, 4: 40.0}},
            ),
            (
                "a step takes much longer in Case 3",
                {"c_time": {1: 0.02, 2: 0.02, 3: 0.039, 4: 0.02}},
            ),
            ("b fluctuates", {"wave": {1: 0.5, 2: 0.09, 3: 0.5, 4: 0.5}}),
        ],
    )
    def test_one_case_refutes_a_claim(
        self, text: str, changed: dict[str, dict[int, float]]
    ) -> None:
        results = claims("instantaneous-dgd", self.rows(changed))
        assert [name for name, claim in results.items() if not claim.holds] == [text]

    def test_last_tau_is_below_median(self) -> None:
        results = claims("instantaneous-sgd", self.rows(last=39))["τ* falls at the end"]
        assert results.holds
        assert results.measured.endswith("40 to 39 in Case 4")
        assert not claims("instantaneous-sgd", self.rows(last=40))[
            "τ* falls at the end"
        ].holds

    def test_stability_limit(self) -> None:
        """The limit is a deviation of half the mean. For 40, 40, 40, 40, 40 and j the mean
        is (200 + j) / 6 and the variance 5 (j - 40)² / 36.
        """
        text = "τ* is stable after it has adapted"
        for jump, share in ((100, "0.45"), (120, "0.56")):
            results = claims(
                "instantaneous-sgd", self.rows({"jump": dict.fromkeys(CASES, float(jump))})
            )[text]
            assert f"time: {share}, {share}, {share}, {share} in" in results.measured
            assert results.holds == (share <= "0.50")

    def test_sgd_has_no_step_claim(self) -> None:
        assert "a step takes much longer in Case 3" not in claims(
            "instantaneous-sgd", self.rows()
        )


class TestPrototype:
    def test_claims_use_measured_runs(self) -> None:
        simulated = [row | {"costs": "simulated"} for row in TestSingleRun.rows()]
        measured = [row | {"costs": "measured", "tau": 1} for row in TestSingleRun.rows()]
        text = "τ* is above 1 in Cases 1 and 2"
        results = claims("instantaneous-dgd-network", simulated + measured)
        assert not results[text].holds
        assert not results["τ* falls at the end"].holds
        higher = [row | {"costs": "measured"} for row in TestSingleRun.rows()]
        results = claims("instantaneous-dgd-network", simulated + higher)
        assert results[text].holds
        assert results[text].measured == "median 40, 40, 40, 40 in Cases 1-4"

    def test_cells_and_testbed(
        self,
    ) -> None:
        figure = FIGURES["instantaneous-sgd-network"]
        sweep = figure.sweep(figure.settings(None), GridSize(1))
        assert [cell.costs for cell in sweep.cells] == ["simulated"] * 4 + ["measured"] * 4
        assert {cell.nodes for cell in sweep.cells} == {5}
        assert sweep.testbed == PROTOTYPE
        fast, slow = min(PROTOTYPE.paces), max(PROTOTYPE.paces)
        assert PROTOTYPE.paces == (fast, fast, slow, slow, slow)
        assert slow / fast == 4
        assert 2 * PROTOTYPE.delay == 0.13


class TestAsynchronous:
    @staticmethod
    def rows(excess: dict[int, float], early: float = 0.1, lost: float = 0.02) -> list[Row]:
        """Asynchronous losses above 0.2: by `excess` at the end, by `early` before."""
        return [
            {
                "case": case,
                "method": method,
                "budget": budget,
                "loss": 0.2 * (1 + ((excess[case] if late else early) if ours else 0)),
                "accuracy": 0.9 - (lost if ours else 0),
            }
            for case in CASES
            for method, ours in (("paper", False), ("asynchronous", True))
            for budget, late in zip(LOSS_AFTER, (False, True), strict=True)
        ]

    def test_asynchronous_claims_hold(
        self,
    ) -> None:
        results = claims(
            "asynchronous-sgd", self.rows({1: 0.01, 2: 0.11, 3: -0.02, 4: 0.12})
        )
        assert [claim.holds for claim in results.values()] == [True, True, True, True]
        assert (
            "-2.0 in Case 2, -2.0 in Case 4"
            in results["asynchronous has a lower accuracy in Cases 2 and 4"].measured
        )

    def test_asynchronous_claims_fail(self) -> None:
        results = claims(
            "asynchronous-sgd",
            self.rows({1: 0.1, 2: 0.2, 3: 0.0, 4: 0.09}, early=-0.01, lost=0),
        )
        assert [claim.holds for claim in results.values()] == [False, False, False, False]
        slower = results["asynchronous converges more slowly in Cases 2 and 4"]
        assert (
            slower.measured
            == "its loss is higher at 1 of 2 times in Case 2, 1 of 2 times in Case 4"
        )

    @staticmethod
    def single(asynchronous: list[float], synchronous: list[float]) -> list[Row]:
        losses = {"paper": synchronous, "asynchronous": asynchronous}
        return [
            {
                "case": case,
                "method": method,
                "spent_time": float(number),
                "test_loss": loss,
                "accuracy": 0.9,
            }
            for case in CASES
            for method, values in losses.items()
            for number, loss in enumerate(values)
        ]

    def test_sudden_change_is_five_percent(
        self,
    ) -> None:
        falling = [0.5, 0.4, 0.3, 0.3]
        sudden = claims(
            "asynchronous-dgd-run", self.single([0.5, 0.4, 0.424, 0.41], falling)
        )
        (claim,) = sudden.values()
        assert claim.holds
        assert (
            "evaluations to the next: +6.0%, +6.0%, +6.0%, +6.0% in Cases 1-4, +0.0%, +0.0%"
            in claim.measured
        )
        (claim,) = claims(
            "asynchronous-dgd-run", self.single([0.5, 0.4, 0.416, 0.41], falling)
        ).values()
        assert not claim.holds

    def test_shared_changes_do_not_count(
        self,
    ) -> None:
        jumps = [0.5, 0.4, 0.44, 0.41]
        (claim,) = claims("asynchronous-dgd-run", self.single(jumps, jumps)).values()
        assert not claim.holds

    def test_unevaluated_rounds_do_not_count(self) -> None:
        rows = self.single([0.5, 0.4, 0.43, 0.41], [0.5, 0.4, 0.3, 0.3])
        unevaluated = [
            row | {"test_loss": None} if row["test_loss"] == 0.43 else row for row in rows
        ]
        (claim,) = claims("asynchronous-dgd-run", unevaluated).values()
        assert not claim.holds
        assert "+2.5%, +2.5%, +2.5%, +2.5% in Cases 1-4" in claim.measured
