"""TLS credentials and addresses, with real TLS on loopback."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from hypothesis import given
from hypothesis import strategies as st

from fedbudget.engines.grpc.certificates import make
from fedbudget.engines.grpc.credentials import (
    DEFAULT_PORT,
    aggregator_credentials,
    join_address,
    node_credentials,
    peer_name,
    require_privacy,
    split_address,
)
from fedbudget.errors import UserError


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Certificates of our CA, some of them expired, and the same names from another CA."""
    ours, theirs = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("theirs")
    past = datetime.now(UTC) - timedelta(days=100)
    make(ours, hosts=["localhost", "127.0.0.1"], nodes=["expired"], days=10, now=past)
    for suffix in ("pem", "key"):
        (ours / f"aggregator.{suffix}").rename(ours / f"expired-aggregator.{suffix}")
    make(ours, hosts=["localhost", "127.0.0.1"], nodes=["edge-1"])
    make(theirs, hosts=["localhost", "127.0.0.1"], nodes=["edge-1"])
    return ours, theirs


def pair(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.pem", folder / f"{name}.key"


async def _names(request: bytes, context: Any) -> bytes:
    return (peer_name(context.auth_context()) or "").encode()


@asynccontextmanager
async def aggregator(credentials: Any) -> AsyncIterator[int]:
    """An aggregator that returns the names in the certificate of a peer."""
    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(_names)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test", {"names": handler}),)
    )
    address = "127.0.0.1:0"
    port = (
        server.add_insecure_port(address)
        if credentials is None
        else server.add_secure_port(address, credentials)
    )
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


def ask(serving: Any, joining: Any, host: str = "127.0.0.1") -> str:
    """Return the reply of the aggregator to a node. Raise the gRPC error if there is
    one.
    """

    async def talk() -> str:
        async with aggregator(serving) as port:
            target = f"{host}:{port}"
            channel = (
                grpc.aio.insecure_channel(target)
                if joining is None
                else grpc.aio.secure_channel(target, joining)
            )
            async with channel:
                answer: bytes = await channel.unary_unary("/test/names")(b"", timeout=20)
                return answer.decode()

    return asyncio.run(talk())


def assert_unavailable(serving: Any, joining: Any, why: str = "") -> None:
    """Check that the connection fails with this reason. If the aggregator refuses, the node
    receives no details.
    """
    with pytest.raises(grpc.aio.AioRpcError) as error:
        ask(serving, joining)
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert why in error.value.details()


class TestTls:
    def test_no_files_mean_plain_text(self) -> None:
        assert aggregator_credentials(None, None, None) is None
        assert node_credentials(None, None, None) is None
        assert ask(None, None) == ""

    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
    def test_tls_without_client_certificate(
        self, folders: tuple[Path, Path], host: str
    ) -> None:
        ours, _ = folders
        serving = aggregator_credentials(*pair(ours, "aggregator"), None)
        assert ask(serving, node_credentials(ours / "ca.pem", None, None), host) == ""

    @pytest.mark.parametrize(
        ("folder", "name", "why"),
        [
            (1, "aggregator", "CERTIFICATE_VERIFY_FAILED"),
            (0, "expired-aggregator", "certificate has expired"),
            (0, "edge-1", "certificate purpose"),
        ],
        ids=["of another CA", "expired", "of a node"],
    )
    def test_invalid_aggregator_certificates_are_refused(
        self, folders: tuple[Path, Path], folder: int, name: str, why: str
    ) -> None:
        serving = aggregator_credentials(*pair(folders[folder], name), None)
        joining = node_credentials(folders[0] / "ca.pem", None, None)
        assert_unavailable(serving, joining, why)

    def test_aggregator_of_another_name(self, tmp_path: Path) -> None:
        make(tmp_path, hosts=["edge.example"])
        serving = aggregator_credentials(*pair(tmp_path, "aggregator"), None)
        assert_unavailable(serving, node_credentials(tmp_path / "ca.pem", None, None))

    def test_plain_text_and_tls_fail(self, folders: tuple[Path, Path]) -> None:
        ours, _ = folders
        assert_unavailable(aggregator_credentials(*pair(ours, "aggregator"), None), None)
        assert_unavailable(None, node_credentials(ours / "ca.pem", None, None))


class TestMutualTls:
    def test_certificate_proves_node_name(self, folders: tuple[Path, Path]) -> None:
        ours, _ = folders
        serving = aggregator_credentials(*pair(ours, "aggregator"), ours / "ca.pem")
        assert (
            ask(serving, node_credentials(ours / "ca.pem", *pair(ours, "edge-1")))
            == "edge-1"
        )

    @pytest.mark.parametrize(
        "own",
        [
            pytest.param(lambda ours, theirs: (None, None), id="none"),
            pytest.param(lambda ours, theirs: pair(theirs, "edge-1"), id="of another CA"),
            pytest.param(lambda ours, theirs: pair(ours, "expired"), id="expired"),
            pytest.param(
                lambda ours, theirs: pair(ours, "aggregator"), id="of the aggregator"
            ),
        ],
    )
    def test_invalid_node_certificates_are_refused(
        self,
        folders: tuple[Path, Path],
        own: Callable[[Path, Path], tuple[Path | None, Path | None]],
    ) -> None:
        ours, _ = folders
        serving = aggregator_credentials(*pair(ours, "aggregator"), ours / "ca.pem")
        assert_unavailable(serving, node_credentials(ours / "ca.pem", *own(*folders)))

    def test_no_client_ca_no_name(self, folders: tuple[Path, Path]) -> None:
        ours, _ = folders
        serving = aggregator_credentials(*pair(ours, "aggregator"), None)
        assert ask(serving, node_credentials(ours / "ca.pem", *pair(ours, "edge-1"))) == ""


class TestCertificateFiles:
    @pytest.mark.parametrize(
        ("side", "chosen", "why"),
        [
            ("aggregator", ("cert",), "missing: key"),
            ("aggregator", ("key",), "missing: cert"),
            ("aggregator", ("ca",), "missing: cert and key"),
            ("aggregator", ("cert", "ca"), "missing: key"),
            ("aggregator", ("key", "ca"), "missing: cert"),
            ("node", ("cert", "ca"), "missing: key"),
            ("node", ("key", "ca"), "missing: cert"),
            ("node", ("cert", "key"), "need ca"),
            ("node", ("cert",), "need ca"),
            ("node", ("key",), "need ca"),
        ],
    )
    def test_options_go_together(
        self, folders: tuple[Path, Path], side: str, chosen: tuple[str, ...], why: str
    ) -> None:
        files = {name: self.files(folders[0])[name] for name in chosen}
        cert, key, ca = files.get("cert"), files.get("key"), files.get("ca")
        order = (cert, key, ca) if side == "aggregator" else (ca, cert, key)
        load = aggregator_credentials if side == "aggregator" else node_credentials
        with pytest.raises(UserError, match=why):
            load(*order)

    @staticmethod
    def files(folder: Path) -> dict[str, Path]:
        cert, key = pair(folder, "edge-1")
        return {"cert": cert, "key": key, "ca": folder / "ca.pem"}

    def test_missing_files_are_refused(
        self, folders: tuple[Path, Path], tmp_path: Path
    ) -> None:
        cert, key = pair(folders[0], "aggregator")
        none = tmp_path / "none.pem"
        for files in ((none, key, None), (cert, none, None), (cert, key, none)):
            with pytest.raises(UserError, match=r"cannot read .*none\.pem: No such file"):
                aggregator_credentials(*files)
            with pytest.raises(UserError, match=r"cannot read .*none\.pem: No such file"):
                node_credentials(files[2] or cert, files[0], files[1])
        with pytest.raises(UserError, match="Is a directory"):
            node_credentials(tmp_path, None, None)

    @pytest.mark.parametrize(
        "text", [b"", b"hello", b"\xff\x00", b"-----BEGIN CERTIFICATE-----\nAAAA\n"]
    )
    def test_files_must_be_pem(
        self, folders: tuple[Path, Path], tmp_path: Path, text: bytes
    ) -> None:
        cert, key = pair(folders[0], "aggregator")
        bad = tmp_path / "bad"
        bad.write_bytes(text)
        for files in ((bad, key, None), (cert, key, bad)):
            with pytest.raises(UserError, match="bad is not a certificate in PEM format"):
                aggregator_credentials(*files)
        with pytest.raises(UserError, match="bad is not a private key in PEM format"):
            aggregator_credentials(cert, bad, None)

    def test_swapped_files_are_refused(self, folders: tuple[Path, Path]) -> None:
        cert, key = pair(folders[0], "aggregator")
        with pytest.raises(UserError, match=r"aggregator\.key is not a certificate"):
            aggregator_credentials(key, cert, None)

    def test_mismatched_key_is_refused(self, folders: tuple[Path, Path]) -> None:
        ours, _ = folders
        with pytest.raises(
            UserError,
            match=r"edge-1\.key is not the key of the certificate .*aggregator\.pem",
        ):
            aggregator_credentials(ours / "aggregator.pem", ours / "edge-1.key", None)

    def test_encrypted_key_is_refused(
        self, folders: tuple[Path, Path], tmp_path: Path
    ) -> None:
        cert, key = pair(folders[0], "edge-1")
        plain = load_pem_private_key(key.read_bytes(), password=None)
        locked = tmp_path / "locked.key"
        locked.write_bytes(
            plain.private_bytes(
                Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
            )
        )
        with pytest.raises(UserError, match=r"locked\.key is protected by a password"):
            node_credentials(folders[0] / "ca.pem", cert, locked)

    def test_ca_bundle_with_comments(
        self, folders: tuple[Path, Path], tmp_path: Path
    ) -> None:
        ours, theirs = folders
        bundle = tmp_path / "bundle.pem"
        bundle.write_bytes(
            "# Főtanúsítvány\n".encode()
            + (theirs / "ca.pem").read_bytes()
            + (ours / "ca.pem").read_bytes()
        )
        serving = aggregator_credentials(*pair(ours, "aggregator"), bundle)
        assert ask(serving, node_credentials(bundle, *pair(theirs, "edge-1"))) == "edge-1"


class TestPeerNames:
    def test_common_name_is_the_name(self) -> None:
        """A certificate with several names is that of one node."""
        context = {
            "transport_security_type": [b"ssl"],
            "x509_common_name": [b"edge-1"],
            "x509_subject_alternative_name": [b"edge-2", b"edge-1.example", b"\xff"],
            "x509_pem_cert": [b"-----BEGIN"],
        }
        assert peer_name(context) == "edge-1"
        del context["x509_common_name"]
        assert peer_name(context) == ""
        context["x509_subject_alternative_name"] = [b"\xff"]
        assert peer_name(context) == "\ufffd"

    def test_no_certificate_no_names(self) -> None:
        assert peer_name({}) is None
        assert peer_name({"transport_security_type": [b"ssl"]}) is None


class TestAddresses:
    @pytest.mark.parametrize(
        ("address", "host", "port"),
        [
            ("localhost", "localhost", DEFAULT_PORT),
            ("edge.example:9000", "edge.example", 9000),
            ("my_host-1:65535", "my_host-1", 65535),
            ("127.0.0.1:0", "127.0.0.1", 0),
            ("[::1]", "::1", DEFAULT_PORT),
            ("[fe80::1]:80", "fe80::1", 80),
        ],
    )
    def test_valid_addresses(self, address: str, host: str, port: int) -> None:
        assert split_address(address) == (host, port)
        assert split_address(join_address(host, port)) == (host, port)

    @pytest.mark.parametrize(
        ("address", "why"),
        [
            ("", "has no host"),
            (":7700", "has no host; 0.0.0.0:7700 is all"),
            ("host:", "must be a whole number"),
            ("host:http", "must be a whole number"),
            ("host:65536", "must be a whole number from 0 to 65535"),
            ("host:-1", "must be a whole number"),
            ("host:٣", "must be a whole number"),
            ("host:80\n", "must be a whole number"),
            ("::1", "an IPv6 address goes in brackets"),
            ("::1:7700", "an IPv6 address goes in brackets"),
            ("[localhost]:1", "in brackets, is not an IPv6 address"),
            ("[127.0.0.1]:1", "in brackets, is not an IPv6 address"),
            ("[]", "in brackets, is not an IPv6 address"),
            ("[::1", "is not an address"),
            ("[::1]7700", "is not an address"),
            ("a b:1", "neither an IP address nor a host name"),
            ("127.0.0.256:1", "neither an IP address nor a host name"),
            ("127.1", "neither an IP address nor a host name"),
            ("2130706433:1", "neither an IP address nor a host name"),
            ("user@host:1", "neither an IP address nor a host name"),
            ("host/path:1", "neither an IP address nor a host name"),
            ("http://host:1", "is not an address"),
            ("dns:///host", "must be a whole number"),
            ("ipv4:1.2.3.4:80", "is not an address"),
            ("x" * 254, "neither an IP address nor a host name"),
        ],
    )
    def test_invalid_addresses_are_refused(self, address: str, why: str) -> None:
        with pytest.raises(UserError, match=why):
            split_address(address)

    def test_port_can_be_required(self) -> None:
        assert split_address("localhost:9100", port=None) == ("localhost", 9100)
        with pytest.raises(UserError, match="'localhost' has no port"):
            split_address("localhost", port=None)

    @given(st.text(max_size=30))
    def test_arbitrary_text_parses_or_fails(self, address: str) -> None:
        try:
            host, port = split_address(address)
        except UserError:
            return
        assert split_address(join_address(host, port)) == (host, port)

    @given(host=st.ip_addresses().map(str), port=st.integers(0, 65535))
    def test_ip_addresses_round_trip(self, host: str, port: int) -> None:
        assert split_address(join_address(host, port)) == (host, port)


class TestRequiredEncryption:
    @pytest.mark.parametrize(
        "address",
        [
            "localhost",
            "LOCALHOST:1",
            "127.0.0.1:7700",
            "127.255.0.9:1",
            "[::1]:7700",
            "[::ffff:127.0.0.1]:1",
            "unix:/tmp/x",
        ],
    )
    def test_loopback_needs_no_encryption(self, address: str) -> None:
        require_privacy(address, encrypted=False, insecure=False)

    @pytest.mark.parametrize(
        "address",
        [
            "0.0.0.0:7700",
            "[::]:7700",
            "192.168.1.10",
            "edge.example:7700",
            "localhost.example:1",
            "[::ffff:192.168.1.1]:1",
        ],
    )
    def test_other_hosts_need_encryption(self, address: str) -> None:
        """`insecure` overrides this."""
        with pytest.raises(UserError, match=r"fedbudget certs .* with insecure"):
            require_privacy(address, encrypted=False, insecure=False)
        require_privacy(address, encrypted=True, insecure=False)
        require_privacy(address, encrypted=False, insecure=True)

    def test_address_is_checked_first(self) -> None:
        with pytest.raises(UserError, match="is not an address"):
            require_privacy("dns:///127.0.0.1:80", encrypted=False, insecure=False)
