"""A small CA and its certificates, for trials: the work of `fedbudget certs`.

Rules:
- Existing files are never overwritten. Nothing is written before the whole request is known
  to be possible.
- A private key is readable by its owner only, from the moment its file exists.
- The aggregator's certificate is not valid for a node, nor a node's for the aggregator.

Threads: functions without shared state.
"""

import ipaddress
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedbudget.engines.grpc.credentials import valid_host
from fedbudget.engines.grpc.tokens import check_name
from fedbudget.errors import UserError

CA = "ca"
AGGREGATOR = "aggregator"
DEFAULT_HOSTS = ("localhost", "127.0.0.1", "::1")

_CA_DAYS = 3650
_EARLIER = timedelta(minutes=5)  # clocks differ between machines


def make(
    folder: Path,
    *,
    hosts: Sequence[str],
    nodes: Sequence[str] = (),
    days: int = 365,
    now: datetime | None = None,
) -> list[Path]:
    """Create certificates and keys in a folder, and a CA unless the folder has one.

    Args:
      hosts: DNS names and IP addresses by which nodes reach the aggregator; without any,
        the aggregator receives no certificate.
      nodes: names of nodes that receive a certificate, for mutual TLS.
      days: validity of certificates, at most that of the CA, which is ten years.
      now: replaces the clock's time.

    Returns:
      The created files, each certificate before its key.
    """
    names = [_host(host) for host in dict.fromkeys(hosts)]
    for name, times in Counter(nodes).items():
        check_name(name)
        if name.lower() in (CA, AGGREGATOR):
            raise UserError(
                f"a node cannot be called {name} here: "
                f"{name}.pem is the {name.lower()}'s certificate"
            )
        if times > 1:
            raise UserError(f"node {name} is named {times} times; names must be unique")
    if not 1 <= days <= _CA_DAYS:
        raise UserError(f"days must be from 1 to {_CA_DAYS}, not {days}")
    now = (now or datetime.now(UTC)).replace(microsecond=0)

    wanted = [*([AGGREGATOR] if names else []), *nodes]
    known = _existing_ca(folder, now)
    if known is not None and not wanted:
        raise UserError(
            f"{folder} has a CA already; add --node or --host for a new certificate"
        )
    for name in wanted:
        for file in _files(folder, name):
            if file.exists() or file.is_symlink():
                raise UserError(
                    f"{file} exists and is not overwritten; move it away for a new one"
                )

    ca = known or _issue("fedbudget CA", now, _CA_DAYS)
    made = {} if known else {CA: ca}
    for name in wanted:
        alternatives: list[x509.GeneralName]
        if name == AGGREGATOR:  # no node has this name
            usage = ExtendedKeyUsageOID.SERVER_AUTH
            alternatives = names
        else:
            usage = ExtendedKeyUsageOID.CLIENT_AUTH
            alternatives = [x509.DNSName(name)]
        made[name] = _issue(
            name,
            now,
            days,
            ca,
            x509.ExtendedKeyUsage([usage]),
            x509.SubjectAlternativeName(alternatives),
            _authority(ca),
        )
    return _write(folder, made)


def default_hosts(folder: Path) -> tuple[str, ...]:
    """Default hosts of the aggregator's certificate: this machine, or none if it exists."""
    return () if _files(folder, AGGREGATOR)[0].exists() else DEFAULT_HOSTS


@dataclass(frozen=True)
class _Pair:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


def _host(host: str) -> x509.GeneralName:
    name = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        if "%" not in name:  # a certificate cannot contain an IPv6 zone
            return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        if valid_host(name.removeprefix("*.")):
            return x509.DNSName(name)
    raise UserError(
        f"{host[:300]!r} is neither an IP address nor a host name; leave out the port"
    )


def _existing_ca(folder: Path, now: datetime) -> _Pair | None:
    """The folder's CA, or None; an incomplete or unusable CA is an error."""
    cert_file, key_file = _files(folder, CA)
    here = [file for file in (cert_file, key_file) if file.exists()]
    if not here:
        return None
    if len(here) == 1:
        (other,) = {cert_file, key_file} - set(here)
        raise UserError(
            f"{here[0]} is here but {other.name} is not; "
            "restore it, or use another folder for a new CA"
        )
    try:
        certificate = x509.load_pem_x509_certificate(cert_file.read_bytes())
        key = load_pem_private_key(key_file.read_bytes(), password=None)
        constraints = certificate.extensions.get_extension_for_class(
            x509.BasicConstraints
        ).value
    except (ValueError, TypeError, x509.ExtensionNotFound):
        raise UserError(
            f"{cert_file} and {key_file} are not a CA's certificate and its key (PEM)"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey):
        raise UserError(f"{key_file} must be an EC or RSA key")
    if not constraints.ca or certificate.public_key() != key.public_key():
        raise UserError(
            f"{cert_file} is not a CA's certificate, or {key_file} is not its key"
        )
    if certificate.not_valid_after_utc <= now:
        ended = certificate.not_valid_after_utc.date()
        raise UserError(
            f"the CA {cert_file} has expired on {ended}; use another folder for a new CA"
        )
    return _Pair(certificate, key)


def _issue(
    name: str,
    now: datetime,
    days: int,
    ca: _Pair | None = None,
    *extensions: x509.ExtensionType,
) -> _Pair:
    """Issue a certificate and its key; without `ca` it is a self-signed CA."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    until = now + timedelta(days=days)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if ca is None else ca.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(
            until if ca is None else min(until, ca.certificate.not_valid_after_utc)
        )
        .add_extension(
            x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
        )
        .add_extension(
            x509.BasicConstraints(ca=ca is None, path_length=0 if ca is None else None),
            critical=True,
        )
        .add_extension(_key_usage(signs_certificates=ca is None), critical=True)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return _Pair(builder.sign(key if ca is None else ca.key, SHA256()), key)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _authority(ca: _Pair) -> x509.AuthorityKeyIdentifier:
    try:
        own = ca.certificate.extensions.get_extension_for_class(
            x509.SubjectKeyIdentifier
        ).value
    except x509.ExtensionNotFound:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key())
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)


def _files(folder: Path, name: str) -> tuple[Path, Path]:
    """Paths of a certificate and its key. Names may contain dots, so no `with_suffix`."""
    return folder / f"{name}.pem", folder / f"{name}.key"


def _write(folder: Path, made: Mapping[str, _Pair]) -> list[Path]:
    """Write all files; remove those already written if one fails."""
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, pair in made.items():
            key = pair.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            texts = (
                (pair.certificate.public_bytes(Encoding.PEM), 0o644),
                (key, 0o600),
            )
            for file, (text, mode) in zip(_files(folder, name), texts, strict=True):
                # Exclusive: a new file or link of this name is not overwritten or followed.
                handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
                with os.fdopen(handle, "wb") as opened:
                    written.append(file)
                    opened.write(text)
    except OSError as error:
        for file in written:
            file.unlink(missing_ok=True)
        raise UserError(
            f"cannot create certificates in {folder}: "
            f"{error.filename or folder}: {error.strerror}"
        ) from None
    return written
