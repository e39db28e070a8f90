"""`fedbudget tokens`."""

from pathlib import Path

import pytest

from fedbudget.engines.grpc.tokens import Tokens
from support.commands import run_command


def test_add_list_and_revoke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def tokens(*arguments: str) -> tuple[int, str, str]:
        return run_command(capsys, "tokens", *arguments)

    code, token, _ = tokens("add", "edge-1")
    assert code == 0
    assert Tokens.load(Path("tokens")).allows("edge-1", token.strip())
    assert tokens("add", "edge-2", "--file", "tokens")[0] == 0
    assert tokens("list") == (0, "edge-1\nedge-2\n", "")
    assert tokens("revoke", "edge-1") == (0, "", "")
    assert tokens("list") == (0, "edge-2\n", "")
    assert tokens("revoke", "edge-1") == (
        2,
        "",
        "fedbudget: tokens has no token of 'edge-1'\n",
    )
    assert tokens("list", "--file", "none")[0] == 2
