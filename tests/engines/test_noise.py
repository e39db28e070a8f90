"""Noise of private runs, and the log of privacy payments."""

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from fedbudget.engines.engine import settle
from fedbudget.engines.noise import (
    PAID,
    PaymentLog,
    SecretNoise,
    SeededNoise,
    open_payments,
    paid_in,
)
from fedbudget.errors import UserError, WorkError
from fedbudget.protocol.messages import Broadcast
from fedbudget.runs.folder import RunWriter
from support.private import aggregator, report


def test_secret_noise_is_standard_gaussian() -> None:
    noise = SecretNoise().draw(1, 200_001)
    assert len(noise) == 200_001
    assert np.isfinite(noise).all()
    assert abs(noise.mean()) < 0.02
    assert noise.std() == pytest.approx(1, abs=0.02)
    assert (np.abs(noise) < 1.96).mean() == pytest.approx(0.95, abs=0.01)
    assert abs(np.corrcoef(noise[:100_000], noise[100_000:200_000])[0, 1]) < 0.02


def test_secret_noise_differs_each_time() -> None:
    assert not np.array_equal(SecretNoise().draw(1, 50), SecretNoise().draw(1, 50))


def test_seeded_noise_depends_on_round() -> None:
    one = SeededNoise(3).draw(1, 50)
    assert np.array_equal(one, SeededNoise(3).draw(1, 50))
    assert not np.array_equal(one, SeededNoise(3).draw(2, 50))


def test_payments_are_appended(tmp_path: Path) -> None:
    log = PaymentLog(tmp_path)
    log.record(4, 0.25)
    log.record(5, 0.5)
    lines = [json.loads(line) for line in (tmp_path / PAID).read_text().splitlines()]
    assert lines == [{"round": 4, "rho": 0.25}, {"round": 5, "rho": 0.5}]
    assert paid_in(tmp_path) == 0.75


def test_unwritable_payment_log_stops_run(tmp_path: Path) -> None:
    (tmp_path / PAID).mkdir()
    with pytest.raises(WorkError, match="cannot be written"):
        PaymentLog(tmp_path).record(1, 0.1)


def test_unfinished_payment_line_is_ignored(tmp_path: Path) -> None:
    (tmp_path / PAID).write_text('{"round": 1, "rho": 0.5}\n{"round": 2, "rho": 0.')
    assert paid_in(tmp_path) == 0.5


def test_payment_follows_unfinished_line(tmp_path: Path) -> None:
    """A payment after a crash replaces the unfinished line, so the run can be resumed."""
    (tmp_path / PAID).write_text('{"round": 1, "rho": 0.5}\n{"round": 2, "rho": 0.')
    PaymentLog(tmp_path).record(2, 0.25)
    assert paid_in(tmp_path) == 0.75
    assert len((tmp_path / PAID).read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"nonsense\n",
        b'{"round": 1, "rho": 0.\n{"round": 2, "rho": 0.5}\n',
        b'{"round": 1, "rho": -0.5}\n',
        b'{"round": 1, "rho": NaN}\n',
        b'\xff\xfe\n{"round": 2, "rho": 0.5}\n',
    ],
    ids=["no json", "cut in the middle", "negative", "not a number", "no text"],
)
def test_damaged_payment_log_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / PAID).write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        paid_in(tmp_path)


def synced_folders(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders that are synced to the disk from now on."""
    found: list[Path] = []
    fsync = os.fsync

    def sync(handle: int) -> None:
        fsync(handle)
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            found.append(Path(f"/proc/self/fd/{handle}").resolve())

    monkeypatch.setattr(os, "fsync", sync)
    return found


def test_new_payment_log_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first payment also syncs the folder: a power cut cannot remove the file."""
    synced = synced_folders(monkeypatch)
    PaymentLog(tmp_path).record(1, 0.1)
    assert synced == [tmp_path]
    PaymentLog(tmp_path).record(2, 0.1)
    assert synced == [tmp_path]


def test_new_run_folder_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new folder is synced into the one that contains it."""
    synced = synced_folders(monkeypatch)
    RunWriter(tmp_path / "runs" / "one", "").close()
    assert {tmp_path, tmp_path / "runs"} <= set(synced)


def test_resumed_run_pays_unsaved_rounds(
    tmp_path: Path,
) -> None:
    """A resumed run pays for noise drawn after its last checkpoint."""
    run = aggregator({"time": 1e3, "privacy": 4.0}, 50, 5, SecretNoise())
    pay = open_payments(run, tmp_path, resumed=False)
    first = run.start()
    run.receive(report(first, np.zeros((50, 5), np.float32)), run.ledger.costs)
    settle(run, pay)
    spent = run.ledger.spent[1]
    assert paid_in(tmp_path) == pytest.approx(spent)
    with (tmp_path / PAID).open("a") as file:  # a payment of a process that was killed
        file.write('{"round": 2, "rho": 0.3}\n')
    pay = open_payments(run, tmp_path, resumed=True)
    assert run.ledger.spent[1] == pytest.approx(spent + 0.3)
    while isinstance(broadcast := run.pending, Broadcast):
        run.receive(report(broadcast, np.zeros((50, 5), np.float32)), run.ledger.costs)
        settle(run, pay)
    assert run.ledger.spent[1] <= run.ledger.budget.array[1] * (1 + 1e-12)
    assert paid_in(tmp_path) <= run.ledger.budget.array[1] * (1 + 1e-12)
