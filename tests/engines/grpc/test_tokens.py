"""Names of nodes, and tokens: valid and invalid ones, and no token in any output."""

import hmac
import traceback
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.engines.grpc.tokens import (
    TOKEN_VARIABLE,
    TokenFile,
    Tokens,
    add_token,
    check_name,
    names_with_tokens,
    node_token,
    revoke_token,
    valid_name,
)
from fedbudget.errors import UserError

ONE, TWO = "first-token-0123456789", "second-token-9876543210"


@pytest.fixture(autouse=True)
def _no_environment_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


def secret_file(folder: Path, text: str | bytes) -> Path:
    path = folder / "tokens"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(0o600)
    return path


class TestNames:
    @pytest.mark.parametrize("name", ["a", "7", "edge-1", "Edge_1.local", "n" * 64])
    def test_valid_names(self, name: str) -> None:
        assert valid_name(name)
        assert check_name(name) == name

    @pytest.mark.parametrize(
        "name", ["", "-a", ".a", "_a", "a/b", "a b", "a\n", "é", "٣", "n" * 65, "a\x00"]
    )
    def test_invalid_names_are_refused(self, name: str) -> None:
        assert not valid_name(name)
        with pytest.raises(UserError, match="cannot be the name of a node"):
            check_name(name)


class TestTokens:
    def test_no_tokens_allow_all(self) -> None:
        tokens = Tokens.load(None)
        assert not tokens.required
        assert tokens.allows("edge-1", "")

    @pytest.mark.parametrize(
        "text", [ONE, f"{ONE}\n", f"\n# shared\r\n  {ONE}  # for all\r\n\n", f"\ufeff{ONE}"]
    )
    def test_shared_token_fits_every_name(self, tmp_path: Path, text: str) -> None:
        tokens = Tokens.load(secret_file(tmp_path, text))
        assert tokens.required
        assert tokens.allows("edge-1", ONE)
        assert tokens.allows("edge-2", ONE)
        for wrong in (TWO, "", ONE[:-1], f"{ONE} ", ONE.upper(), "\ud800", "é" * 20):
            assert not tokens.allows("edge-1", wrong)

    def test_named_token_fits_one_name(self, tmp_path: Path) -> None:
        tokens = Tokens.load(
            secret_file(tmp_path, f"# ours\nedge-1 {ONE}\n\n\tedge-2\t{TWO} # new\n")
        )
        assert tokens.required
        allowed = {
            (name, token)
            for name in ("edge-1", "edge-2", "edge-3", "")
            for token in (ONE, TWO, "", "edge-1")
        }
        allowed = {pair for pair in allowed if tokens.allows(*pair)}
        assert allowed == {("edge-1", ONE), ("edge-2", TWO)}

    def test_hash_inside_token_is_kept(self, tmp_path: Path) -> None:
        assert Tokens.load(secret_file(tmp_path, "half#of#a#token#here")).allows(
            "n", "half#of#a#token#here"
        )

    def test_file_overrides_environment(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(TOKEN_VARIABLE, f"{ONE}\n")
        assert Tokens.load(None).allows("any", ONE)
        assert node_token(None) == ONE
        path = secret_file(tmp_path, TWO)
        assert not Tokens.load(path).allows("any", ONE)
        assert Tokens.load(path).allows("any", TWO)
        assert node_token(path) == TWO

    def test_node_token_is_optional(self) -> None:
        assert node_token(None) is None

    def test_unknown_names_take_same_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every check compares one digest, so timing reveals no names."""
        compared: list[tuple[int, int]] = []
        real = hmac.compare_digest

        def count(one: bytes, other: bytes) -> bool:
            compared.append((len(one), len(other)))
            return real(one, other)

        tokens = Tokens.load(secret_file(tmp_path, f"edge-1 {ONE}"))
        monkeypatch.setattr(hmac, "compare_digest", count)
        for name, token in (
            ("edge-1", ONE),
            ("edge-1", "x"),
            ("stranger", ONE),
            ("stranger", "y" * 1000),
        ):
            tokens.allows(name, token)
        assert compared == [(32, 32)] * 4

    def test_tokens_are_not_shown_or_stored(self, tmp_path: Path) -> None:
        shared = Tokens.load(secret_file(tmp_path, ONE))
        by_name = Tokens.load(secret_file(tmp_path, f"edge-1 {ONE}\nedge-2 {TWO}"))
        for tokens in (shared, by_name):
            for text in (
                repr(tokens),
                str(tokens),
                f"{tokens}",
                repr(vars(tokens)),
                repr([tokens]),
            ):
                assert ONE not in text
                assert TWO not in text
            assert repr(tokens) == "Tokens()"

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620, 0o644])
    def test_readable_token_file_is_refused(self, tmp_path: Path, mode: int) -> None:
        path = secret_file(tmp_path, ONE)
        path.chmod(mode)
        for load in (Tokens.load, node_token):
            with pytest.raises(
                UserError,
                match=rf"others can read .* \(mode {mode:03o}\); chmod 600 {path}",
            ):
                load(path)
        path.chmod(0o400)
        assert node_token(path) == ONE

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("", "has no token"),
            ("# only a comment\n\n", "has no token"),
            ("fifteen-letters", "line 1: a token has at least 16 characters, not 15"),
            (
                f"edge-1 {ONE}\nedge-2 short",
                "line 2: a token has at least 16 characters, not 5",
            ),
            (f"{ONE} edge-1", "line 1: a token has at least 16 characters, not 6"),
            (f"{ONE}! {TWO}", "line 1: .*the first word cannot be the name of a node"),
            (f"{ONE}\n{TWO}", "has 2 lines with tokens"),
            (f"edge-1 {ONE}\n{TWO}", "line 2: .*this one has no name"),
            (f"\nedge-1 {ONE}\nedge-1 {TWO}", "line 3: this name has a token already"),
            (f"edge-1 {ONE}\nedge-2 {ONE}", "line 2: another node has the same token"),
            (f"edge-1 {ONE} {TWO}", "line 1: expected TOKEN or NAME TOKEN, found 3 words"),
            (f"{ONE}é", "line 1: a token has ASCII letters, digits and signs only"),
            (ONE.encode() + b"\xff", "is not a text file"),
        ],
    )
    def test_invalid_token_files_are_refused(
        self, tmp_path: Path, text: str | bytes, why: str
    ) -> None:
        """No error message shows a token."""
        path = secret_file(tmp_path, text)
        with pytest.raises(UserError, match=why) as refused:
            Tokens.load(path)
        assert_secret(refused.value)

    def test_node_file_has_one_token(self, tmp_path: Path) -> None:
        with pytest.raises(
            UserError, match="line 1: a node's file has its token only"
        ) as refused:
            node_token(secret_file(tmp_path, f"edge-1 {ONE}"))
        assert_secret(refused.value)
        with pytest.raises(UserError, match="has 2 lines"):
            node_token(secret_file(tmp_path, f"edge-1 {ONE}\nedge-2 {TWO}"))

    @pytest.mark.parametrize("text", ["", "  ", "fifteen-letters", f"{ONE} {TWO}"])
    def test_invalid_environment_token_is_refused(
        self, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(TOKEN_VARIABLE, text)
        for load in (Tokens.load, node_token):
            with pytest.raises(
                UserError, match=f"the variable {TOKEN_VARIABLE}: a token has"
            ) as refused:
                load(None)
            assert_secret(refused.value)

    def test_unreadable_token_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"cannot read the token file .*: No such file"):
            Tokens.load(tmp_path / "none")
        with pytest.raises(
            UserError, match=r"cannot read the token file .*: Is a directory"
        ):
            node_token(tmp_path)

    @given(
        token=st.text(
            st.characters(min_codepoint=33, max_codepoint=126), min_size=16, max_size=40
        ),
        other=st.text(),
    )
    def test_only_the_set_token_fits(self, token: str, other: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(TOKEN_VARIABLE, token)
            tokens = Tokens.load(None)
        assert tokens.allows("edge-1", token)
        assert tokens.allows("edge-1", other) == (other == token)


def assert_secret(error: BaseException) -> None:
    """Check that neither the message nor the traceback of an error shows a token.
    (Tracebacks show source lines, not values.)
    """
    shown = "".join(traceback.format_exception(error)) + repr(error) + repr(error.__dict__)
    for secret in (ONE, TWO, "fifteen-letters"):
        assert secret not in shown
    assert error.__context__ is None or error.__suppress_context__


class TestTokenFile:
    def test_add_list_and_revoke(self, tmp_path: Path) -> None:
        path = tmp_path / "tokens"
        first, second = add_token(path, "edge-1"), add_token(path, "edge-2")
        assert path.stat().st_mode & 0o777 == 0o600
        assert names_with_tokens(path) == ["edge-1", "edge-2"]
        assert [Tokens.load(path).allows(name, first) for name in ("edge-1", "edge-2")] == [
            True,
            False,
        ]
        revoke_token(path, "edge-1")
        assert names_with_tokens(path) == ["edge-2"]
        assert not Tokens.load(path).allows("edge-1", first)
        assert Tokens.load(path).allows("edge-2", second)

    def test_comments_are_kept(self, tmp_path: Path) -> None:
        path = tmp_path / "tokens"
        add_token(path, "edge-1")
        path.write_text(f"# ward 3\n{path.read_text()}")
        add_token(path, "edge-2")
        assert path.read_text().startswith("# ward 3\nedge-1 ")

    def test_invalid_changes_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "tokens"
        add_token(path, "edge-1")
        for name, reason in (("edge-1", "already"), ("a b", "name")):
            with pytest.raises(UserError, match=reason):
                add_token(path, name)
        with pytest.raises(UserError, match="has no token of 'edge-9'"):
            revoke_token(path, "edge-9")
        shared = tmp_path / "shared"
        shared.write_text("one-token-for-all-nodes\n")
        shared.chmod(0o600)
        with pytest.raises(UserError, match="a token without a name"):
            add_token(shared, "edge-1")

    def test_reload_after_revocation(self, tmp_path: Path) -> None:
        """With no token left, no node is admitted."""
        path = tmp_path / "tokens"
        token = add_token(path, "edge-1")
        file = TokenFile(path)
        assert not file.reload()
        revoke_token(path, "edge-1")
        assert file.reload()
        assert file.tokens.required
        assert not file.tokens.allows("edge-1", token)
        path.write_text("no token here, with four words\n")
        path.chmod(0o600)
        with pytest.raises(UserError, match="expected TOKEN"):
            file.reload()
        assert not file.tokens.allows("edge-1", token)
