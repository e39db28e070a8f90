"""Certificates and addresses, with real TLS on loopback where it is about that."""

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
    peer_names,
    require_privacy,
    split_address,
)
from fedbudget.errors import UserError


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Certificates of our CA, some of them expired, and the same names from a stranger's
    CA.
    """
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
    return " ".join(sorted(peer_names(context.auth_context()))).encode()


@asynccontextmanager
async def aggregator(credentials: Any) -> AsyncIterator[int]:
    """An aggregator that tells its peers their names."""
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
    """What the aggregator says to a node, or raises what gRPC does."""

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


def refused(serving: Any, joining: Any, why: str = "") -> None:
    """The peers do not come together, for the reason that the node is told: little, where
    the aggregator refuses.
    """
    with pytest.raises(grpc.aio.AioRpcError) as error:
        ask(serving, joining)
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert why in error.value.details()


class TestTls:
    def test_nothing_given_is_plain_text(self) -> None:
        assert aggregator_credentials(None, None, None) is None
        assert node_credentials(None, None, None) is None
        assert ask(None, None) == ""

    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
    def test_lets_a_node_in_that_knows_the_ca_and_proves_no_name(
        self, folders: tuple[Path, Path], host: str
    ) -> None:
        ours, _ = folders
        serving = aggregator_credentials(*pair(ours, "aggregator"), None)
        assert ask(serving, node_credentials(ours / "ca.pem", None, None), host) == ""

    def test_a_node_refuses_an_aggregator_of_another_ca(
        self, folders: tuple[Path, Path]
    ) -> None:
        ours, theirs = folders
        serving = aggregator_credentials(*pair(theirs, "aggregator"), None)
        refused(
            serving,
            node_credentials(ours / "ca.pem", None, None),
            "CERTIFICATE_VERIFY_FAILED",
        )

    def test_a_node_refuses_an_expired_aggregator(self, folders: tuple[Path, Path]) -> None:
        ours, _ = folders
        serving = aggregator_credentials(*pair(ours, "expired-aggregator"), None)
        refused(
            serving,
            node_credentials(ours / "ca.pem", None, None),
            "certificate has expired",
        )

    def test_a_node_refuses_another_node_that_poses_as_the_aggregator(
        self, folders: tuple[Path, Path]
    ) -> None:
        ours, _ = folders
        serving = aggregator_credentials(*pair(ours, "edge-1"), None)
        refused(
            serving, node_credentials(ours / "ca.pem", None, None), "certificate purpose"
        )

    def test_a_node_refuses_an_aggregator_of_another_name(self, tmp_path: Path) -> None:
        make(tmp_path, hosts=["edge.example"])
        serving = aggregator_credentials(*pair(tmp_path, "aggregator"), None)
        refused(serving, node_credentials(tmp_path / "ca.pem", None, None))

    def test_plain_text_and_tls_do_not_come_together(
        self, folders: tuple[Path, Path]
    ) -> None:
        ours, _ = folders
        refused(aggregator_credentials(*pair(ours, "aggregator"), None), None)
        refused(None, node_credentials(ours / "ca.pem", None, None))


class TestMutualTls:
    def test_proves_the_node_s_name(self, folders: tuple[Path, Path]) -> None:
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
    def test_refuses_a_node_without_a_good_certificate(
        self,
        folders: tuple[Path, Path],
        own: Callable[[Path, Path], tuple[Path | None, Path | None]],
    ) -> None:
        ours, _ = folders
        serving = aggregator_credentials(*pair(ours, "aggregator"), ours / "ca.pem")
        refused(serving, node_credentials(ours / "ca.pem", *own(*folders)))

    def test_an_aggregator_that_does_not_ask_learns_no_name(
        self, folders: tuple[Path, Path]
    ) -> None:
        ours, _ = folders
        serving = aggregator_credentials(*pair(ours, "aggregator"), None)
        assert ask(serving, node_credentials(ours / "ca.pem", *pair(ours, "edge-1"))) == ""


class TestFilesOfCertificates:
    @pytest.mark.parametrize(
        ("chosen", "why"),
        [
            (("cert",), "missing: --key"),
            (("key",), "missing: --cert"),
            (("ca",), "missing: --cert and --key"),
            (("cert", "ca"), "missing: --key"),
            (("key", "ca"), "missing: --cert"),
        ],
    )
    def test_of_the_aggregator_go_together(
        self, folders: tuple[Path, Path], chosen: tuple[str, ...], why: str
    ) -> None:
        cert, key, ca = (
            file if name in chosen else None
            for name, file in self.files(folders[0]).items()
        )
        with pytest.raises(UserError, match=why):
            aggregator_credentials(cert, key, ca)

    @pytest.mark.parametrize(
        ("chosen", "why"),
        [
            (("cert", "ca"), "missing: --key"),
            (("key", "ca"), "missing: --cert"),
            (("cert", "key"), "need --ca"),
            (("cert",), "need --ca"),
            (("key",), "need --ca"),
        ],
    )
    def test_of_a_node_go_together(
        self, folders: tuple[Path, Path], chosen: tuple[str, ...], why: str
    ) -> None:
        cert, key, ca = (
            file if name in chosen else None
            for name, file in self.files(folders[0]).items()
        )
        with pytest.raises(UserError, match=why):
            node_credentials(ca, cert, key)

    @staticmethod
    def files(folder: Path) -> dict[str, Path]:
        cert, key = pair(folder, "edge-1")
        return {"cert": cert, "key": key, "ca": folder / "ca.pem"}

    def test_that_are_not_there_are_an_error(
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
    def test_that_are_not_pem_are_an_error(
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

    def test_given_in_the_wrong_order_are_an_error(
        self, folders: tuple[Path, Path]
    ) -> None:
        cert, key = pair(folders[0], "aggregator")
        with pytest.raises(UserError, match=r"aggregator\.key is not a certificate"):
            aggregator_credentials(key, cert, None)

    def test_a_key_of_another_certificate_is_an_error(
        self, folders: tuple[Path, Path]
    ) -> None:
        ours, _ = folders
        with pytest.raises(
            UserError,
            match=r"edge-1\.key is not the key of the certificate .*aggregator\.pem",
        ):
            aggregator_credentials(ours / "aggregator.pem", ours / "edge-1.key", None)

    def test_a_key_with_a_password_is_an_error(
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

    def test_a_bundle_of_cas_with_comments_is_fine(
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
    def test_are_the_common_name_and_the_alternatives(self) -> None:
        context = {
            "transport_security_type": [b"ssl"],
            "x509_common_name": [b"edge-1"],
            "x509_subject_alternative_name": [b"edge-1", b"edge-1.example", b"\xff"],
            "x509_pem_cert": [b"-----BEGIN"],
        }
        assert peer_names(context) == {"edge-1", "edge-1.example", "\ufffd"}

    def test_are_none_without_a_certificate(self) -> None:
        assert peer_names({}) == set()
        assert peer_names({"transport_security_type": [b"ssl"]}) == set()


# Addresses


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
    def test_are_a_host_and_a_port(self, address: str, host: str, port: int) -> None:
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
    def test_that_are_nonsense_are_refused(self, address: str, why: str) -> None:
        with pytest.raises(UserError, match=why):
            split_address(address)

    def test_may_have_to_have_a_port(self) -> None:
        assert split_address("localhost:9100", port=None) == ("localhost", 9100)
        with pytest.raises(UserError, match="'localhost' has no port"):
            split_address("localhost", port=None)

    @given(st.text(max_size=30))
    def test_are_understood_or_refused_whatever_they_are(self, address: str) -> None:
        try:
            host, port = split_address(address)
        except UserError:
            return
        assert split_address(join_address(host, port)) == (host, port)

    @given(host=st.ip_addresses().map(str), port=st.integers(0, 65535))
    def test_of_every_ip_address_come_back(self, host: str, port: int) -> None:
        assert split_address(join_address(host, port)) == (host, port)


class TestPrivacy:
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
    def test_is_not_needed_on_this_machine(self, address: str) -> None:
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
    def test_is_needed_elsewhere_unless_the_user_says_so(self, address: str) -> None:
        with pytest.raises(UserError, match=r"fedbudget certs .* with --insecure"):
            require_privacy(address, encrypted=False, insecure=False)
        require_privacy(address, encrypted=True, insecure=False)
        require_privacy(address, encrypted=False, insecure=True)

    def test_is_asked_for_with_an_address_that_makes_sense(self) -> None:
        with pytest.raises(UserError, match="is not an address"):
            require_privacy("dns:///127.0.0.1:80", encrypted=False, insecure=False)
