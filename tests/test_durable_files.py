"""What must be written is tried again, and has descriptors when others have taken all."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedbudget.durable_files import with_retries

TAKES_ALL = """
import os, sys
from pathlib import Path
from fedbudget import durable_files
from fedbudget.durable_files import reserve_descriptors, with_retries
reserve_descriptors()
taken = []
try:
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
for text in (b"one", b"two"):
    with_retries(lambda: durable_files.replace(Path(sys.argv[1]), text))
try:
    os.open(os.devnull, os.O_RDONLY)
except OSError:
    print("all are taken")
"""


def test_a_file_is_written_when_others_have_taken_all_descriptors(tmp_path: Path) -> None:
    few = ["sh", "-c", 'ulimit -n 64 && exec "$@"', "sh"]
    run = [*few, sys.executable, "-c", TAKES_ALL, str(tmp_path / "file")]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("all are taken\n", "")
    assert (tmp_path / "file").read_bytes() == b"two"


def test_what_passes_is_waited_for() -> None:
    tries = iter([errno.ENOSPC, errno.ENOSPC, None])

    def action() -> str:
        number = next(tries)
        if number is not None:
            raise OSError(number, os.strerror(number))
        return "done"

    assert with_retries(action) == "done"


@pytest.mark.parametrize(
    ("number", "patience"), [(errno.EACCES, 10.0), (errno.ENOSPC, 0.0)]
)
def test_what_does_not_pass_is_told(number: int, patience: float) -> None:
    def action() -> None:
        raise OSError(number, os.strerror(number))

    with pytest.raises(OSError, match=os.strerror(number)):
        with_retries(action, patience)
