"""Certificates, addresses, and when a connection is private enough to say a token on; tokens.py has these.

Rules here:
- Half of what TLS needs is an error, never a connection in plain text.
- What may be a slip (a key of another certificate) is an error at the start, not at the handshake.
"""

import ipaddress
import re
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc

from fedbudget.errors import UserError

DEFAULT_PORT = 7700

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"({_LABEL}\.)*{_LABEL}")
_ALL_DIGITS = re.compile(r"(.*\.)?[0-9]+")


# Certificates


def aggregator_credentials(
    cert: Path | None, key: Path | None, client_ca: Path | None
) -> grpc.ServerCredentials | None:
    """TLS of the aggregator, or None for plain text. With `client_ca`, each node must show a certificate of that CA."""
    if cert is None and key is None and client_ca is None:
        return None
    return grpc.ssl_server_credentials(
        [_key_and_chain(cert, key)],
        root_certificates=None if client_ca is None else _read_certificates(client_ca),
        require_client_auth=client_ca is not None,
    )


def node_credentials(
    ca: Path | None, cert: Path | None, key: Path | None
) -> grpc.ChannelCredentials | None:
    """TLS of a node, or None for plain text. The aggregator's certificate must be of `ca`; `cert` is the node's own."""
    if ca is None and cert is None and key is None:
        return None
    if ca is None:
        raise UserError(
            "--cert and --key need --ca, the file of the CA that the aggregator's certificate is from; "
            "for a public CA that is the system's, often /etc/ssl/certs/ca-certificates.crt"
        )
    private_key, chain = (
        (None, None) if cert is None and key is None else _key_and_chain(cert, key)
    )
    return grpc.ssl_channel_credentials(_read_certificates(ca), private_key, chain)


def peer_names(auth_context: Mapping[str, Sequence[bytes]]) -> set[str]:
    """The names that a peer's certificate proves; none where it showed no certificate."""
    found = (
        auth_context.get(key) or ()
        for key in ("x509_common_name", "x509_subject_alternative_name")
    )
    return {name.decode("utf-8", "replace") for names in found for name in names}


def _key_and_chain(cert: Path | None, key: Path | None) -> tuple[bytes, bytes]:
    """A pair of private key and certificate, in the order in which gRPC wants them."""
    if cert is None or key is None:
        missing = [
            name for name, file in (("--cert", cert), ("--key", key)) if file is None
        ]
        are = "is" if len(missing) == 1 else "are"
        raise UserError(
            f"--cert and --key go together; {' and '.join(missing)} {are} missing"
        )
    chain = _read_certificates(cert)
    private_key = _read(key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            cert, key, password=_refuse_password
        )
    except _Protected:
        raise UserError(
            f"{key} is protected by a password; give a key without one, in a file of mode 600"
        ) from None
    except ssl.SSLError as error:
        if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            raise UserError(f"{key} is not the key of the certificate {cert}") from None
        raise UserError(f"{key} is not a private key in PEM format") from None
    return private_key, chain


class _Protected(Exception):
    """A key cannot be read without a password."""


def _refuse_password() -> str:
    raise _Protected


def _read_certificates(path: Path) -> bytes:
    text = _read(path)
    try:
        # By OpenSSL, which takes the bundles of systems with all their oddities, and comments in any language.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(
            cadata=text.decode("ascii", "ignore")
        )
    except (ssl.SSLError, ValueError):
        raise UserError(f"{path} is not a certificate in PEM format") from None
    return text


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


# Addresses


def require_privacy(address: str, *, encrypted: bool, insecure: bool) -> None:
    """Refuses plain text on a network, where tokens and models could be read and changed on the way."""
    if (
        encrypted
        or insecure
        or address.startswith(("unix:", "unix-abstract:"))
        or _loopback(split_address(address)[0])
    ):
        return
    raise UserError(
        f"{address} is not on this machine, and without TLS everyone on the way can read and change what is sent; "
        "make certificates with fedbudget certs and give --cert and --key to serve and --ca to join, "
        "or say --insecure to go on without"
    )


def split_address(address: str, *, port: int | None = DEFAULT_PORT) -> tuple[str, int]:
    """Host and port of HOST:PORT, where the port may be left out unless `port` is None.

    >>> split_address("edge.example:9000"), split_address("[::1]:0"), split_address("127.0.0.1")
    (('edge.example', 9000), ('::1', 0), ('127.0.0.1', 7700))
    """
    found = re.fullmatch(
        r"(?:\[(?P<six>[^\[\]]*)\]|(?P<host>[^\[\]:]*))(?::(?P<port>[^:]*))?", address
    )
    if found is None:
        is_six = re.fullmatch(r"[0-9A-Fa-f:.]+", address) is not None
        hint = "; an IPv6 address goes in brackets, as in [::1]:7700" if is_six else ""
        raise UserError(f"{address[:300]!r} is not an address HOST:PORT{hint}")
    six = found["six"]
    host = found["host"]
    given = found["port"]
    if given is not None and (
        re.fullmatch("[0-9]{1,5}", given) is None or int(given) > 65535
    ):
        raise UserError(
            f"the port of {address[:300]!r} must be a whole number from 0 to 65535"
        )
    if given is None and port is None:
        raise UserError(f"{address[:300]!r} has no port; give HOST:PORT")
    if six is not None and not isinstance(_ip(six), ipaddress.IPv6Address):
        raise UserError(f"{six[:300]!r}, in brackets, is not an IPv6 address")
    if host == "":
        raise UserError(
            f"{address[:300]!r} has no host; 0.0.0.0:{given or port} is all of this machine's addresses"
        )
    if host is not None and not valid_host(host):
        raise UserError(f"{host[:300]!r} is neither an IP address nor a host's name")
    return six if host is None else host, int(given) if given is not None else port or 0


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`.

    >>> join_address("::1", 7700)
    '[::1]:7700'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def valid_host(host: str) -> bool:
    """Whether this is an IP address, or may be the name of a host."""
    if _ip(host) is not None:
        return True
    # A last label of digits is never a name, but an IP address gone wrong, or written in a way that hides what it is.
    return (
        len(host) <= 253
        and _HOST_NAME.fullmatch(host) is not None
        and _ALL_DIGITS.fullmatch(host) is None
    )


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _loopback(host: str) -> bool:
    address = _ip(host)
    if address is None:
        return host.lower() == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
