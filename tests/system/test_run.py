"""Commands that users and scripts call one after the other on one run."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from sklearn.datasets import load_digits

from support.commands import run_command

FEDBUDGET = Path(sys.executable).with_name("fedbudget")
OPTIONS = "--dataset digits --model svm --nodes 4 --case 2 --seed 5 --batch-size 40"
OPTIONS += " --method frugal --phi 0.03 --step-size 0.02 --validation 0"
BUDGET = "--budget time=4s --budget energy=5kJ --watts 2.5"


def fedbudget(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Run a command that must succeed; return standard output and standard error."""
    code, out, err = run_command(capsys, *command.split())
    assert code == 0, err
    return out, err


def rounds_of(run: Path) -> list[str]:
    """The lines of rounds.jsonl without the wall-clock time."""
    return [
        re.sub(r'"wall":[^,}]+', "", line)
        for line in (run / "rounds.jsonl").read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("system")
    done = subprocess.run(
        [FEDBUDGET, "run", *OPTIONS.split(), *BUDGET.split(), "--out", "first", "--json"],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=300,
        check=True,
    )
    return folder / "first", done


@pytest.fixture
def run(
    finished: tuple[Path, subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> Path:
    monkeypatch.chdir(finished[0].parent)
    return finished[0]


@pytest.fixture
def printed(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(finished[1].stdout)
    return found


class TestJson:
    def test_stdout_is_one_object(
        self, finished: tuple[Path, subprocess.CompletedProcess[str]]
    ) -> None:
        out, err = finished[1].stdout, finished[1].stderr
        assert (out.count("\n"), err) == (1, "")
        assert json.loads(out).keys() >= {
            "loss",
            "accuracy",
            "average_tau",
            "aggregations",
            "local_updates",
            "spent",
            "budget",
            "overshoot",
            "stopped_by",
            "run",
        }

    def test_contains_budget_and_stop_reason(self, printed: dict[str, Any]) -> None:
        assert printed["run"] == "first"
        assert printed["budget"] == {"time": 4.0, "energy": 5000.0}
        assert printed["stopped_by"] == "time"
        assert (
            printed["spent"].keys()
            == printed["overshoot"].keys()
            == printed["budget"].keys()
        )

    def test_loss_and_accuracy_match_saved_model(
        self, run: Path, printed: dict[str, Any]
    ) -> None:
        w = load_file(run / "model.safetensors")["weight"].astype(np.float64)
        known = load_digits()
        x, y = known.data / 16, np.where(known.target % 2 == 0, 1, -1)
        slack = np.maximum(0, 1 - y[:1437] * (x[:1437] @ w))
        assert printed["loss"] == pytest.approx(
            0.05 * w @ w + 0.5 * np.mean(slack**2), rel=1e-5
        )
        assert printed["accuracy"] == pytest.approx(
            np.mean(np.sign(x[1437:] @ w) == y[1437:])
        )

    def test_counts_match_the_records(self, run: Path, printed: dict[str, Any]) -> None:
        records = [
            json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()
        ]
        taus = [record["tau"] for record in records]
        assert printed["local_updates"] == sum(taus)
        assert printed["aggregations"] == sum(tau > 0 for tau in taus)
        assert printed["average_tau"] == pytest.approx(
            printed["local_updates"] / printed["aggregations"]
        )
        assert printed["spent"] == records[-1]["spent"]

    def test_equals_the_summary(self, run: Path, printed: dict[str, Any]) -> None:
        summary = json.loads((run / "summary.json").read_text())
        assert printed.items() <= summary.items()
        assert summary["status"] == "finished"
        assert summary["sources"] == {"time": "simulated", "energy": "declared"}


def test_files_of_a_finished_run(run: Path) -> None:
    assert {path.name for path in run.iterdir()} == {
        "checkpoint.safetensors",
        "config.toml",
        "rounds.jsonl",
        "nodes.json",
        "summary.json",
        "model.safetensors",
        "plot.png",
    }


class TestRepeating:
    def test_config_repeats_the_run(
        self, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fedbudget(f"run --config {run}/config.toml --out {tmp_path}/second --json", capsys)
        assert rounds_of(tmp_path / "second") == rounds_of(run)
        assert (tmp_path / "second" / "config.toml").read_bytes() == (
            run / "config.toml"
        ).read_bytes()
        first, second = (
            load_file(path / "model.safetensors")["weight"]
            for path in (run, tmp_path / "second")
        )
        assert first.tobytes() == second.tobytes()

    def test_option_overrides_one_setting(
        self, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fedbudget(
            f"run --config {run}/config.toml --seed 6 --out {tmp_path}/other --json", capsys
        )
        assert rounds_of(tmp_path / "other") != rounds_of(run)
        mine, other = (
            (path / "config.toml").read_text().splitlines()
            for path in (run, tmp_path / "other")
        )
        assert [pair for pair in zip(mine, other, strict=True) if pair[0] != pair[1]] == [
            ("seed = 5", "seed = 6")
        ]


class TestShow:
    def test_prints_rounds_and_redraws_plot(
        self, run: Path, printed: dict[str, Any], capsys: pytest.CaptureFixture[str]
    ) -> None:
        (run / "plot.png").unlink()
        out, _ = fedbudget("show first --all", capsys)
        for number in range(1, len(rounds_of(run)) + 1):
            assert re.search(rf"^ *{number} ", out, re.MULTILINE)
        assert f"loss: {printed['loss']:.4g}" in out
        assert f"stopped by: {printed['stopped_by']}" in out
        assert (run / "plot.png").read_bytes().startswith(b"\x89PNG")

    def test_json_is_the_summary(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert json.loads(fedbudget("show first --json", capsys)[0]) == json.loads(
            (run / "summary.json").read_text()
        )

    def test_unfinished_run_is_shown(
        self, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name in ("config.toml", "rounds.jsonl"):
            (tmp_path / name).write_bytes((run / name).read_bytes())
        assert "the run has not finished" in fedbudget(f"show {tmp_path}", capsys)[0]
        assert (
            json.loads(fedbudget(f"show {tmp_path} --json", capsys)[0])["status"]
            == "unfinished"
        )


@pytest.mark.usefixtures("run")
class TestExplain:
    def test_curve_is_smallest_at_chosen_tau(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        records = [
            json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()
        ]
        chosen = [
            record
            for record in records
            if record["reason"] in ("minimum of G", "search limit")
        ]
        assert chosen
        for record in chosen:
            found = json.loads(
                fedbudget(f"explain first --round {record['round']} --json", capsys)[0]
            )
            assert (found["tau"], found["reason"]) == (record["tau"], record["reason"])
            assert (
                min(found["curve"], key=lambda point: point["value"])["tau"]
                == record["tau"]
            )

    def test_chart_marks_the_chosen_tau(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        records = [
            json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()
        ]
        number = next(
            record["round"] for record in records if record["reason"] == "minimum of G"
        )
        out, _ = fedbudget(f"explain first --round {number}", capsys)
        bars = {line: line.count("█") for line in out.splitlines() if "█" in line}
        marked = [line for line in bars if line.endswith("smallest and chosen")]
        assert len(marked) == 1
        assert bars[marked[0]] == min(bars.values()) == 1
        assert int(marked[0].split()[0]) == records[number - 1]["tau"]

    def test_first_round_has_no_curve(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert (
            json.loads(fedbudget("explain first --round 1 --json", capsys)[0])["curve"]
            == []
        )


def test_evaluate_repeats_the_test_accuracy(
    run: Path, printed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(fedbudget(f"evaluate {run} --dataset digits --json", capsys)[0])
    assert (found["samples"], found["accuracy"]) == (360, printed["accuracy"])
    assert (
        f"accuracy {printed['accuracy']:.4f}"
        in fedbudget(f"evaluate {run} --dataset digits", capsys)[0]
    )


class TestCompare:
    COMMAND = "compare --cases 1,2 --taus 1,10 --seeds 2 --budget time=2s"

    def test_json_equals_single_runs(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out, err = fedbudget(f"{self.COMMAND} --json", capsys)
        assert (out.count("\n"), err) == (1, "")
        cases = json.loads(out)["cases"]
        assert [case["case"] for case in cases] == [1, 2]
        assert [each["tau"] for each in cases[1]["fixed"]] == [1, 10]
        common = "--case 2 --tau 10 --method paper --budget time=2s --json"
        losses = [
            json.loads(
                fedbudget(f"run {common} --seed {seed} --out {tmp_path}/{seed}", capsys)[0]
            )["loss"]
            for seed in (0, 1)
        ]
        assert cases[1]["fixed"][1]["loss"] == pytest.approx(sum(losses) / 2)
        for case in cases:
            low, high = sorted(each["loss"] for each in case["fixed"])
            assert case["regret"] == pytest.approx(
                (case["adaptive"]["loss"] - low) / (high - low)
            )

    def test_table_marks_best_fixed_tau(self, capsys: pytest.CaptureFixture[str]) -> None:
        cases = json.loads(fedbudget(f"{self.COMMAND} --json", capsys)[0])["cases"]
        out, _ = fedbudget(self.COMMAND, capsys)
        for case in cases:
            best = min(case["fixed"], key=lambda each: each["loss"])
            assert f"{best['loss']:.4f}*" in out
            assert f"{case['regret']:.3f}" in out
        assert out.count("*") in (2, 3)  # the third may be a footnote


def test_folder_becomes_one_node_per_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    for node in range(3):
        x = rng.integers(0, 255, (40, 5)).astype(np.uint8)
        np.savez(tmp_path / f"node{node}.npz", x=x, y=x[:, 0] > 127)
    out, _ = fedbudget(
        f"run --dataset {tmp_path} --budget time=2s --out {tmp_path}/run --json", capsys
    )
    assert json.loads(out)["stopped_by"] in ("time", "validation")
    config = (tmp_path / "run" / "config.toml").read_text().splitlines()
    assert "nodes = 3" in config
    assert 'partition = "files"' in config


def test_run_without_out_creates_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    out, err = fedbudget("run --budget time=1s", capsys)
    (run,) = (tmp_path / "runs").iterdir()
    assert f"run: runs/{run.name}" in out.splitlines()
    assert err.startswith(
        "softmax on digits, 5 nodes, case:1, adaptive τ, accelerated; "
        "budget time=1s (simulated)\n"
    )
    assert json.loads((run / "summary.json").read_text())["run"] == f"runs/{run.name}"
