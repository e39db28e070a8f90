"""Checks of an installation, and of the address, certificates and clock of a machine.

Rules:

- A check changes nothing outside a temporary folder, and sends no token and no data.
- A check returns findings. It raises no error for what it was asked to find.
- Each problem has advice: what to do, in one line.
"""

import math
import os
import platform
import re
import shutil
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

import fedbudget
from fedbudget.errors import UserError
from fedbudget.models.compiling import has_numba, on_compiling

SOON = timedelta(days=30)
"""Time before the end of a certificate from which on it is mentioned."""

LEAST_SPACE = 1 << 30
"""Free bytes of a folder of runs below which there is a note."""

TIMEOUT = 5.0
"""Seconds to wait for a connection."""

_EXTRAS = {
    "numba": ("full", "compiled kernels"),
    "matplotlib": ("full", "plots of runs"),
    "sklearn": ("full", "estimators, partitions by cluster"),
    "grpc": ("node", "real nodes"),
    "cryptography": ("network", "secure aggregation, fedbudget certs"),
    "torch": ("torch", "networks, your own PyTorch model"),
    "pyarrow": ("parquet", "Parquet tables"),
    "starlette": ("dashboard", "dashboard and reports"),
    "onnx": ("onnx", "export to ONNX"),
    "ray": ("ray", "simulation on a cluster"),
    "flwr": ("flower", "Flower"),
}
"""Modules of optional packages: the extra that installs each, and its use."""


class Status(StrEnum):
    """Result of a check."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Args:
      status: a note is no reason to fail.
      text: what was found.
      advice: what to do; empty if nothing.
    """

    status: Status
    text: str
    advice: str = ""


def ok(text: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(Status.OK, text)


def note(text: str, advice: str = "") -> Finding:
    """Return a finding that limits what is possible."""
    return Finding(Status.NOTE, text, advice)


def problem(text: str, advice: str) -> Finding:
    """Return a finding that prevents something."""
    return Finding(Status.PROBLEM, text, advice)


# Installation


def check_installation(runs: Path = Path()) -> Iterator[Finding]:
    """Check packages, kernels, devices, folders and the clock of this machine.

    Args:
      runs: a folder in which runs will be written.
    """
    threads = os.cpu_count() or 1
    yield ok(
        f"fedbudget {fedbudget.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}, {threads} processors"
    )
    yield _check_packages()
    yield _check_training()
    yield _check_gpu()
    yield _check_energy()
    yield _check_folder(runs)
    yield _check_clock()


def _check_packages() -> Finding:
    missing: dict[str, list[str]] = {}
    for module, (extra, use) in _EXTRAS.items():
        if not _installed(module):
            missing.setdefault(extra, []).append(use)
    if not missing:
        return ok("all optional packages are installed")
    uses = "; ".join(f"{', '.join(each)} ({name})" for name, each in missing.items())
    extras = ",".join(missing)
    return note(f"not installed: {uses}", f"pip install 'fedbudget[{extras}]'")


def _installed(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def _check_training() -> Finding:
    """Train a small model, which compiles and loads the kernels."""
    compiled: list[bool] = []
    began = time.perf_counter()
    try:
        with on_compiling(lambda: compiled.append(True)):
            result = fedbudget.train(
                dataset="digits", model="softmax", nodes=2, rounds=3, budget="time=10s"
            )
    except Exception as error:  # anything, because this is what the check is for
        return problem(
            f"a small training failed: {type(error).__name__}: {error}",
            "pip install --force-reinstall 'fedbudget[full]'",
        )
    seconds = time.perf_counter() - began
    if not result.loss < math.log(10):  # of w(0), which gives ten classes equal probability
        return problem(
            f"a small training did not reduce its loss: {result.loss:.4f}",
            "report it with the output of this command",
        )
    text = f"a small training works, {seconds:.1f} s"
    if not has_numba():
        advice = "pip install 'fedbudget[full]' is several times faster"
        return note(f"{text}; without compiled kernels", advice)
    if compiled:
        text += "; it compiled kernels, and the next run starts faster"
    return ok(text)


def _check_gpu() -> Finding:
    if not _installed("torch"):
        return ok("no PyTorch; built-in models need no GPU")
    import torch

    if torch.cuda.is_available():
        return ok(f"GPU for PyTorch models: {torch.cuda.get_device_name()}")
    return ok("no GPU for PyTorch models; they train on the processor")


def _check_energy() -> Finding:
    from fedbudget.resources.rapl import Rapl
    from fedbudget.resources.resource import MeterError

    try:
        Rapl()
    except MeterError as error:
        return note(
            f"energy of this processor is not readable: {error}",
            "--watts declares the power of a node, if you set a budget of energy",
        )
    return ok("energy of this processor is readable")


def _check_folder(folder: Path) -> Finding:
    try:
        with tempfile.TemporaryDirectory(prefix=".fedbudget-", dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        return problem(
            f"cannot write to {folder.absolute()}: {error.strerror}",
            "change to a folder of your own, or name one with --out",
        )
    text = f"{folder.absolute()} is writable, {free / 1e9:.1f} GB free"
    return ok(text) if free >= LEAST_SPACE else note(text, "free some space before a run")


def _check_clock(now: datetime | None = None) -> Finding:
    """Compare the clock with the date of the installed files, which lie in the past."""
    now = now or datetime.now(UTC)
    installed = datetime.fromtimestamp(Path(__file__).stat().st_mtime, UTC)
    if now < installed - timedelta(days=1):
        return problem(
            f"the clock shows {now:%Y-%m-%d %H:%M} UTC, before this installation",
            "set the clock; certificates and records depend on it",
        )
    return ok(f"clock: {now:%Y-%m-%d %H:%M:%S} UTC")


# Aggregator


def check_aggregator(
    address: str,
    *,
    cert: Path | None,
    key: Path | None,
    client_ca: Path | None,
    token_file: Path | None,
) -> Iterator[Finding]:
    """Check what `fedbudget serve` needs. Arguments are those of its options."""
    if (missing := _missing_grpc()) is not None:
        yield missing
        return
    from fedbudget.engines.grpc.credentials import aggregator_credentials, split_address

    try:
        host, port = split_address(address)
    except UserError as error:
        yield problem(str(error), "give HOST:PORT, such as 0.0.0.0:7700")
        return
    yield _check_port(host, port)
    try:
        encrypted = aggregator_credentials(cert, key, client_ca) is not None
    except UserError as error:
        yield problem(str(error), "fedbudget certs creates matching files")
        return
    yield from _check_encryption(address, encrypted=encrypted)
    if cert is not None:
        yield from _check_certificate(cert, "serverAuth")
    if client_ca is not None:
        yield from _check_certificate(client_ca, None)
    if token_file is not None:
        yield _check_tokens(token_file)
    elif client_ca is None:
        yield note(
            "neither --token-file nor --client-ca: any node can join",
            "fedbudget tokens add NAME, or fedbudget certs --node NAME",
        )


def _check_port(host: str, port: int) -> Finding:
    try:
        kind = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind[0], socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(kind[4])
    except OSError as error:
        return problem(
            f"cannot listen on {host} port {port}: {error.strerror}",
            "stop the other program, or choose another address or port",
        )
    return ok(f"port {port} of {host} is free; check that the firewall admits nodes")


def _check_encryption(address: str, *, encrypted: bool) -> Iterator[Finding]:
    from fedbudget.engines.grpc.credentials import require_privacy

    try:
        require_privacy(address, encrypted=encrypted, insecure=False)
    except UserError as error:
        yield problem(str(error).split(";")[0], "fedbudget certs")
        return
    yield ok("connections are encrypted" if encrypted else "this machine only, unencrypted")


def _check_tokens(path: Path) -> Finding:
    from fedbudget.engines.grpc.tokens import TokenFile

    try:
        TokenFile(path)
    except UserError as error:
        return problem(str(error), "fedbudget tokens add NAME --file FILE creates one")
    return ok(f"{path}: tokens are readable")


# Node


def check_node(
    address: str,
    *,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    token_file: Path | None,
) -> Iterator[Finding]:
    """Check what `fedbudget join` needs. Arguments are those of its options.

    It connects to the aggregator and completes the TLS handshake, but does not join.
    """
    if (missing := _missing_grpc()) is not None:
        yield missing
        return
    from fedbudget.engines.grpc.credentials import node_credentials, split_address

    try:
        host, port = split_address(address)
    except UserError as error:
        yield problem(str(error), "give HOST:PORT, such as aggregator.example:7700")
        return
    try:
        encrypted = node_credentials(ca, cert, key) is not None
    except UserError as error:
        yield problem(str(error), "ask the operator of the aggregator for these files")
        return
    yield from _check_encryption(address, encrypted=encrypted)
    if ca is not None:
        yield from _check_certificate(ca, None)
    if cert is not None:
        yield from _check_certificate(cert, "clientAuth")
    if token_file is not None:
        yield _check_node_token(token_file)
    yield _check_connection(host, port, ca, cert, key)


def _check_node_token(path: Path) -> Finding:
    from fedbudget.engines.grpc.tokens import node_token

    try:
        node_token(path)
    except UserError as error:
        return problem(str(error), "ask the operator of the aggregator for your token")
    return ok(f"{path}: the token is readable")


def _check_connection(
    host: str, port: int, ca: Path | None, cert: Path | None, key: Path | None
) -> Finding:
    try:
        with socket.create_connection((host, port), TIMEOUT) as plain:
            if ca is None:
                return ok(f"port {port} of {host} answers")
            context = ssl.create_default_context(cafile=str(ca))
            context.set_alpn_protocols(["h2"])
            if cert is not None:
                context.load_cert_chain(cert, key)
            with context.wrap_socket(plain, server_hostname=host) as secured:
                version = secured.version()
                speaks = secured.selected_alpn_protocol() == "h2"
    except socket.gaierror:
        return problem(
            f"{host} has no address", "check the name, and the DNS of this network"
        )
    except ssl.SSLCertVerificationError as error:
        return problem(
            f"the certificate of {host} is refused: {error.verify_message}",
            "use the --ca that signed it, and the host name that it contains",
        )
    except ssl.SSLError as error:
        return problem(
            f"no TLS on port {port} of {host}: {error.reason}",
            "check that serve has --cert and --key, and that this is its port",
        )
    except OSError as error:
        reason = error.strerror or "no answer"
        return problem(
            f"cannot connect to port {port} of {host}: {reason}",
            "check that serve runs there, the port, and the firewalls between",
        )
    if not speaks:
        return problem(f"port {port} of {host} is no aggregator", "check the port")
    return ok(f"port {port} of {host} answers with a valid certificate, {version}")


# Certificates


def _missing_grpc() -> Finding | None:
    if _installed("grpc"):
        return None
    return problem("grpcio is not installed", "pip install 'fedbudget[network]'")


def _check_certificate(path: Path, usage: str | None) -> Iterator[Finding]:
    """Check the dates of a certificate, its names, and what it may be used for.

    Args:
      path: a file in PEM format.
      usage: required extended key usage, such as "serverAuth"; None for a CA.
    """
    if not _installed("cryptography"):
        yield note(f"{path}: dates are not checked", "pip install 'fedbudget[network]'")
        return
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificates(path.read_bytes())[0]
    except (OSError, ValueError) as error:
        yield problem(f"{path} cannot be read: {error}", "fedbudget certs creates new ones")
        return
    yield _check_dates(path, certificate, datetime.now(UTC))
    if usage is not None and usage not in _usages(certificate):
        yield problem(
            f"{path} is not meant for {usage}", "issue one with this extended key usage"
        )


def _check_dates(path: Path, certificate: Any, now: datetime) -> Finding:
    begins = certificate.not_valid_before_utc
    ends = certificate.not_valid_after_utc
    if now < begins:
        return problem(
            f"{path} is valid from {begins:%Y-%m-%d %H:%M} UTC on, and the clock shows "
            f"{now:%Y-%m-%d %H:%M}",
            "set the clock of this machine, or wait",
        )
    if now > ends:
        return problem(f"{path} expired on {ends:%Y-%m-%d}", "issue a new one")
    names = ", ".join(_names(certificate))
    text = f"{path}: {names}, valid until {ends:%Y-%m-%d}"
    return note(text, "renew it soon") if ends - now < SOON else ok(text)


def _names(certificate: Any) -> list[str]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        ).value
    except x509.ExtensionNotFound:
        return [re.sub(r"[^ -~]", "?", certificate.subject.rfc4514_string())]
    return [re.sub(r"[^ -~]", "?", str(name.value)) for name in names]


def _usages(certificate: Any) -> set[str]:
    """Return the names of the extended key usages; any usage if none is given."""
    from cryptography import x509

    try:
        usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return {"serverAuth"}
    return {usage._name for usage in usages}
