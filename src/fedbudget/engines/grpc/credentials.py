"""TLS certificates and network addresses. Tokens are in tokens.py.

Rules:
- An incomplete set of TLS files is an error, never a connection in plain text.
- A likely mistake (a key of another certificate) is an error at the start, not during the
  handshake.

Threads: functions without shared state.
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
    """TLS credentials of the aggregator, or None for plain text.

    Args:
      cert, key: the aggregator's certificate and its key.
      client_ca: each node must have a certificate from this CA.
    """
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
    """TLS credentials of a node, or None for plain text.

    Args:
      ca: the CA of the aggregator's certificate.
      cert, key: the node's own certificate and its key.
    """
    if ca is None and cert is None and key is None:
        return None
    if ca is None:
        raise UserError(
            "`cert` and `key` need `ca`, the CA of the aggregator's certificate; for a "
            "public CA use the system's file, often /etc/ssl/certs/ca-certificates.crt"
        )
    own = () if cert is None and key is None else _key_and_chain(cert, key)
    return grpc.ssl_channel_credentials(_read_certificates(ca), *own)


def peer_name(auth_context: Mapping[str, Sequence[bytes]]) -> str | None:
    """The one name in a peer's certificate; None without a certificate.

    It is the common name, or the only alternative name of a certificate without one. An
    empty name is the name of no node.
    """
    for key in ("x509_common_name", "x509_subject_alternative_name"):
        if names := auth_context.get(key):
            return names[0].decode("utf-8", "replace") if len(names) == 1 else ""
    return None


def _key_and_chain(cert: Path | None, key: Path | None) -> tuple[bytes, bytes]:
    """A private key and its certificate chain, in gRPC's order."""
    if cert is None or key is None:
        missing = [
            name for name, file in (("`cert`", cert), ("`key`", key)) if file is None
        ]
        raise UserError(f"`cert` and `key` go together; missing: {' and '.join(missing)}")
    chain = _read_certificates(cert)
    private_key = _read(key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            cert, key, password=_refuse_password
        )
    except _Protected:
        raise UserError(
            f"{key} is protected by a password; use one without, in a file of mode 600"
        ) from None
    except ssl.SSLError as error:
        if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            raise UserError(f"{key} is not the key of the certificate {cert}") from None
        raise UserError(f"{key} is not a private key in PEM format") from None
    return private_key, chain


class _Protected(Exception):
    """A key needs a password."""


def _refuse_password() -> str:
    raise _Protected


def _read_certificates(path: Path) -> bytes:
    text = _read(path)
    try:
        # OpenSSL accepts the irregular bundles of operating systems, and their comments.
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
    """Refuse plain text on a network: tokens and models could be read and changed there.

    Args:
      address: of the connection.
      encrypted: TLS is used.
      insecure: the user accepts plain text.
    """
    if encrypted or insecure or is_local(address):
        return
    raise UserError(
        f"{address} is not on this machine, and without TLS anyone on the network path can "
        "read and change the messages; create certificates with fedbudget certs and pass "
        "`cert` and `key` to serve and `ca` to join, or accept plain text with `insecure`"
    )


def is_local(address: str) -> bool:
    """Whether an address is on this machine."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    return _loopback(split_address(address)[0])


def split_address(address: str, *, port: int | None = DEFAULT_PORT) -> tuple[str, int]:
    """Split HOST:PORT.

    Args:
      port: default port; None requires a port in the address.

    >>> split_address("edge.example:9000"), split_address("[::1]:0")
    (('edge.example', 9000), ('::1', 0))
    >>> split_address("127.0.0.1")
    ('127.0.0.1', 7700)
    """
    match = re.fullmatch(
        r"(?:\[(?P<six>[^\[\]]*)\]|(?P<host>[^\[\]:]*))(?::(?P<port>[^:]*))?", address
    )
    if match is None:
        is_six = re.fullmatch(r"[0-9A-Fa-f:.]+", address) is not None
        hint = "; an IPv6 address goes in brackets, as in [::1]:7700" if is_six else ""
        raise UserError(f"{address[:300]!r} is not an address HOST:PORT{hint}")
    six = match["six"]
    host = match["host"]
    given = match["port"]
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
            f"{address[:300]!r} has no host; "
            f"0.0.0.0:{given or port} is all of this machine's addresses"
        )
    if host is not None and not valid_host(host):
        raise UserError(f"{host[:300]!r} is neither an IP address nor a host name")
    number = int(given) if given is not None else port or 0
    return six if host is None else host, number


def join_address(host: str, port: int) -> str:
    """Inverse of `split_address`.

    >>> join_address("::1", 7700)
    '[::1]:7700'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def valid_host(host: str) -> bool:
    """Whether this is an IP address or a possible host name."""
    if _ip(host) is not None:
        return True
    # A last label of digits is not a name but an invalid or disguised IP address.
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
