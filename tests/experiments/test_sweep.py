"""Sweeps: the grid and its order, mistakes in files, and the table of results."""

import json
import math
import os
import signal
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numba
import pytest
from pyarrow import parquet

import fedbudget
from fedbudget import tasks
from fedbudget.errors import UserError
from fedbudget.experiments import cells
from fedbudget.experiments.pool import unordered
from fedbudget.experiments.sweep import Sweep, gather, means, run
from fedbudget.launch.execute import execute
from fedbudget.settings.settings import Settings
from fedbudget.settings.types import Tau

EXAMPLE = Path(__file__).parents[2] / "examples" / "sweep.toml"
SHORT = Settings(model="svm", budget=("time=1s",), nodes=3)


def sweep_in(folder: Path, text: str) -> Sweep:
    file = folder / "s.toml"
    file.write_text(text)
    return Sweep.read(file)


def cell_names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "cells").iterdir()}


class TestGrid:
    def test_order_of_cells(self, tmp_path: Path) -> None:
        """The first key varies slowest, and seeds vary fastest."""
        sweep = sweep_in(
            tmp_path,
            "nodes = 4\n[grid]\nseeds = 3\nstep-size = [0.1, 1]\n"
            "tau = ['adaptive', 7]\ncase = [3, 1]\n",
        )
        assert sweep.varied == ("step_size", "tau", "partition", "seed")
        choices: list[Tau] = ["adaptive", 7]
        assert sweep.cells == tuple(
            Settings(nodes=4, step_size=step_size, tau=tau, partition=partition, seed=seed)
            for step_size, tau, partition, seed in product(
                [0.1, 1.0], choices, ["case:3", "case:1"], range(3)
            )
        )
        assert sweep.each == "run"

    def test_listed_seeds_come_last(self) -> None:
        sweep = Sweep.of(Settings(), {"seed": [5, 3], "tau": [1, 2]}, each="round")
        assert [(cell.tau, cell.seed) for cell in sweep.cells] == [
            (1, 5),
            (1, 3),
            (2, 5),
            (2, 3),
        ]
        assert sweep.each == "round"

    def test_names_with_underscore_or_hyphen(self) -> None:
        base = Settings(nodes=2)
        assert Sweep.of(base, {"step_size": [0.5]}) == Sweep.of(base, {"step-size": [0.5]})

    def test_budget_of_several_resources(self, tmp_path: Path) -> None:
        sweep = sweep_in(
            tmp_path, "[grid]\nbudget = ['time=5s', ['time=5s', 'bytes=1MB']]\n"
        )
        assert [cell.budget for cell in sweep.cells] == [
            ("time=5s",),
            ("time=5s", "bytes=1MB"),
        ]

    def test_task_gives_base_settings(self, tmp_path: Path) -> None:
        sweep = sweep_in(
            tmp_path, "task = 'svm-sgd-mnist'\nphi = 0.5\n[grid]\ncase = [2]\ntau = [4]\n"
        )
        task = Settings.from_toml(tasks.path("svm-sgd-mnist"))
        assert sweep.cells == (
            Settings(**{**task, "phi": 0.5, "partition": "case:2", "tau": 4}),
        )

    def test_data_folder_override(self, tmp_path: Path) -> None:
        (tmp_path / "s.toml").write_text("data-dir = 'a'\n[grid]\nseeds = 2\n")
        assert {
            cell.data_dir for cell in Sweep.read(tmp_path / "s.toml", data_dir="b").cells
        } == {"b"}

    def test_example_file(self) -> None:
        sweep = Sweep.read(EXAMPLE)
        assert sweep.varied == ("model", "partition", "tau", "seed")
        assert len(set(sweep.cells)) == len(sweep.cells) == 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes = = 5", "is not valid TOML"),
        ("nodes = 5", r"needs a table \[grid\] with at least one setting"),
        ("[grid]", r"needs a table \[grid\] with at least one setting"),
        ("grid = 5", r"needs a table \[grid\] with at least one setting"),
        ("taus = 5\n[grid]\nseeds = 2", r"unknown key 'taus'; did you mean tau\?"),
        (
            "[grid]\nxyz = [5]",
            r", \[grid\]: unknown key 'xyz'; known are model, .*, case, seeds",
        ),
        ("[grid]\ncases = [5]", r", \[grid\]: unknown key 'cases'; did you mean case\?"),
        ("[grid]\neach = ['run']", r", \[grid\]: unknown key 'each'"),
        (
            "nodes = 'five'\n[grid]\nseeds = 2",
            "nodes must be a whole number of at least 1, not 'five'",
        ),
        (
            "[grid]\nnodes = [5, 'six']",
            r", \[grid\]: nodes must be a whole number of at least 1, not 'six'",
        ),
        (
            "[grid]\nnodes = [5, true]",
            r", \[grid\]: nodes must be a whole number of at least 1, not True",
        ),
        ("[grid]\ntau = []", r"tau must be a list with at least one value, not \[\]"),
        ("[grid]\ntau = 5", "tau must be a list with at least one value, not 5"),
        (
            "[grid]\nmodel = 'svm'",
            "model must be a list with at least one value, not 'svm'",
        ),
        ("[grid]\ntau = [1, 2, 1]", "tau has 1 more than once"),
        ("[grid]\ncase = [1, 5]", "partition = 'case:5': case 5 does not exist"),
        ("[grid]\ncase = ['x']", "partition 'case:x' is not understood"),
        ("[grid]\nseeds = 0", "seeds must be a whole number of at least 1, not 0"),
        (
            "[grid]\nseeds = [1, 2]",
            r"seeds must be a whole number of at least 1, not \[1, 2\]",
        ),
        ("[grid]\nseeds = 2\nseed = [7]", "give seeds or seed, not both"),
        ("[grid]\ncase = [1]\npartition = ['files']", "give case or partition, not both"),
        (
            "tau = 1\n[grid]\ntau = [1]",
            r"tau varies in \[grid\], and must not be given outside of it",
        ),
        ("seed = 1\n[grid]\nseeds = 2", r"seed varies in \[grid\]"),
        ("partition = 'files'\n[grid]\ncase = [2]", r"partition varies in \[grid\]"),
        (
            "tau = 0\n[grid]\nseeds = 2",
            "tau must be adaptive or a whole number of at least 1, not 0",
        ),
        (
            "[grid]\nphi = [0.1, -1]\ntau = [5, 'adaptive']",
            r"\[grid\]: phi must be a positive number, not -1",
        ),
        (
            "step-size = 'auto'\n[grid]\nmethod = ['paper', 'centralized']",
            "method = 'centralized': method centralized needs a step-size that is",
        ),
        (
            "[grid]\nbudget = ['time=5parsec']",
            r"budget = \('time=5parsec',\): .*unknown unit 'parsec'",
        ),
        ("each = 'epoch'\n[grid]\nseeds = 2", "each must be run or round, not 'epoch'"),
        ("task = 'chess'\n[grid]\nseeds = 2", "unknown task 'chess'; use one of "),
        ("task = 5\n[grid]\nseeds = 2", "task must be a text, not 5"),
    ],
)
def test_mistakes_in_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        sweep_in(tmp_path, text)
    assert str(refused.value).startswith(str(tmp_path / "s.toml"))
    assert "\n" not in str(refused.value)


def test_missing_file_and_empty_grid(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.toml cannot be read: No such file"):
        Sweep.read(tmp_path / "none.toml")
    with pytest.raises(
        UserError, match="grid: a sweep needs at least one setting that varies"
    ):
        Sweep.of(Settings(), {})
    with pytest.raises(
        UserError,
        match=r"grid: tau must be adaptive or a whole number of at least 1, not 1\.5",
    ):
        Sweep.of(Settings(), {"tau": [1.5]})


def test_zero_jobs_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match="jobs must be at least 1, not 0"):
        run(Sweep.of(SHORT, {"seeds": 2}), tmp_path / "out", jobs=0)
    assert not (tmp_path / "out").exists()


class TestTable:
    def test_rows_equal_separate_runs(self, tmp_path: Path) -> None:
        base = Settings(model="svm", nodes=3, budget=("time=2s", "bytes=1MB"))
        table = run(
            Sweep.of(base, {"case": [2, 4], "tau": ["adaptive", 10], "seeds": 2}),
            tmp_path,
            jobs=1,
        )
        assert table.column_names == [
            *("partition", "case", "tau", "seed"),
            *("loss", "accuracy", "average_tau", "update_weighted_tau"),
            *("aggregations", "local_updates", "stopped_by"),
            *("spent_time", "spent_bytes", "overshoot_time", "overshoot_bytes", "error"),
        ]
        rows = table.to_pylist()
        choices: list[Tau] = ["adaptive", 10]
        for row, (case, tau, seed) in zip(
            rows, product([2, 4], choices, [0, 1]), strict=True
        ):
            result = fedbudget.train(
                model="svm", case=case, tau=tau, seed=seed, nodes=3, budget=base.budget
            )
            assert row == {
                "partition": f"case:{case}",
                "case": case,
                "tau": str(tau),
                "seed": seed,
                "loss": result.loss,
                "accuracy": result.accuracy,
                "average_tau": result.local_updates / result.aggregations,
                "update_weighted_tau": sum(record.tau**2 for record in result.rounds)
                / result.local_updates,
                "aggregations": result.aggregations,
                "local_updates": result.local_updates,
                "stopped_by": result.stopped_by,
                **{f"spent_{name}": amount for name, amount in result.spent.items()},
                **{
                    f"overshoot_{name}": amount for name, amount in result.overshoot.items()
                },
                "error": None,
            }
        assert parquet.read_table(tmp_path / "results.parquet").equals(table)

    def test_rows_of_rounds(self, tmp_path: Path) -> None:
        table = run(
            Sweep.of(SHORT, {"tau": ["adaptive", 2], "nodes": [2, 4]}, each="round"),
            tmp_path,
            jobs=1,
        )
        # A round has columns tau and nodes of its own.
        assert table.column_names[:2] == ["tau_setting", "nodes_setting"]
        expected = []
        choices: list[Tau] = ["adaptive", 2]
        for tau, nodes in product(choices, [2, 4]):
            for record in fedbudget.train(
                model="svm", tau=tau, nodes=nodes, budget="time=1s"
            ).rounds:
                row = {
                    "tau_setting": str(tau),
                    "nodes_setting": nodes,
                    **vars(record),
                    "error": None,
                }
                for name in ("c", "b", "spent"):
                    row[f"{name}_time"] = row.pop(name)["time"]
                row |= {
                    name: list(getattr(record, name))
                    for name in ("kept", "left_out", "missed")
                }
                omitted = (
                    "wall expected_c expected_b metrics spread work private extra excluded"
                )
                for name in omitted.split():
                    del row[name]
                expected.append(row)
        assert table.to_pylist() == expected

    def test_column_types(self, tmp_path: Path) -> None:
        grid: dict[str, list[Any]] = {
            "partition": ["case:2", "dirichlet:0.5"],
            "phi": [0.5],
            "batch-size": [10, "full"],
        }
        grid |= {"budget": ["time=1s", ["time=1s", "energy=1kJ"]]}
        table = run(Sweep.of(SHORT, grid), tmp_path, jobs=1)
        kinds = {
            name: str(table.schema.field(name).type) for name in table.column_names[:5]
        }
        assert kinds == {
            "partition": "string",
            "case": "int64",
            "phi": "double",
            "batch_size": "string",
            "budget": "string",
        }
        assert table["case"].to_pylist() == [2] * 4 + [None] * 4
        assert table["batch_size"].to_pylist() == ["10", "10", "full", "full"] * 2
        assert table["budget"].to_pylist() == ["time=1s", "time=1s, energy=1kJ"] * 4
        assert [amount is None for amount in table["spent_energy"].to_pylist()] == [
            True,
            False,
        ] * 4

    def test_columns_of_failed_runs(self, tmp_path: Path) -> None:
        good = run(Sweep.of(SHORT, {"seeds": 1}), tmp_path / "good", jobs=1)
        bad = run(
            Sweep.of(Settings(dataset="none.csv"), {"seeds": 1}), tmp_path / "bad", jobs=1
        )
        assert bad.schema.equals(good.schema)
        assert bad["loss"].to_pylist() == [None]
        assert "none.csv does not exist" in bad["error"][0].as_py()

    def test_means_over_seeds(self) -> None:
        sweep = Sweep.of(Settings(), {"case": [3, 1], "tau": [5], "seeds": 2})
        figures = [
            _figures(loss=1.0, accuracy=0.5),
            _figures(loss=2.0, accuracy=0.7),
            _figures(loss=4.0),
        ]
        outcomes: list[cells.Columns | cells.Failure] = [
            *figures,
            cells.Failure("it broke"),
        ]
        assert means(gather(sweep.cells, outcomes, varied=sweep.varied, each="run")) == [
            {"case": 3, "tau": 5, "runs": 2, "loss": 1.5, "accuracy": pytest.approx(0.6)},
            {"case": 1, "tau": 5, "runs": 1, "loss": 4.0, "accuracy": None},
        ]


def _figures(loss: float, accuracy: float | None = None) -> cells.Columns:
    result = fedbudget.train(budget="time=1s", rounds=1)
    return cells.columns(replace(result, loss=loss, accuracy=accuracy), "run")


def test_non_finite_loss_is_none(tmp_path: Path) -> None:
    for loss in (math.nan, math.inf):
        kept = cells.CellStore(tmp_path, "run")
        kept.write(SHORT, _figures(loss=loss))
        assert kept.read(SHORT)["loss"] == [None]


class TestCellStore:
    def test_only_missing_cells_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ran: list[tuple[int | str, int]] = []
        original = cells.run_in_process

        def record_run(settings: Settings) -> fedbudget.Result:
            ran.append((settings.tau, settings.seed))
            return original(settings)

        monkeypatch.setattr(cells, "run_in_process", record_run)
        small, large = (
            Sweep.of(SHORT, {"tau": taus, "seeds": 2}) for taus in ([5], [1, 5])
        )
        run(small, tmp_path / "a", jobs=1)
        run(large, tmp_path / "a", jobs=1)
        assert ran == [(5, 0), (5, 1), (1, 0), (1, 1)]
        run(large, tmp_path / "b", jobs=1)
        again, at_once = (
            (tmp_path / name / "results.parquet").read_bytes() for name in "ab"
        )
        assert again == at_once

    def test_key_depends_on_settings_and_version(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        figures = _figures(loss=1.0)
        cells.CellStore(tmp_path, "run").write(SHORT, figures)
        for other in (
            Settings(model="svm", budget=("time=1s",)),
            replace(SHORT, watts=6.0),
        ):
            assert other not in cells.CellStore(tmp_path, "run")
        assert SHORT in cells.CellStore(tmp_path, "run")
        assert SHORT not in cells.CellStore(tmp_path, "round")
        monkeypatch.setattr(cells, "__version__", "99.0")
        assert SHORT not in cells.CellStore(tmp_path, "run")

    def test_damaged_cell_is_named(self, tmp_path: Path) -> None:
        sweep = Sweep.of(SHORT, {"seeds": 1})
        run(sweep, tmp_path, jobs=1)
        (cell,) = (tmp_path / "cells").iterdir()
        cell.write_text("{")
        with pytest.raises(
            UserError,
            match=rf"{cell.name} cannot be read: .*; delete it to make the run again",
        ):
            run(sweep, tmp_path, jobs=1)

    def test_cells_hold_no_time_or_path(self, tmp_path: Path) -> None:
        run(Sweep.of(SHORT, {"seeds": 1}, each="round"), tmp_path, jobs=1)
        (cell,) = (tmp_path / "cells").iterdir()
        assert "wall" not in json.loads(cell.read_text())
        assert str(tmp_path) not in cell.read_text()


class TestFailure:
    def test_failed_run_fills_its_row(self, tmp_path: Path) -> None:
        calls: list[tuple[int, int, int]] = []
        # With ten nodes, each has 143 of the 1437 samples.
        base = Settings(model="svm", budget=("time=1s",), batch_size=200)
        sweep = Sweep.of(base, {"nodes": [3, 10], "tau": [2, 4]})
        table = run(sweep, tmp_path, jobs=1, progress=lambda *counts: calls.append(counts))
        assert calls == [(0, 4, 0), (1, 4, 0), (2, 4, 0), (3, 4, 1), (4, 4, 2)]
        errors, losses = table["error"].to_pylist(), table["loss"].to_pylist()
        assert errors[:2] == [None, None]
        assert all(
            "batch-size 200 is larger than the largest shard" in error
            for error in errors[2:]
        )
        assert [loss is None for loss in losses] == [False, False, True, True]
        assert len(cell_names(tmp_path)) == 2
        calls.clear()
        run(sweep, tmp_path, jobs=1, progress=lambda *counts: calls.append(counts))
        assert calls == [(2, 4, 0), (3, 4, 1), (4, 4, 2)]  # failed runs are repeated

    def test_internal_error_is_in_row(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(settings: Settings) -> fedbudget.Result:
            raise ZeroDivisionError("division by zero")

        monkeypatch.setattr(cells, "run_in_process", broken)
        table = run(Sweep.of(SHORT, {"seeds": 1}), tmp_path, jobs=1)
        assert table["error"].to_pylist() == ["ZeroDivisionError: division by zero"]

    def test_killed_process_is_reported(
        self,
    ) -> None:
        with pytest.raises(ChildProcessError, match="a process was killed"):
            list(unordered(_end_process, [0, 1, 2], jobs=2))


def _end_process(item: int) -> int:
    os._exit(9)


def test_interrupted_run_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = execute

    def interrupted(plan: Any) -> fedbudget.Result:
        return original(
            plan,
            callbacks=[
                lambda record: (
                    signal.raise_signal(signal.SIGINT) if record.round == 1 else None
                )
            ],
        )

    monkeypatch.setattr(cells, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(Sweep.of(SHORT, {"seeds": 3}), tmp_path, jobs=1)
    assert cell_names(tmp_path) == set()
    assert not (tmp_path / "results.parquet").exists()


def test_two_processes_give_same_bytes(
    tmp_path: Path,
) -> None:
    threads = numba.get_num_threads()
    sweep = Sweep.of(
        SHORT, {"model": ["svm", "softmax"], "case": [1, 4], "seeds": 3}, each="round"
    )
    one, two = (run(sweep, tmp_path / str(jobs), jobs=jobs) for jobs in (1, 2))
    assert two.equals(one)
    assert cell_names(tmp_path / "1") == cell_names(tmp_path / "2")
    first, second = (
        (tmp_path / str(jobs) / "results.parquet").read_bytes() for jobs in (1, 2)
    )
    assert first == second
    assert numba.get_num_threads() == threads
