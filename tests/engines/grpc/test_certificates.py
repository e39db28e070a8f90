"""Test certificates: contents, permitted uses, and existing files that are never
overwritten.
"""

import ipaddress
import os
import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import typer
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from typer.testing import CliRunner

from fedbudget.cli.security import certs
from fedbudget.engines.grpc.certificates import DEFAULT_HOSTS, default_hosts, make
from fedbudget.errors import UserError

NOW = datetime(2030, 1, 1, 12, 0, 0, 987654, tzinfo=UTC)


def certificate(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())


def names(file: Path) -> list[object]:
    alternatives = (
        certificate(file)
        .extensions.get_extension_for_class(x509.SubjectAlternativeName)
        .value
    )
    return [name.value for name in alternatives]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def handshake(aggregator: ssl.SSLContext, node: ssl.SSLContext, host: str) -> None:
    """Run a TLS handshake in memory with Python's OpenSSL, as an independent check of
    gRPC's TLS.
    """
    to_node, to_aggregator = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        node.wrap_bio(to_node, to_aggregator, server_hostname=host),
        aggregator.wrap_bio(to_aggregator, to_node, server_side=True),
    )
    for _ in range(4):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    for side in sides:
        side.do_handshake()


def contexts(
    folder: Path, aggregator: str, node: str
) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    both = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context, name in zip(both, (aggregator, node), strict=True):
        context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
        context.load_verify_locations(folder / "ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT
    return both


class TestFiles:
    def test_each_name_has_certificate_and_key(self, tmp_path: Path) -> None:
        folder = tmp_path / "new" / "certs"
        made = make(folder, hosts=["localhost"], nodes=["edge-1", "edge.2"])
        stems = ("ca", "aggregator", "edge-1", "edge.2")
        assert made == [
            folder / f"{stem}.{suffix}" for stem in stems for suffix in ("pem", "key")
        ]
        assert sorted(made) == sorted(folder.iterdir())
        for stem in stems:
            key = load_pem_private_key((folder / f"{stem}.key").read_bytes(), password=None)
            assert isinstance(key, ec.EllipticCurvePrivateKey)
            assert isinstance(key.curve, ec.SECP256R1)
            assert key.public_key() == certificate(folder / f"{stem}.pem").public_key()
            assert (
                (folder / f"{stem}.key")
                .read_text()
                .startswith("-----BEGIN PRIVATE KEY-----\n")
            )

    def test_key_modes_ignore_umask(self, tmp_path: Path) -> None:
        before = os.umask(0)
        try:
            made = make(tmp_path, hosts=["localhost"], nodes=["edge-1"])
        finally:
            os.umask(before)
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in made}
        assert {mode for name, mode in modes.items() if name.endswith(".key")} == {0o600}
        assert {mode for name, mode in modes.items() if name.endswith(".pem")} == {0o644}

    def test_keys_are_created_private(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: dict[str, int] = {}
        real = os.fdopen

        def check_mode(opened: int, mode: str) -> object:
            seen[Path(f"/proc/self/fd/{opened}").readlink().name] = (
                os.fstat(opened).st_mode & 0o777
            )
            assert os.fstat(opened).st_size == 0
            return real(opened, mode)

        monkeypatch.setattr(os, "fdopen", check_mode)
        make(tmp_path, hosts=["localhost"])
        assert {name: mode for name, mode in seen.items() if name.endswith(".key")} == {
            "ca.key": 0o600,
            "aggregator.key": 0o600,
        }

    def test_no_hosts_no_aggregator_certificate(self, tmp_path: Path) -> None:
        assert [file.name for file in make(tmp_path, hosts=[], nodes=["n"])] == [
            "ca.pem",
            "ca.key",
            "n.pem",
            "n.key",
        ]

    def test_unwritable_folder_stays_unchanged(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError, match=r"cannot create certificates in .*file/certs"):
            make(tmp_path / "file" / "certs", hosts=["localhost"])
        assert contents(tmp_path) == {"file": b""}

    def test_full_disk_leaves_no_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, opened = os.open, []

        def full(path: Path, flags: int, mode: int) -> int:
            opened.append(path)
            return (
                real("/dev/full", os.O_WRONLY)
                if len(opened) == 4
                else real(path, flags, mode)
            )

        monkeypatch.setattr(os, "open", full)
        with pytest.raises(UserError, match="No space left on device"):
            make(tmp_path, hosts=["localhost"], nodes=["edge-1"])
        assert [path.name for path in opened] == [
            "ca.pem",
            "ca.key",
            "aggregator.pem",
            "aggregator.key",
        ]
        assert contents(tmp_path) == {}


class TestCertificates:
    def test_aggregator_certificate_names_hosts(self, tmp_path: Path) -> None:
        make(
            tmp_path,
            hosts=[
                "edge.example",
                "192.168.1.10",
                "::1",
                "[fe80::1]",
                "*.example",
                "edge.example",
            ],
        )
        assert names(tmp_path / "aggregator.pem") == [
            "edge.example",
            ipaddress.ip_address("192.168.1.10"),
            ipaddress.ip_address("::1"),
            ipaddress.ip_address("fe80::1"),
            "*.example",
        ]

    def test_node_certificate_names(self, tmp_path: Path) -> None:
        """The common name and the alternative name are equal."""
        longest = "n" * 64
        make(tmp_path, hosts=[], nodes=["edge_1", longest])
        for name in ("edge_1", longest):
            (common,) = certificate(
                tmp_path / f"{name}.pem"
            ).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
            assert common.value == name
            assert names(tmp_path / f"{name}.pem") == [name]

    def test_permitted_uses(self, tmp_path: Path) -> None:
        make(tmp_path, hosts=["localhost"], nodes=["edge-1"])
        for name, usage in (("aggregator", "SERVER_AUTH"), ("edge-1", "CLIENT_AUTH")):
            extensions = certificate(tmp_path / f"{name}.pem").extensions
            allowed = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
            assert list(allowed) == [getattr(ExtendedKeyUsageOID, usage)]
            constraints = extensions.get_extension_for_class(x509.BasicConstraints)
            assert constraints.critical
            assert not constraints.value.ca
            assert not extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
        extensions = certificate(tmp_path / "ca.pem").extensions
        constraints = extensions.get_extension_for_class(x509.BasicConstraints)
        assert constraints.critical
        assert (constraints.value.ca, constraints.value.path_length) == (True, 0)
        key_usage = extensions.get_extension_for_class(x509.KeyUsage).value
        assert (key_usage.key_cert_sign, key_usage.digital_signature) == (True, False)

    def test_certificates_are_signed_by_ca(self, tmp_path: Path) -> None:
        make(tmp_path, hosts=["localhost"], nodes=["edge-1"])
        ca = certificate(tmp_path / "ca.pem")
        own = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
        for name in ("aggregator", "edge-1"):
            issued = certificate(tmp_path / f"{name}.pem")
            issued.verify_directly_issued_by(ca)
            authority = issued.extensions.get_extension_for_class(
                x509.AuthorityKeyIdentifier
            ).value
            assert authority.key_identifier == own
            subject = issued.extensions.get_extension_for_class(
                x509.SubjectKeyIdentifier
            ).value
            assert subject == x509.SubjectKeyIdentifier.from_public_key(issued.public_key())

    def test_serial_numbers_are_unique(self, tmp_path: Path) -> None:
        make(tmp_path / "a", hosts=["localhost"], nodes=["n"])
        make(tmp_path / "b", hosts=["localhost"], nodes=["n"])
        serials = {certificate(file).serial_number for file in tmp_path.glob("*/*.pem")}
        assert len(serials) == 6
        assert min(serials) > 2**64

    def test_validity_period(self, tmp_path: Path) -> None:
        make(tmp_path, hosts=["localhost"], days=30, now=NOW)
        aggregator, ca = (
            certificate(tmp_path / "aggregator.pem"),
            certificate(tmp_path / "ca.pem"),
        )
        assert aggregator.not_valid_before_utc == datetime(2030, 1, 1, 11, 55, tzinfo=UTC)
        assert aggregator.not_valid_after_utc == datetime(2030, 1, 31, 12, 0, tzinfo=UTC)
        assert ca.not_valid_after_utc == datetime(2039, 12, 30, 12, 0, tzinfo=UTC)

    def test_certificates_never_outlive_ca(self, tmp_path: Path) -> None:
        make(tmp_path, hosts=["localhost"], now=NOW)
        make(tmp_path, hosts=[], nodes=["late"], now=NOW + timedelta(days=3600))
        ends = {
            certificate(tmp_path / f"{name}.pem").not_valid_after_utc
            for name in ("ca", "late")
        }
        assert ends == {datetime(2039, 12, 30, 12, 0, tzinfo=UTC)}

    def test_strict_handshake_for_each_host(self, tmp_path: Path) -> None:
        make(tmp_path, hosts=["edge.example", "10.0.0.1", "::1"], nodes=["edge-1"])
        for host in ("edge.example", "10.0.0.1", "::1"):
            handshake(*contexts(tmp_path, "aggregator", "edge-1"), host)
        with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
            handshake(*contexts(tmp_path, "aggregator", "edge-1"), "other.example")

    def test_node_certificate_cannot_serve(self, tmp_path: Path) -> None:
        make(tmp_path, hosts=["localhost"], nodes=["edge-1", "localhost"])
        with pytest.raises(
            ssl.SSLCertVerificationError, match=r"unsuit|unsupported certificate purpose"
        ):
            handshake(*contexts(tmp_path, "localhost", "edge-1"), "localhost")

    def test_aggregator_certificate_cannot_join(self, tmp_path: Path) -> None:
        make(tmp_path, hosts=["localhost"])
        with pytest.raises(ssl.SSLError, match=r"unsuit|unsupported certificate purpose"):
            handshake(*contexts(tmp_path, "aggregator", "aggregator"), "localhost")


class TestExistingCa:
    def test_ca_signs_later_nodes_and_hosts(self, tmp_path: Path) -> None:
        make(tmp_path, hosts=[], nodes=["edge-1"])
        before = contents(tmp_path)
        made = make(tmp_path, hosts=["localhost"], nodes=["edge-2"])
        assert [file.name for file in made] == [
            "aggregator.pem",
            "aggregator.key",
            "edge-2.pem",
            "edge-2.key",
        ]
        assert {name: contents(tmp_path)[name] for name in before} == before
        for node in ("edge-1", "edge-2"):
            handshake(*contexts(tmp_path, "aggregator", node), "localhost")

    @pytest.mark.parametrize(
        "existing", ["edge-1.pem", "edge-1.key", "aggregator.pem", "aggregator.key"]
    )
    def test_existing_files_are_not_overwritten(
        self, tmp_path: Path, existing: str
    ) -> None:
        (tmp_path / existing).write_text("precious")
        with pytest.raises(UserError, match=f"{existing} exists and is not overwritten"):
            make(tmp_path, hosts=["localhost"], nodes=["edge-0", "edge-1"])
        assert contents(tmp_path) == {existing: b"precious"}

    def test_dangling_links_are_not_overwritten(self, tmp_path: Path) -> None:
        (tmp_path / "certs").mkdir()
        (tmp_path / "certs" / "edge-1.key").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(UserError, match=r"edge-1\.key exists"):
            make(tmp_path / "certs", hosts=[], nodes=["edge-1"])
        assert not (tmp_path / "elsewhere").exists()

    def test_nothing_to_create_is_refused(self, tmp_path: Path) -> None:
        make(tmp_path, hosts=[])
        with pytest.raises(UserError, match="has a CA already; add --node"):
            make(tmp_path, hosts=[])

    @pytest.mark.parametrize(("lost", "left"), [("ca.pem", "ca.key"), ("ca.key", "ca.pem")])
    def test_incomplete_ca_is_refused(self, tmp_path: Path, lost: str, left: str) -> None:
        make(tmp_path, hosts=[])
        (tmp_path / lost).unlink()
        before = contents(tmp_path)
        with pytest.raises(UserError, match=f"{left} is here but {lost} is not"):
            make(tmp_path, hosts=["localhost"])
        assert contents(tmp_path) == before

    def test_mismatched_ca_key_is_refused(self, tmp_path: Path) -> None:
        make(tmp_path / "a", hosts=[])
        make(tmp_path / "b", hosts=[])
        (tmp_path / "a" / "ca.key").write_bytes((tmp_path / "b" / "ca.key").read_bytes())
        with pytest.raises(UserError, match=r"ca\.key is not its key"):
            make(tmp_path / "a", hosts=["localhost"])

    def test_non_ca_certificate_is_refused(self, tmp_path: Path) -> None:
        make(tmp_path, hosts=[], nodes=["edge-1"])
        for suffix in ("pem", "key"):
            (tmp_path / f"edge-1.{suffix}").rename(tmp_path / f"ca.{suffix}")
        with pytest.raises(UserError, match=r"ca\.pem is not a CA's certificate"):
            make(tmp_path, hosts=["localhost"])

    def test_ca_must_be_pem(self, tmp_path: Path) -> None:
        for name in ("ca.pem", "ca.key"):
            (tmp_path / name).write_text("hello")
        with pytest.raises(UserError, match="are not a CA's certificate and its key"):
            make(tmp_path, hosts=["localhost"])

    def test_expired_ca_is_refused(self, tmp_path: Path) -> None:
        make(tmp_path, hosts=[], now=NOW)
        with pytest.raises(UserError, match="has expired on 2039-12-30"):
            make(tmp_path, hosts=["localhost"], now=NOW + timedelta(days=3650))


class TestArguments:
    @pytest.mark.parametrize(
        "host",
        [
            "",
            " ",
            "edge.example:7700",
            "[::1]:7700",
            "127.0.0.256",
            "1.2.3",
            "a b",
            "-a",
            "fe80::1%eth0",
            "é.org",
        ],
    )
    def test_invalid_hosts_are_refused(self, tmp_path: Path, host: str) -> None:
        with pytest.raises(UserError, match="is neither an IP address nor a host name"):
            make(tmp_path / "certs", hosts=["localhost", host])
        assert not (tmp_path / "certs").exists()

    @pytest.mark.parametrize(
        "name", ["", "../edge", "a/b", ".hidden", "a b", "é", "n" * 65, "edge\n"]
    )
    def test_invalid_node_names_are_refused(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(UserError, match="cannot be the name of a node"):
            make(tmp_path / "certs", hosts=[], nodes=["good", name])
        assert not (tmp_path / "certs").exists()

    @pytest.mark.parametrize("name", ["ca", "aggregator", "CA", "Aggregator"])
    def test_reserved_names_are_refused(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(UserError, match=f"a node cannot be called {name} here"):
            make(tmp_path, hosts=[], nodes=[name])

    def test_repeated_nodes_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="node edge-1 is named 2 times"):
            make(tmp_path, hosts=[], nodes=["edge-1", "edge-2", "edge-1"])

    @pytest.mark.parametrize("days", [0, -1, 3651, 10**9])
    def test_invalid_days_are_refused(self, tmp_path: Path, days: int) -> None:
        with pytest.raises(UserError, match="days must be from 1 to 3650"):
            make(tmp_path, hosts=["localhost"], days=days)


class TestCommand:
    @staticmethod
    def run(*arguments: str) -> str:
        app = typer.Typer()
        app.command()(certs)
        done = CliRunner().invoke(app, list(arguments))
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0
        return done.stdout

    def test_prints_files_and_usage(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert self.run().splitlines() == [
            "certs/ca.pem",
            "certs/ca.key",
            "certs/aggregator.pem",
            "certs/aggregator.key",
            "",
            "at the aggregator:",
            "  fedbudget serve --cert certs/aggregator.pem --key certs/aggregator.key ...",
            "at each node:",
            "  fedbudget join localhost:7700 --ca certs/ca.pem ...",
            "certs/ca.key signs further certificates; keep it on another machine",
        ]
        assert names(tmp_path / "certs" / "aggregator.pem") == [
            "localhost",
            ipaddress.ip_address("127.0.0.1"),
            ipaddress.ip_address("::1"),
        ]

    def test_nodes_show_mutual_tls_usage(self, tmp_path: Path) -> None:
        folder = tmp_path / "my certs"
        lines = self.run(
            str(folder), "--host", "::1", "--node", "edge-1", "--node", "edge-2"
        ).splitlines()
        assert lines[:8] == [
            str(folder / f"{stem}.{suffix}")
            for stem in ("ca", "aggregator", "edge-1", "edge-2")
            for suffix in ("pem", "key")
        ]
        assert lines[10] == (
            f"  fedbudget serve --cert '{folder}/aggregator.pem' "
            f"--key '{folder}/aggregator.key' --client-ca '{folder}/ca.pem' ..."
        )
        assert lines[12] == (
            f"  fedbudget join [::1]:7700 --ca '{folder}/ca.pem' "
            f"--cert '{folder}/edge-1.pem' --key '{folder}/edge-1.key' ..."
        )

    def test_later_node_needs_no_host(self, tmp_path: Path) -> None:
        assert default_hosts(tmp_path) == DEFAULT_HOSTS
        self.run(str(tmp_path))
        assert default_hosts(tmp_path) == ()
        lines = self.run(str(tmp_path), "--node", "edge-3", "--days", "7").splitlines()
        assert lines[:3] == [f"{tmp_path}/edge-3.pem", f"{tmp_path}/edge-3.key", ""]
        handshake(*contexts(tmp_path, "aggregator", "edge-3"), "localhost")
        with pytest.raises(UserError, match=r"aggregator\.pem exists"):
            self.run(str(tmp_path), "--host", "edge.example")
