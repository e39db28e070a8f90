"""`fedbudget doctor`: findings about real files, ports and servers on this machine."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fedbudget import doctor
from fedbudget.cli.main import _exit_code
from fedbudget.doctor import Finding, Status

grpc = pytest.importorskip("grpc", reason="needs grpcio")
pytest.importorskip("cryptography", reason="needs cryptography")


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of an aggregator on localhost and of the node edge-1."""
    from fedbudget.engines.grpc import certificates

    folder = tmp_path_factory.mktemp("certs")
    certificates.make(folder, hosts=("localhost", "127.0.0.1"), nodes=("edge-1",), days=90)
    return folder


@contextmanager
def served(certs: Path | None) -> Iterator[str]:
    """A gRPC server on a free port, with TLS if there are certificates."""
    server = grpc.server(ThreadPoolExecutor(1))
    if certs is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        pair = [
            (certs / name).read_bytes() for name in ("aggregator.key", "aggregator.pem")
        ]
        credentials = grpc.ssl_server_credentials([tuple(pair)])
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)


def problems(findings: Iterator[Finding]) -> list[str]:
    return [each.text for each in findings if each.status is Status.PROBLEM]


def aggregator_problems(certs: Path, **changed: object) -> list[str]:
    options: dict[str, object] = {
        "cert": certs / "aggregator.pem",
        "key": certs / "aggregator.key",
        "client_ca": certs / "ca.pem",
        "token_file": None,
    }
    address = changed.pop("address", "127.0.0.1:0")
    return problems(doctor.check_aggregator(address, **options | changed))  # type: ignore[arg-type]


def node_problems(address: str, **options: Path | None) -> list[str]:
    all_options = dict.fromkeys(("ca", "cert", "key", "token_file"))
    return problems(doctor.check_node(address, **all_options | options))


def test_installation_has_no_problem(tmp_path: Path) -> None:
    findings = [*doctor.check_installation(tmp_path)]
    assert [each for each in findings if each.status is Status.PROBLEM] == []
    assert any("a small training works" in each.text for each in findings)
    assert [*tmp_path.iterdir()] == []


def test_unwritable_folder_is_a_problem(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    found = doctor._check_folder(file)
    assert found.status is Status.PROBLEM
    assert str(file) in found.text


def test_clock_before_installation() -> None:
    early = datetime(2001, 1, 1, tzinfo=UTC)
    assert doctor._check_clock(early).status is Status.PROBLEM
    assert doctor._check_clock().status is Status.OK


def test_good_aggregator(certs: Path) -> None:
    assert aggregator_problems(certs) == []


def test_port_in_use(certs: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (found,) = aggregator_problems(certs, address=f"127.0.0.1:{port}")
    assert f"port {port}" in found


def test_key_of_another_certificate(certs: Path) -> None:
    (found,) = aggregator_problems(certs, key=certs / "edge-1.key")
    assert "is not the key of" in found


def test_certificate_for_another_use(certs: Path) -> None:
    """A node's certificate cannot serve, and that of the aggregator cannot join."""
    found = aggregator_problems(certs, cert=certs / "edge-1.pem", key=certs / "edge-1.key")
    assert any("is not meant for serverAuth" in text for text in found)
    with served(certs) as address:
        found = node_problems(
            address,
            ca=certs / "ca.pem",
            cert=certs / "aggregator.pem",
            key=certs / "aggregator.key",
        )
    assert any("is not meant for clientAuth" in text for text in found)


def test_public_address_without_tls() -> None:
    found = problems(
        doctor.check_aggregator(
            "0.0.0.0:0", cert=None, key=None, client_ca=None, token_file=None
        )
    )
    assert any("without TLS" in text for text in found)


@pytest.mark.parametrize(
    ("later", "status", "text"),
    [
        (timedelta(days=-2), Status.PROBLEM, "is valid from"),
        (timedelta(days=1), Status.OK, "localhost"),
        (timedelta(days=70), Status.NOTE, "valid until"),
        (timedelta(days=91), Status.PROBLEM, "expired"),
    ],
)
def test_dates_of_a_certificate(
    certs: Path, later: timedelta, status: Status, text: str
) -> None:
    from cryptography import x509

    path = certs / "aggregator.pem"
    (certificate, *_) = x509.load_pem_x509_certificates(path.read_bytes())
    found = doctor._check_dates(path, certificate, datetime.now(UTC) + later)
    assert found.status is status
    assert text in found.text


def test_tokens_that_others_can_read(certs: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("edge-1 " + "a" * 32)
    file.chmod(0o644)
    (found,) = aggregator_problems(certs, token_file=file)
    assert "others can read" in found
    file.chmod(0o600)
    assert aggregator_problems(certs, token_file=file) == []


def test_node_reaches_its_aggregator(certs: Path) -> None:
    with served(certs) as address:
        found = [
            *doctor.check_node(
                address,
                ca=certs / "ca.pem",
                cert=certs / "edge-1.pem",
                key=certs / "edge-1.key",
                token_file=None,
            )
        ]
    assert [each for each in found if each.status is Status.PROBLEM] == []
    assert "valid certificate" in found[-1].text


def test_node_with_another_ca(certs: Path, tmp_path: Path) -> None:
    from fedbudget.engines.grpc import certificates

    certificates.make(tmp_path, hosts=("localhost",), nodes=(), days=90)
    with served(certs) as address:
        (found,) = node_problems(address, ca=tmp_path / "ca.pem")
    assert "is refused" in found


def test_aggregator_without_tls(certs: Path) -> None:
    with served(None) as address:
        (found,) = node_problems(address, ca=certs / "ca.pem")
        assert "no TLS" in found
        assert node_problems(address) == []


def test_nothing_listens(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the problem with advice, and exits with 1."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert _exit_code(["doctor", "--join", f"127.0.0.1:{port}"]) == 1
    printed = capsys.readouterr().out
    assert f"problem  cannot connect to port {port} of 127.0.0.1" in printed
    assert "Try: check that serve runs there" in printed


def test_tour_names_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command of the tour exists."""
    from typer.main import get_command

    from fedbudget.cli.main import app

    assert _exit_code([]) == 0
    printed = capsys.readouterr().out
    named = {line.split()[1] for line in printed.splitlines() if "  fedbudget" in line}
    assert {"run", "serve", "join", "describe"} <= named
    assert named <= set(get_command(app).commands)  # type: ignore[attr-defined]
