"""The figures of the paper's method and frugal in benchmarks/methods.py."""

from typing import Any

import pytest
from benchmarks.methods import FIGURES

from fedbudget.experiments.figures.figure import CASES, GridSize, Row


def row(**columns: Any) -> Row:
    return {
        "method": "paper",
        "accuracy": 0.9,
        "update_weighted_tau": 10.0,
        "error": None,
        **columns,
    }


@pytest.mark.parametrize("name", FIGURES)
def test_quick_grid_is_smaller(name: str) -> None:
    figure = FIGURES[name]
    full, quick = (
        figure.sweep(figure.settings(None), GridSize(2, quick=quick)).cells
        for quick in (False, True)
    )
    assert len(set(full)) == len(full) > len(quick)


class TestMethods:
    @staticmethod
    def rows(
        frugal: dict[int, float], *, model: str = "svm", dataset: str = "mnist"
    ) -> list[Row]:
        """Losses of 0.2 to 0.3 with fixed τ. The paper's method has 0.21 in Case 1 and 0.25
        in other cases.
        """
        task = {"model": model, "dataset": dataset, "batch_size": "100"}
        results = []
        for case in CASES:
            results += [
                row(case=case, tau=str(tau), loss=loss, **task)
                for tau, loss in ((1, 0.3), (10, 0.2))
            ]
            results.append(
                row(case=case, tau="adaptive", loss=0.21 if case == 1 else 0.25, **task)
            )
            results.append(
                row(
                    case=case,
                    tau="adaptive",
                    loss=frugal[case],
                    **(task | {"method": "frugal"}),
                )
            )
        return results

    def test_frugal_claims_hold(self) -> None:
        results = FIGURES["methods"].claims(
            self.rows({1: 0.202, 2: 0.19, 3: 0.2, 4: 0.199})
        )
        assert [claim.holds for claim in results] == [True, True, True]
        assert results[0].measured == "+0.020, -0.100, +0.000, -0.010 in Cases 1-4"
        assert results[1].measured == "-0.080, -0.600, -0.500, -0.510 in Cases 1-4"
        assert results[2].measured == "to -0.300, -0.075 of the paper's method's"

    def test_claim_is_weaker_for_other_models(self) -> None:
        same = {1: 0.2, 2: 0.2, 3: 0.2, 4: 0.2}
        assert not FIGURES["methods"].claims(self.rows(same))[0].holds
        assert (
            FIGURES["methods"]
            .claims(self.rows(same, model="linear", dataset="energy"))[0]
            .holds
        )

    def test_frugal_claims_fail(self) -> None:
        far, behind, gap = FIGURES["methods"].claims(
            self.rows({1: 0.213, 2: 0.19, 3: 0.2, 4: 0.225})
        )
        assert [far.holds, behind.holds, gap.holds] == [False, False, False]
        assert gap.measured == "to -0.575, +0.300 of the paper's method's"

    def test_table_rows(self) -> None:
        rows = self.rows(dict.fromkeys(CASES, 0.19)) + self.rows(
            dict.fromkeys(CASES, 0.2), model="linear"
        )
        table = FIGURES["methods"].table(rows)
        assert table is not None
        results = table[1:]
        assert len(results) == 8
        losses = ("0.2000 (τ=10)", "0.2500", "0.1900")
        assert results[1] == ("svm, mnist", "2", *losses, "+0.500", "-0.100")


class TestOnePhi:
    @staticmethod
    def rows(losses: tuple[float, float, float, float]) -> list[Row]:
        task = {"model": "svm", "dataset": "digits", "batch_size": 100}
        return [
            row(case=case, phi=phi, loss=loss, **(task | {"method": method}))
            for method in ("paper", "frugal")
            for case in (1, 2, 4)
            for phi, loss in zip((0.00025, 0.0025, 0.025, 0.25), losses, strict=True)
        ]

    def test_loss_near_the_best(self) -> None:
        (claim,) = FIGURES["one-phi"].claims(self.rows((0.2, 0.208, 0.3, 0.3)))
        assert claim.holds
        assert claim.measured == "+4.0%, +4.0%, +4.0% in Cases 1, 2, 4"

    def test_loss_far_from_best(self) -> None:
        assert not FIGURES["one-phi"].claims(self.rows((0.2, 0.22, 0.3, 0.3)))[0].holds

    def test_table_has_both_methods(self) -> None:
        results = FIGURES["one-phi"].table(self.rows((0.2, 0.21, 0.22, 0.23)))
        assert results is not None
        assert len(results[0]) == 2 + 2 * 4
        assert results[3] == (
            "svm, digits",
            "4",
            *("0.2000", "0.2100", "0.2200", "0.2300") * 2,
        )
