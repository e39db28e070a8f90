"""Who came and went is on disk, in order; and what anyone can cause does not fill it."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from fedbudget.engines.grpc.admission import AUDIT, AuditLog
from fedbudget.launch.logs import log_handler, node_log
from fedbudget.settings.network import LogOptions

LOG = logging.getLogger("fedbudget.tried")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / AUDIT).read_text().splitlines()]


def test_what_was_before_the_folder_is_in_it_too(tmp_path: Path) -> None:
    audit = AuditLog(LOG)
    audit.record("joined", "n1", "ipv4:192.0.2.1:40000", "14 samples")
    audit.open(tmp_path)
    audit.record("left", "n1", "ipv4:192.0.2.1:40000")
    audit.record("dropped", "n2", "ipv4:192.0.2.2:40000", "it said \x1b[2Jnothing")
    found = lines(tmp_path)
    assert [(each["event"], each["node"]) for each in found] == [
        ("joined", "n1"),
        ("left", "n1"),
        ("dropped", "n2"),
    ]
    assert found[2]["reason"] == "it said \ufffd[2Jnothing"
    assert (tmp_path / AUDIT).stat().st_mode & 0o077 == 0


def test_refusals_by_the_hundred_are_a_line_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    audit = AuditLog(LOG)
    audit.open(tmp_path)
    for each in range(1000):
        now[0] = 100 + each / 500
        audit.record("refused", "a peer", "ipv4:192.0.2.9:4", "no token", by_anyone=True)
        audit.record(
            "dropped", f"n{each}", "ipv4:192.0.2.9:4", "a fault"
        ) if each < 3 else None
    found = lines(tmp_path)
    assert [each.get("others") for each in found if each["event"] == "refused"] == [
        None,
        499,
    ]
    assert [each["node"] for each in found if each["event"] == "dropped"] == [
        "n0",
        "n1",
        "n2",
    ]


def test_who_comes_and_goes_while_rounds_are_made_is_told_to_everyone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten at once, and one a second when they are more."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    audit = AuditLog(LOG)
    with caplog.at_level(logging.WARNING, LOG.name):
        audit.record("joined", "before", "ipv4:192.0.2.1:40000", "14 samples")
        audit.under_way = True
        for each in range(1000):
            audit.record("left", f"n{each}", "ipv4:192.0.2.1:40000")
            now[0] += 0.1 if each >= 500 else 0.0
        audit.under_way = False
        audit.record("left", "after", "ipv4:192.0.2.1:40000")
    assert caplog.messages[:10] == [f"n{each} has left" for each in range(10)]
    assert len(caplog.messages) in (59, 60)


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    (tmp_path / AUDIT).symlink_to(tmp_path / "target")
    audit = AuditLog(LOG)
    audit.open(tmp_path)
    audit.record("left", "n1", "ipv4:192.0.2.1:40000")
    assert (tmp_path / "target").read_text() == "mine"


@pytest.mark.parametrize("form", ["text", "json"])
def test_logs_have_no_control_characters(
    form: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = log_handler(LogOptions(log_format=form, log_level="info"))
    LOG.addHandler(handler)
    try:
        AuditLog(LOG).record(
            "dropped", "n1", "ipv4:192.0.2.1:40000", "a \x1b]0;title\x07 text\r"
        )
        node_log(LogOptions(log_format=form))("n1", "bell\x07")
    finally:
        LOG.removeHandler(handler)
    shown = capsys.readouterr().err
    assert all(each.isprintable() or each == "\n" for each in shown)
    if form == "json":
        first, second = map(json.loads, shown.splitlines())
        assert (first["event"], first["node"], first["level"]) == (
            "dropped",
            "n1",
            "warning",
        )
        assert second["message"] == "bell\ufffd"
