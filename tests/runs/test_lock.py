"""One program at a time is at a run, and one that has died is not in the way of the next."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fedbudget.errors import UserError
from fedbudget.runs.folder import OWNER, Ownership, RunWriter, require_free

HOLDS = """
import sys, time
from pathlib import Path
from fedbudget.runs.folder import Ownership
owner = Ownership(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(100)
"""


def test_another_process_is_named_and_gone_when_it_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True
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


def test_an_owner_on_another_machine_is_taken_for_alive(tmp_path: Path) -> None:
    (tmp_path / OWNER).write_text(json.dumps({"pid": 7, "host": "elsewhere\x1b[2J"}))
    with pytest.raises(
        UserError, match=r"belongs to process 7 on elsewhere.*; if it has ended, remove"
    ):
        Ownership(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", '{"pid": "x", "host": 3}', "\x00" * 3000]
)
def test_an_owner_that_cannot_be_read_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / OWNER).write_text(content)
    Ownership(tmp_path).release()


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    target, folder = tmp_path / "target", tmp_path / "run"
    target.write_text("mine")
    folder.mkdir()
    (folder / OWNER).symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        Ownership(folder)
    assert target.read_text() == "mine"


def test_a_new_folder_is_for_its_owner_alone(tmp_path: Path) -> None:
    RunWriter(tmp_path / "runs" / "new", "").close()
    assert stat.S_IMODE((tmp_path / "runs" / "new").stat().st_mode) == 0o700
    (tmp_path / "shared").mkdir(mode=0o755)
    RunWriter(tmp_path / "shared", "").close()
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o755 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
