"""Records that are read from the file of an active run."""

import gc
import math
import pickle
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedbudget.runs.folder import ROUNDS
from fedbudget.runs.record import RoundRecord
from fedbudget.runs.stored_rounds import StoredRounds
from support.synthetic_runs import record


def lines_of(rounds: range) -> bytes:
    return b"".join(f"{record(each).to_json()}\n".encode() for each in rounds)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_reads_like_a_list(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However far the file is behind, and with half of a line at its end."""
    file = tmp_path_factory.mktemp("run") / ROUNDS
    file.write_bytes(b"")
    kept = StoredRounds(file)
    known: list[RoundRecord] = []
    written = 0
    for _ in range(data.draw(st.integers(1, 6))):
        for _ in range(data.draw(st.integers(1, 150))):
            known.append(record(len(known) + 1))
            kept.append(known[-1])
        reached = data.draw(st.integers(written, len(known)))
        whole = file.read_bytes() + lines_of(range(written + 1, reached + 1))
        written = reached
        half = lines_of(range(written + 1, written + 2))
        file.write_bytes(whole + half[: data.draw(st.integers(0, len(half) - 1))])
        assert len(kept) == len(known)
        assert kept[-1] == known[-1]
        at = data.draw(st.integers(-len(known), len(known) - 1))
        assert kept[at] == known[at]
        file.write_bytes(whole)
    assert kept == known
    assert known == kept
    assert kept[-30:] == known[-30:]
    assert kept[::7] == known[::7]
    assert pickle.loads(pickle.dumps(kept)) == known
    with pytest.raises(IndexError):
        kept[len(known)]


def test_earlier_rounds_are_found(tmp_path: Path) -> None:
    """Those of an earlier process, before and after the first new one."""
    file = tmp_path / ROUNDS
    file.write_bytes(lines_of(range(1, 8)))
    resumed = StoredRounds(file, 7)
    viewed = StoredRounds(file)
    assert (len(resumed), len(viewed)) == (7, 0)
    for kept in (resumed, viewed):
        kept.append(record(8))
        assert kept == [record(each) for each in range(1, 9)]
        assert kept != [record(1)]


def test_removed_file_stays_readable(tmp_path: Path) -> None:
    file = tmp_path / ROUNDS
    file.write_bytes(lines_of(range(1, 8)))
    kept = StoredRounds(file, 7)
    file.unlink()
    assert kept[2] == record(3)


def test_losses_may_be_missing(tmp_path: Path) -> None:
    """A loss that is not finite is null in the file, and NaN in the record."""
    file = tmp_path / ROUNDS
    file.write_bytes(f"{record(1, loss=math.nan).to_json()}\n".encode())
    kept = StoredRounds(file, 1)
    assert math.isnan(kept[0].loss)
    assert kept[0].best_loss == record(1).best_loss


def test_memory_per_round(tmp_path: Path) -> None:
    """A round takes 8 bytes; the record alone would take 2 kB."""
    file = tmp_path / ROUNDS
    kept = StoredRounds(file)
    sizes = []
    tracemalloc.start()
    try:
        with file.open("wb", buffering=0) as opened:
            for number in range(1, 4061):
                opened.write(lines_of(range(number, number + 1)))
                kept.append(record(number))
                if number in (2080, 4060):  # none is about to be dropped
                    gc.collect()
                    sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert (sizes[1] - sizes[0]) / 1980 < 20
