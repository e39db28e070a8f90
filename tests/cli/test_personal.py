"""Commands for personal models, of sites with bad data and of sites that do not exist."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedbudget.cli.main import main
from fedbudget.errors import UserError
from fedbudget.trained.model import model_path
from support.commands import run_command

HEADER = "site,a,b,y"


def table(sizes: dict[str, int], one_class: str = "") -> str:
    """Return a table whose classes follow from the sum of the features."""
    rng = np.random.default_rng(1)
    lines = [HEADER]
    for site, size in sizes.items():
        for a, b in rng.standard_normal((size, 2)).tolist():
            y = "yes" if site == one_class or a + b > 0 else "no"
            lines.append(f"{site},{a:.3f},{b:.3f},{y}")
    return "\n".join([*lines, ""])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with personal models of north, south and west, which has one class."""
    folder = tmp_path_factory.mktemp("sites")
    text = table({"north": 80, "south": 60, "west": 30}, one_class="west")
    (folder / "sites.csv").write_text(text)
    (folder / "new.csv").write_text("a,b\n3,4\n-1,-2\n")
    options = ["--target", "y", "--partition", "by:site", "--costs", "simulated"]
    options += ["--budget", "time=1s", "--personal", "--out", str(folder / "run")]
    with pytest.raises(SystemExit) as ended:
        main(["run", "--dataset", str(folder / "sites.csv"), *options])
    assert ended.value.code == 0
    return folder


def test_site_with_one_class(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It keeps the global model, and the report has the reason."""
    summary = json.loads((folder / "run" / "summary.json").read_text())
    west = summary["site_report"]["west"]
    assert (west["kept"], west["gain"], west["alone"]) == ("one class", None, None)
    predicted = folder / "west.csv"
    for site in ([], ["--site", "west"]):
        arguments = [str(folder / "run"), "--dataset", str(folder / "new.csv"), *site]
        assert run_command(capsys, "predict", *arguments, "--out", str(predicted))[0] == 0
        assert predicted.read_text().splitlines()[1].startswith("yes")


@pytest.mark.parametrize(
    "command",
    [
        ["predict", "--dataset", "new.csv"],
        ["evaluate", "--dataset", "sites.csv"],
        ["export", "--to", "onnx"],
    ],
    ids=lambda command: command[0],
)
def test_unknown_site(
    folder: Path,
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    name, *options = command
    code, out, errors = run_command(capsys, name, "run", *options, "--site", "east")
    message = "fedbudget: unknown site 'east'; run has models of north, south, west\n"
    assert (code, out, errors) == (2, "", message)
    assert sorted(folder.rglob("*")) == before


def test_unknown_site_of_many(tmp_path: Path) -> None:
    (tmp_path / "personal").mkdir()
    for number in range(15):
        (tmp_path / "personal" / f"ward {number:02}.safetensors").touch()
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match=r"unknown site 'x'; .* ward 11 and 3 more$"):
        model_path(tmp_path, "x")
    with pytest.raises(UserError, match="unknown site 'ward 7'; did you mean ward"):
        model_path(tmp_path, "ward 7")


@pytest.mark.parametrize("size", [1, 9])
def test_site_with_few_rows(
    tmp_path: Path, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its table takes part, but no figures are shown of its rows."""
    sites = tmp_path / "sites"
    sites.mkdir()
    header, *rows = table({"north": 80, "south": 60, "west": size}).splitlines()
    for name in ("north", "south", "west"):
        own = [row.partition(",")[2] for row in rows if row.startswith(name)]
        lines = [header.partition(",")[2], *own, ""]
        (sites / f"{name}.csv").write_text("\n".join(lines))
    code, out, _ = run_command(
        capsys,
        *("run", "--dataset", str(sites), "--target", "y", "--costs", "simulated"),
        *("--test-share", "0", "--budget", "time=1s", "--personal"),
        *("--out", str(tmp_path / "run")),
    )
    (line,) = [line for line in out.splitlines() if line.startswith("west ")]
    assert (code, line.split()) == (
        0,
        ["west", str(size), "-", "-", "-", "-", "few", "rows"],
    )


def test_column_with_a_site_of_one_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sites.csv").write_text(table({"north": 80, "south": 60, "west": 1}))
    code, _, errors = run_command(
        capsys,
        *("run", "--dataset", "sites.csv", "--target", "y", "--partition", "by:site"),
        *("--budget", "time=1s", "--out", "run"),
    )
    assert code == 2
    assert errors.startswith(
        "fedbudget: sites.csv: 1 of 3 sites in site have fewer than 2 rows: west. A node "
        "cannot train on them: leave these rows out"
    )
    assert errors.count("\n") == 1
    assert not Path("run").exists()
