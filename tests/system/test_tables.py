"""Raw tables of four hospitals, from the first error to a model, locally and over gRPC."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from fedbudget.cli.main import main
from fedbudget.runs.folder import Run
from support.patients import SITES, write_patients
from support.processes import cli_options, commands, summary

TARGET = ["--target", "outcome"]
TRAINED = cli_options(model="softmax", tau=5, rounds=30, step_size=0.3, batch_size="full")
TRAINED += ["--method", "frugal", "--costs", "simulated", "--budget", "time=1000000s"]


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_patients(tmp_path / "sites")


def fedbudget(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return int(end.value.code or 0)


def suggested_options(message: str) -> list[str]:
    """The options that an error message suggests."""
    return shlex.split(re.findall(r"^Try: (.*)$", message, re.M)[0])


def test_suggested_options_train_a_model(
    sites: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One error message lists all problems and the options that solve them."""
    assert fedbudget("run", "--dataset", "sites", *TARGET, *TRAINED, "--out", "run") == 2
    message = capsys.readouterr().err
    assert [line.split()[1] for line in message.splitlines()[1:-1]] == [
        "patient",
        "visit",
        "bmi",
        "crp",
        "smoker",
    ]
    assert not Path("run").exists()

    options = suggested_options(message)
    assert options == ["--drop", "patient,visit", "--impute", "mean"]
    assert (
        fedbudget("run", "--dataset", "sites", *TARGET, *options, *TRAINED, "--out", "run")
        == 0
    )
    shown = capsys.readouterr().err
    assert "data: smoker is treated as a category: former, never, now" in shown
    found = summary(Path("run"))
    assert found["accuracy"] > 0.85  # the share of the more frequent class is 0.61
    layout = Run.open(Path("run")).model().layout
    assert layout is not None
    assert layout.feature_names == (
        "age",
        "sex=f",
        "sex=m",
        "bmi",
        "crp",
        "smoker=former",
        "smoker=never",
        "smoker=now",
    )


def test_column_order_does_not_matter(
    sites: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*TARGET, "--drop", "patient,visit", "--impute", "median"]
    assert fedbudget("run", "--dataset", "sites", *options, *TRAINED, "--out", "run") == 0
    rows = [line.split(",") for line in (sites / "north.csv").read_text().splitlines()]
    Path("turned.csv").write_text("\n".join(",".join(reversed(row)) for row in rows) + "\n")
    Path("fewer.csv").write_text("\n".join(",".join(row[3:]) for row in rows) + "\n")
    capsys.readouterr()
    assert fedbudget("evaluate", "run", "--dataset", "sites/north.csv") == 0
    assert fedbudget("evaluate", "run", "--dataset", "turned.csv") == 0
    as_it_is, turned = capsys.readouterr().out.splitlines()
    assert as_it_is == turned
    assert fedbudget("evaluate", "run", "--dataset", "fewer.csv") == 2
    assert (
        "fewer.csv has no column age; the columns are age, sex, bmi, crp, smoker"
        in capsys.readouterr().err
    )


def test_different_labels_are_reported(
    sites: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sites / "west.csv").write_text(
        (sites / "west.csv").read_text().replace("relapse", "Relapse")
    )
    options = [*TARGET, "--drop", "patient,visit", "--impute", "most-frequent", *TRAINED]
    assert fedbudget("run", "--dataset", "sites", *options, "--out", "run") == 0
    note = "data: classes that only some have: Relapse (west.csv); "
    note += "relapse (east.csv, north.csv, south.csv)"
    assert note in capsys.readouterr().err
    assert (
        fedbudget("run", "--dataset", "sites", *options, "--classes", "healthy,relapse")
        == 2
    )
    assert re.search(
        r"west\.csv: outcome, the target, is 'Relapse' in \d+ rows, such as row",
        capsys.readouterr().err,
    )


@pytest.mark.slow
def test_nodes_agree_with_one_process(
    sites: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layout and model are the same up to rounding, though each node has only one table."""
    options = [*TARGET, "--drop", "patient,visit", "--impute", "mean"]
    assert (
        fedbudget(
            "run",
            "--dataset",
            "sites",
            *options,
            *TRAINED,
            "--test-share",
            "0",
            "--out",
            "whole",
        )
        == 0
    )
    with commands(sites.parent) as start:
        aggregator = start.serve(
            "--nodes", "4", *TRAINED, "--test", "sites/west.csv", *options, "--out", "run"
        )
        raw = start.join(aggregator.port, "--data", "sites/east.csv", *TARGET, name="raw")
        assert raw.end() == 2
        assert suggested_options(raw.errors) == [
            "--drop",
            "patient,visit",
            "--impute",
            "mean",
        ]
        nodes = [
            start.join(aggregator.port, "--data", f"sites/{site}.csv", *options, name=site)
            for site in SITES
        ]
        assert aggregator.end() == 0
        assert [node.end() for node in nodes] == [0] * 4
    one, other = (Run.open(sites.parent / name).model() for name in ("whole", "run"))
    assert (one.layout, one.classes) == (other.layout, other.classes)
    assert one.standardization is not None
    assert other.standardization is not None
    np.testing.assert_allclose(
        other.standardization.mean, one.standardization.mean, rtol=1e-12
    )
    np.testing.assert_allclose(
        other.standardization.deviation, one.standardization.deviation, rtol=1e-12
    )
    np.testing.assert_allclose(other.w, one.w, atol=1e-4)
    assert summary(sites.parent / "run")["accuracy"] > 0.85


@pytest.mark.slow
def test_node_with_unknown_label_is_refused(sites: Path) -> None:
    options = [*TARGET, "--drop", "patient,visit", "--impute", "mean"]
    (sites / "west.csv").write_text(
        (sites / "west.csv").read_text().replace("relapse", "Relapse")
    )
    with commands(sites.parent) as start:
        aggregator = start.serve(
            "--nodes", "2", *TRAINED, "--classes", "healthy,relapse", "--out", "run"
        )
        other = start.join(
            aggregator.port, "--data", "sites/west.csv", *options, name="west"
        )
        assert other.end() == 1
        assert "its class 'Relapse' is not one of healthy, relapse" in other.errors
        for site in ("east", "south"):
            start.join(aggregator.port, "--data", f"sites/{site}.csv", *options, name=site)
        assert aggregator.end() == 0
    assert Run.open(sites.parent / "run").model().classes == ("healthy", "relapse")
