"""`fedbudget data`: output, stream and exit code."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import fedbudget
from fedbudget.cli import fetching
from fedbudget.data import published
from fedbudget.data.download import mirror
from fedbudget.data.schema import read_schema
from support.commands import run_command
from support.web import Web, dataset_of, serving

CONTENTS = {"one.bin": b"one" * 1000, "two.bin": b"two"}
ZIPPED = {f"{name}.gz": gzip.compress(contents) for name, contents in CONTENTS.items()}


@pytest.fixture(autouse=True)
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    """Replace all published datasets by a small one on a local server."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FEDBUDGET_DATA", raising=False)
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with serving(ZIPPED) as web:
        small = replace(dataset_of(CONTENTS), sources=(mirror(web.url, ".gz"),))
        monkeypatch.setattr(published, "PUBLISHED", {"small": small})
        yield web


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> "Command":
    return Command(capsys)


class Command:
    """Runs `fedbudget data` and returns exit code, standard output and standard error."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        return run_command(self._capsys, "data", *arguments)


def put(folder: Path, **changed: bytes) -> None:
    (folder / "small").mkdir(parents=True, exist_ok=True)
    for name, contents in {
        **CONTENTS,
        **{f"{stem}.bin": text for stem, text in changed.items()},
    }.items():
        (folder / "small" / name).write_bytes(contents)


class TestGet:
    def test_prints_files_and_folder(
        self, web: Web, command: Command, tmp_path: Path
    ) -> None:
        host = web.url.removeprefix("http://").removesuffix("/")
        code, out, err = command("get", "small", "--data-dir", str(tmp_path / "mine"))
        assert (code, out) == (0, f"small is in {tmp_path}/mine/small\nlicence: none\n")
        assert err.splitlines() == [f"one.bin from {host}", f"two.bin from {host}"]
        assert command("get", "small", "--data-dir", str(tmp_path / "mine")) == (0, out, "")
        assert len(web.requests) == 2

    def test_folder_of_variable_or_cache(
        self, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, out, _ = command("get", "small")
        cache = Path(out.splitlines()[0].removeprefix("small is in "))
        assert cache.is_relative_to(tmp_path)
        assert (cache / "one.bin.gz").exists()
        monkeypatch.setenv("FEDBUDGET_DATA", str(tmp_path / "variable"))
        out = command("get", "small")[1]
        assert out.splitlines()[0] == f"small is in {tmp_path}/variable/small"

    def test_terminal_shows_progress_bars(
        self, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            fetching,
            "Console",
            lambda stderr: Console(stderr=stderr, force_terminal=True, width=120),
        )
        code, out, err = command("get", "small", "--data-dir", str(tmp_path))
        assert (code, out) == (0, f"small is in {tmp_path}/small\nlicence: none\n")
        assert "one.bin from 127.0.0.1" in err
        assert "━" in err

    def test_missing_source_is_one_line(
        self, web: Web, command: Command, tmp_path: Path
    ) -> None:
        web.files.clear()
        code, out, err = command("get", "small", "--data-dir", str(tmp_path / "mine"))
        assert (code, out) == (2, "")
        assert err.startswith("fedbudget: small could not be downloaded: 127.0.0.1:")
        assert err.endswith(": 404 Not Found\n")
        assert err.count("\n") == 1

    def test_unknown_and_embedded_names(self, command: Command) -> None:
        assert command("get", "large") == (
            2,
            "",
            "fedbudget: unknown dataset 'large'; published ones are small\n",
        )
        for name in ("digits", "heart-disease"):
            assert command("get", name) == (
                0,
                f"{name} is embedded; there is nothing to fetch\nlicence: CC BY 4.0\n",
                "",
            )


class TestCheck:
    def test_correct_files(self, command: Command, tmp_path: Path) -> None:
        put(tmp_path)
        code, out, err = command("check", "small", "--data-dir", str(tmp_path))
        assert (code, err) == (0, "")
        assert out.splitlines() == [
            "one.bin  ok",
            "two.bin  ok",
            f"small in {tmp_path}/small: complete, and all files are correct",
        ]

    def test_wrong_contents(self, command: Command, tmp_path: Path) -> None:
        put(tmp_path, two=b"2wo")
        code, out, _ = command("check", "small", "--data-dir", str(tmp_path))
        assert code == 1
        assert out.splitlines()[:2] == ["one.bin  ok", "two.bin  wrong contents"]
        assert out.endswith("1 of 2 files have wrong contents; fetch them again\n")
        (tmp_path / "small/two.bin").rename(tmp_path / "small/two.bin.gz")
        assert command("check", "small", "--data-dir", str(tmp_path))[:2] == (1, out)

    def test_incomplete_dataset(self, command: Command, tmp_path: Path) -> None:
        put(tmp_path)
        (tmp_path / "small/one.bin").unlink()
        code, out, _ = command("check", "small", "--data-dir", str(tmp_path))
        assert code == 1
        assert out.splitlines()[:2] == ["one.bin  missing", "two.bin  ok"]
        assert "incomplete, 1 of 2 files; these are correct and can be used" in out

    def test_no_files(self, command: Command, tmp_path: Path) -> None:
        code, out, err = command("check", "small", "--data-dir", str(tmp_path))
        assert (code, out) == (1, "one.bin  missing\ntwo.bin  missing\n")
        assert err.startswith(
            f"fedbudget: small was not found in {tmp_path} (--data-dir), "
        )

    def test_as_json(self, command: Command, tmp_path: Path) -> None:
        put(tmp_path, two=b"2wo")
        code, out, err = command("check", "small", "--json", "--data-dir", str(tmp_path))
        assert (code, err) == (1, "")
        result = json.loads(out)
        assert result["files"] == {"one.bin": "ok", "two.bin": "wrong contents"}
        assert (result["complete"], result["where"]) == (False, str(tmp_path / "small"))
        assert json.loads(command("check", "digits", "--json")[1])["complete"] is True
        code, out, err = command("check", "small", "--json")
        assert (code, err, json.loads(out)["where"]) == (1, "", None)


class TestList:
    def test_locations_and_states(self, command: Command, tmp_path: Path) -> None:
        code, out, err = command("list")
        assert (code, err) == (0, "")
        digits, heart, small = out.splitlines()[1:]
        assert heart.split()[0] == "heart-disease"
        assert digits.split()[0] == "digits"
        assert "embedded" in digits
        assert " ".join(small.split()) == "small small 3 3 kB 0 of 2 not found"
        put(tmp_path)
        row = command("list", "--data-dir", str(tmp_path))[1].splitlines()[3]
        assert row.split()[5:] == ["complete", str(tmp_path / "small")]
        (tmp_path / "small/one.bin").unlink()
        *_, last = command("list", "--data-dir", str(tmp_path))[1].splitlines()
        assert last == "small is incomplete: one.bin missing"

    def test_as_json(self, command: Command, tmp_path: Path) -> None:
        put(tmp_path)
        digits, _, small = json.loads(
            command("list", "--json", "--data-dir", str(tmp_path))[1]
        )["datasets"]
        assert (digits["name"], digits["where"]) == ("digits", "embedded")
        assert (small["bytes"], small["samples"], small["where"]) == (
            3003,
            3,
            str(tmp_path / "small"),
        )
        assert small["files"] == {"one.bin": "ok", "two.bin": "ok"}


class TestExport:
    def test_one_table_per_hospital(self, command: Command, tmp_path: Path) -> None:
        folder = tmp_path / "hospitals"
        code, out, err = command("export", "heart-disease", str(folder))
        assert (code, err) == (0, "")
        assert out.splitlines() == sorted(map(str, folder.iterdir()))
        header, first, *_ = (folder / "switzerland.csv").read_text().splitlines()
        assert header.startswith("age,sex,cp,trestbps,chol,")
        assert first == "32,1,1,95,,,0,127,0,.7,1,,,yes".replace(",.7", ",0.7")

    def test_existing_folder_is_kept(self, command: Command, tmp_path: Path) -> None:
        code, _, err = command("export", "heart-disease", str(tmp_path))
        assert (code, err) == (
            2,
            f"fedbudget: {tmp_path} exists already: choose a new folder\n",
        )


class TestDescribe:
    def test_table_and_findings(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, err = run_command(capsys, "describe", "heart-disease")
        assert (code, err) == (0, "")
        lines = out.splitlines()
        assert lines[0] == "heart-disease: 920 rows at 4 sites, 13 columns, target disease"
        assert "- chol is empty at switzerland" in lines
        assert max(map(len, lines)) <= 80

    def test_findings_name_options(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        path = tmp_path / "visits.csv"
        rows = [
            f"2024-01-{day:02},{'<5' if day == 7 else day},{day % 2}"
            for day in range(1, 29)
        ]
        path.write_text("visit,crp,ill\n" + "\n".join(rows))
        _, out, _ = run_command(capsys, "describe", str(path))
        text = " ".join(out.split())
        assert "visit looks like a date ('2024-01-01' in row 2): --drop it" in text
        assert "as missing with --missing '<5' and --impute mean" in text
        findings = " ".join(fedbudget.describe(path).findings)
        assert "as missing with missing='<5' and impute='mean'" in findings

    def test_sites_of_a_column(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        rows = "".join(f"{'ab'[n % 2]},{n},{n % 3}\n" for n in range(60))
        path = tmp_path / "t.csv"
        path.write_text("ward,age,ill\n" + rows)
        arguments = ("describe", str(path), "--partition", "by:ward", "--json")
        code, out, err = run_command(capsys, *arguments)
        assert (code, err) == (0, "")
        described = json.loads(out)
        assert described["rows"] == {"a": 30, "b": 30}
        assert described["columns"]["age"]["total"]["largest"] == 59
        code, _, err = run_command(capsys, "describe", str(path), "--partition", "case:1")
        assert (code, err) == (
            2,
            "fedbudget: --partition must be by:COLUMN, the column with the sites\n",
        )


def test_help_without_arguments(command: Command) -> None:
    code, out, err = command()
    assert (code, err) == (0, "")
    assert all(word in out for word in ("list", "get", "check"))


class TestSchema:
    def test_prints_a_usable_draft(self, command: "Command", tmp_path: Path) -> None:
        path = tmp_path / "rows.csv"
        rows = "".join(f"n{i},{i / 7},{'xy'[i % 2]},{i % 2}\n" for i in range(30))
        path.write_text("name,size,kind,y\n" + rows)
        options = ("--target", "y", "--drop", "name", "--classes", "0,1,2")
        code, out, err = command("schema", str(path), *options)
        assert (code, err) == (0, "")
        assert "Review each line" in out
        (tmp_path / "schema.toml").write_text(out)
        schema = read_schema(tmp_path / "schema.toml")
        assert schema.classes == ("0", "1", "2")
        assert schema.layout.columns[0].range == (0.0, 5.0)
        assert schema.layout.dropped == ("name",)

    def test_problems_name_the_options(self, command: "Command", tmp_path: Path) -> None:
        path = tmp_path / "rows.csv"
        path.write_text("name,y\n" + "".join(f"n{i},{i}\n" for i in range(30)))
        code, out, err = command("schema", str(path))
        assert (code, out) == (2, "")
        assert "--drop it" in err
