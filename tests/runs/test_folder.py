"""The folder of a run: reading, atomic writing, resuming, and ownership by one process."""

import json
import os
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedbudget import durable_files
from fedbudget.data.dataset import Dataset, Part
from fedbudget.errors import UserError
from fedbudget.models.description import NamedTensors
from fedbudget.runs.folder import OWNER, Ownership, Run, RunWriter, require_free
from fedbudget.runs.saved_model import SavedModel
from fedbudget.settings.settings import Settings
from support.small_disk import fill, small_disk
from support.synthetic_runs import record


@pytest.fixture(autouse=True)
def _short_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up failed writes after 0.1 s."""
    monkeypatch.setattr(durable_files, "PATIENCE", 0.1)


SETTINGS = Settings(nodes=3, partition="case:2", batch_size=10)
CONFIG = SETTINGS.to_toml()


def files(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in path.iterdir()}


class TestRun:
    def test_reads_what_was_written(self, tmp_path: Path) -> None:
        writer = RunWriter(tmp_path / "a" / "run", CONFIG)
        for number in (1, 2, 3):
            writer.append(record(number))
        w = np.array([1.5, -2.0], np.float32)
        samples = Dataset("a", Part(np.empty((0, 2))))
        saved = SavedModel(w, "svm", samples, NamedTensors({"weight": (2,)}))
        writer.finish({"loss": 0.25, "status": "finished"}, saved.to_bytes())
        run = Run.open(tmp_path / "a" / "run")
        assert run.settings == SETTINGS
        assert run.rounds == [record(1), record(2), record(3)]
        assert run.summary == {"loss": 0.25, "status": "finished"}
        assert run.model().w.tolist() == [1.5, -2.0]
        assert set(files(run.path)) == {
            "config.toml",
            "rounds.jsonl",
            "summary.json",
            "model.safetensors",
        }

    def test_rounds_are_written_at_once(self, tmp_path: Path) -> None:
        writer = RunWriter(tmp_path / "run", SETTINGS.to_toml())
        for number in (1, 2):
            writer.append(record(number))
            run = Run.open(tmp_path / "run")
            assert len(run.rounds) == number
            assert run.summary is None
        writer.finish({}, b"")

    def test_incomplete_last_line_is_skipped(self, tmp_path: Path) -> None:
        writer = RunWriter(tmp_path / "run", SETTINGS.to_toml())
        writer.append(record(1))
        writer.close()
        whole = record(2).to_json()
        for length in range(len(whole)):
            (tmp_path / "run" / "rounds.jsonl").write_text(
                record(1).to_json() + "\n" + whole[:length]
            )
            assert Run.open(tmp_path / "run").rounds == [record(1)]

    @pytest.mark.parametrize("missing", ["config.toml", "rounds.jsonl"])
    def test_incomplete_folder_is_refused(self, tmp_path: Path, missing: str) -> None:
        RunWriter(tmp_path / "run", CONFIG).finish({}, b"")
        (tmp_path / "run" / missing).unlink()
        with pytest.raises(UserError, match="is not the folder of a run"):
            Run.open(tmp_path / "run")

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("rounds.jsonl", "{not json\n"),
            ("rounds.jsonl", '{"round": 1}\n'),
            ("rounds.jsonl", "[1, 2]\n"),
            ("summary.json", "{"),
        ],
    )
    def test_damaged_records_are_refused(
        self, tmp_path: Path, name: str, content: str
    ) -> None:
        RunWriter(tmp_path / "run", CONFIG).finish({}, b"")
        (tmp_path / "run" / name).write_text(content)
        with pytest.raises(UserError, match="the run's records cannot be read"):
            Run.open(tmp_path / "run")


class TestRunWriter:
    def test_non_empty_folder_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "mine.txt").write_text("important")
        with pytest.raises(UserError, match="is not empty; a run needs an empty folder"):
            RunWriter(tmp_path, SETTINGS.to_toml())
        assert files(tmp_path) == {"mine.txt": b"important"}

    def test_empty_folder_is_accepted(self, tmp_path: Path) -> None:
        RunWriter(tmp_path, CONFIG).finish({}, b"")
        assert Run.open(tmp_path).settings == SETTINGS

    @pytest.mark.parametrize("out", ["file", "file/run"])
    def test_unwritable_folder_is_refused(self, tmp_path: Path, out: str) -> None:
        (tmp_path / "file").write_text("a file")
        with pytest.raises(UserError, match="cannot be written to"):
            RunWriter(tmp_path / out, SETTINGS.to_toml())
        assert files(tmp_path) == {"file": b"a file"}

    def test_files_are_replaced_atomically(self, tmp_path: Path) -> None:
        with small_disk(tmp_path / "disk", 2**18) as disk:
            writer = RunWriter(disk / "run", SETTINGS.to_toml())
            writer.finish({"loss": 1.0}, b"the first model")
            fill(disk)
            with pytest.raises(OSError, match="No space left"):
                writer.replace("model.safetensors", b"the second model")
            assert files(writer.path)["model.safetensors"] == b"the first model"

    @pytest.mark.parametrize("free", [0, 300])
    def test_full_disk_leaves_whole_records(self, tmp_path: Path, free: int) -> None:
        with small_disk(tmp_path / "disk", 2**18) as disk:
            writer = RunWriter(disk / "run", SETTINGS.to_toml())
            number = 0
            size = 0
            # Fill the block, or leave space for a part of a record.
            while (size := size + len(record(number + 1).to_json()) + 1) < 4096 - free:
                number += 1
                writer.append(record(number))
            fill(disk)
            before = files(writer.path)["rounds.jsonl"]
            long = replace(record(number + 1), kept=("x" * 4096,))
            for _ in range(2):
                with pytest.raises(OSError, match="No space left"):
                    writer.append(long)
                assert files(writer.path)["rounds.jsonl"] == before
            (disk / "filler").unlink()
            writer.append(record(number + 1))
            writer.finish({}, b"")
            assert Run.open(writer.path).rounds == [
                record(k + 1) for k in range(number + 1)
            ]


class TestResume:
    """A resumed run continues after the last record of its checkpoint."""

    def interrupted(self, path: Path, *numbers: int, rest: str = "") -> Path:
        writer = RunWriter(path, SETTINGS.to_toml())
        for number in numbers:
            writer.append(record(number))
        writer.close()
        with (path / "rounds.jsonl").open("a") as file:
            file.write(rest)
        return path

    def rounds(self, path: Path) -> list[int]:
        lines = (path / "rounds.jsonl").read_text().splitlines(keepends=True)
        assert all(line.endswith("\n") for line in lines)
        return [each.round for each in Run.open(path).rounds]

    INCOMPLETE = record(4).to_json()[:50]

    @pytest.mark.parametrize(
        ("written", "rest", "checkpoint", "kept"),
        [
            ((1, 2, 3), "", 3, [1, 2, 3]),
            ((1, 2), "", 3, [1, 2, 3]),  # the checkpoint is written first
            ((1, 2), INCOMPLETE, 3, [1, 2, 3]),
            ((1, 2, 3), INCOMPLETE, 3, [1, 2, 3]),
            ((1, 2, 3), record(4).to_json(), 3, [1, 2, 3]),  # without the end of the line
            ((1, 2, 3, 4, 5), "", 3, [1, 2, 3]),
            ((1, 2, 3, 4, 5), INCOMPLETE, 1, [1]),
            ((1, 2), "", None, []),
            ((), INCOMPLETE, None, []),
        ],
    )
    def test_records_end_at_the_checkpoint(
        self,
        tmp_path: Path,
        written: tuple[int, ...],
        rest: str,
        checkpoint: int | None,
        kept: list[int],
    ) -> None:
        path = self.interrupted(tmp_path / "run", *written, rest=rest)
        writer = RunWriter.resume(
            path, CONFIG, [] if checkpoint is None else [record(checkpoint).to_json()]
        )
        assert self.rounds(path) == kept
        following = (checkpoint or 0) + 1
        writer.append(record(following))
        assert self.rounds(path) == [*kept, following]
        writer.finish({"status": "finished"}, b"")

    def test_checkpoint_records_are_not_duplicated(self, tmp_path: Path) -> None:
        path = self.interrupted(tmp_path / "run", 1, 2, 3)
        RunWriter.resume(
            path, CONFIG, [record(number).to_json() for number in (3, 4, 5)]
        ).close()
        assert self.rounds(path) == [1, 2, 3, 4, 5]

    def test_other_files_are_kept(self, tmp_path: Path) -> None:
        path = self.interrupted(tmp_path / "run", 1)
        (path / "checkpoint.safetensors").write_bytes(b"some")
        RunWriter.resume(path, CONFIG, [record(1).to_json()]).finish({}, b"model")
        assert Run.open(path).settings == SETTINGS
        assert files(path)["checkpoint.safetensors"] == b"some"

    def test_summary_of_interruption_is_removed(self, tmp_path: Path) -> None:
        path = self.interrupted(tmp_path / "run", 1)
        (path / "summary.json").write_text('{"status": "interrupted"}')
        RunWriter.resume(path, CONFIG, [record(1).to_json()]).close()
        assert Run.open(path).summary is None

    def test_finished_model_stays_until_replaced(self, tmp_path: Path) -> None:
        path = self.interrupted(tmp_path / "run", 1, 2)
        (path / "summary.json").write_text('{"status": "finished", "loss": 0.5}')
        (path / "model.safetensors").write_bytes(b"model")
        more = replace(SETTINGS, budget=("time=1h",))
        writer = RunWriter.resume(path, more.to_toml(), [record(2).to_json()])
        assert Run.open(path).summary is None
        assert Run.open(path).settings == more
        assert json.loads(files(path)["summary.json"]) == {"status": "running", "loss": 0.5}
        assert files(path)["model.safetensors"] == b"model"
        writer.finish({"status": "finished", "loss": 0.25}, b"better")
        assert Run.open(path).summary == {"status": "finished", "loss": 0.25}

    def test_missing_records_are_refused(self, tmp_path: Path) -> None:
        path = self.interrupted(tmp_path / "run", 1, 2)
        with pytest.raises(UserError, match="records of rounds 3 to 4 are missing"):
            RunWriter.resume(path, CONFIG, [record(5).to_json()])

    def test_resume_needs_a_run(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="is not the folder of a run"):
            RunWriter.resume(tmp_path, CONFIG, [])


OWNER_PROGRAM = """
import sys, time
from pathlib import Path
from fedbudget.runs.folder import Ownership
owner = Ownership(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(100)
"""


def test_killed_owner_releases_the_folder(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER_PROGRAM, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            for refused in (Ownership, require_free):
                with pytest.raises(
                    UserError, match=f"is being written to by process {other.pid} on "
                ):
                    refused(tmp_path)
        finally:
            other.send_signal(signal.SIGKILL)
    require_free(tmp_path)
    Ownership(tmp_path).release()
    assert not list(tmp_path.iterdir())


def test_remote_owner_counts_as_alive(tmp_path: Path) -> None:
    (tmp_path / OWNER).write_text(json.dumps({"pid": 7, "host": "elsewhere\x1b[2J"}))
    with pytest.raises(
        UserError, match=r"belongs to process 7 on elsewhere.*; if it has ended, remove"
    ):
        Ownership(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", '{"pid": "x", "host": 3}', "\x00" * 3000]
)
def test_unreadable_owner_is_ignored(tmp_path: Path, content: str) -> None:
    (tmp_path / OWNER).write_text(content)
    Ownership(tmp_path).release()


def test_owner_link_is_not_followed(tmp_path: Path) -> None:
    target, folder = tmp_path / "target", tmp_path / "run"
    target.write_text("mine")
    folder.mkdir()
    (folder / OWNER).symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        Ownership(folder)
    assert target.read_text() == "mine"


def test_new_folder_is_private(tmp_path: Path) -> None:
    RunWriter(tmp_path / "runs" / "new", "").close()
    assert stat.S_IMODE((tmp_path / "runs" / "new").stat().st_mode) == 0o700
    (tmp_path / "shared").mkdir(mode=0o755)
    RunWriter(tmp_path / "shared", "").close()
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o755 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
