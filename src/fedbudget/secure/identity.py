"""Node identities: they sign the keys from which nodes derive their masks.

The aggregator relays keys between nodes and could substitute keys of its own. So each node
signs its key, for one run and with its creation time. Nodes accept

- a certificate in the node's name, issued by a CA that they trust; or, without a CA,
- an Ed25519 key: the one that was configured for that name, or else the first one seen.

A name keeps its first identity for the whole run, and an identity has one name: several
names in one certificate, or one key under two names, do not count as several nodes. A
certificate must be valid for client authentication. That of the aggregator is not, although
the same CA often issues it. A key older than the last accepted one of its name is refused
as a replay.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedbudget.errors import PublicReason, UserError
from fedbudget.secure.messages import SignedKey

_CONTEXT = "fedbudget: a key to mask with"
_ECDSA = ec.ECDSA(SHA256())
_PSS = padding.PSS(padding.MGF1(SHA256()), 32)

_CertifiedKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey
_PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey


class UntrustedKey(PublicReason):
    """A key that does not, or does not now, belong to the node of its name."""


class Identity(Protocol):
    """Signs in a node's name."""

    @property
    def credential(self) -> bytes:
        """The public part, by which others verify signatures."""

    def sign(self, data: bytes) -> bytes: ...


class KeyIdentity:
    """An Ed25519 key without a certificate.

    Args:
      key: generated if not given.
    """

    def __init__(self, key: ed25519.Ed25519PrivateKey | None = None) -> None:
        self._key = key or ed25519.Ed25519PrivateKey.generate()
        self.credential = self._key.public_key().public_bytes_raw()

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data)


class CertificateIdentity:
    """A certificate and its key."""

    def __init__(self, certificate: x509.Certificate, key: _CertifiedKey) -> None:
        self._key = key
        self.credential = certificate.public_bytes(Encoding.DER)

    def sign(self, data: bytes) -> bytes:
        if isinstance(self._key, ec.EllipticCurvePrivateKey):
            return self._key.sign(data, _ECDSA)
        if isinstance(self._key, rsa.RSAPrivateKey):
            return self._key.sign(data, _PSS, SHA256())
        return self._key.sign(data)


def signed_key(
    identity: Identity, run: str, name: str, public: bytes, made: int
) -> SignedKey:
    """Sign a node's key for one run.

    Args:
      public: the key to sign.
      made: its creation time, in any unit that grows.
    """
    signature = identity.sign(_signed_bytes(run, name, public, made))
    return SignedKey(name, public, made, identity.credential, signature)


@dataclass
class Trust:
    """Decides which keys are accepted.

    Args:
      authorities: CAs, one of which must have issued each certificate directly. Without
      any,
        Ed25519 keys are accepted.
      known: credentials by name; if None, the first credential of each name is accepted.
    """

    authorities: Sequence[x509.Certificate] = ()
    known: Mapping[str, bytes] | None = None
    _seen: dict[str, SignedKey] = field(default_factory=dict)
    _owners: dict[bytes, str] = field(default_factory=dict)  # name by public key

    def admit(self, run: str, key: SignedKey) -> None:
        """Accept a key for its name.

        Raises:
          UntrustedKey: the key must not be accepted.
        """
        before = self._seen.get(key.name)
        if before == key:
            return
        public = self._certified_key(key) if self.authorities else _shown_key(key)
        if not isinstance(public, _PublicKey):
            raise UntrustedKey("certificates need an RSA, elliptic-curve or Ed25519 key")
        described = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        if self.known is not None and self.known.get(key.name) != key.credential:
            raise UntrustedKey(f"{key.name}'s identity does not match the known one")
        owner = self._owners.get(described, key.name)
        if owner != key.name:
            raise UntrustedKey(f"{key.name} has the identity of {owner}")
        if before is not None:
            # A certificate may be renewed during a run; a bare key may not change.
            if not self.authorities and before.credential != key.credential:
                raise UntrustedKey(
                    f"{key.name} showed another identity earlier in this run; a node that "
                    "may be restarted needs --identity FILE or a certificate"
                )
            if key.made <= before.made:
                raise UntrustedKey(
                    f"{key.name}'s key is not newer than its last one: it is replayed"
                )
        try:
            _verify(
                public, key.signature, _signed_bytes(run, key.name, key.public, key.made)
            )
        except InvalidSignature:
            raise UntrustedKey(
                f"{key.name}'s key is not signed by {key.name}, or not for this run"
            ) from None
        self._seen[key.name] = key
        self._owners[described] = key.name

    def _certified_key(self, key: SignedKey) -> object:
        """Public key of the sender's certificate, if the certificate is trusted."""
        try:
            certificate = x509.load_der_x509_certificate(key.credential)
            name = _name(certificate)
            is_node = _is_node(certificate)
        except (ValueError, x509.DuplicateExtension):
            raise UntrustedKey(
                f"{key.name} has sent no certificate, and this run requires one"
            ) from None
        if not any(_issued(certificate, ca) for ca in self.authorities):
            raise UntrustedKey(f"{key.name}'s certificate is not from a trusted CA")
        begins = certificate.not_valid_before_utc
        ends = certificate.not_valid_after_utc
        if not begins <= datetime.now(UTC) <= ends:
            raise UntrustedKey(f"{key.name}'s certificate is not valid now")
        if key.name != name:
            raise UntrustedKey(f"{key.name} is not the name in its certificate: {name!r}")
        if not is_node:
            raise UntrustedKey(
                f"{key.name}'s certificate is not one of a node: it needs the extended key "
                "usage clientAuth, and must not be a CA"
            )
        return certificate.public_key()


def identity_of(cert: Path | None, key: Path | None, own: Path | None) -> Identity:
    """Load or create a node's identity.

    Args:
      cert, key: files of a certificate and its key.
      own: file of an Ed25519 key, for a node without a certificate; created if missing.
        With neither, the identity is a new key that ends with the process.
    """
    if cert is not None and key is not None:
        if own is not None:
            raise UserError(
                "`identity` is for nodes without a certificate; this one has `cert`"
            )
        private = _private_key(key)
        if not isinstance(private, _CertifiedKey):
            raise UserError(f"{key} must be an RSA, elliptic-curve or Ed25519 key")
        return CertificateIdentity(_certificates(cert)[0], private)
    if own is None:
        return KeyIdentity()
    if not own.exists():
        return KeyIdentity(_create_key(own))
    private = _private_key(own)
    if not isinstance(private, ed25519.Ed25519PrivateKey):
        raise UserError(
            f"{own} must be an Ed25519 key; name a file that does not exist to create one"
        )
    return KeyIdentity(private)


def trust_of(ca: Path | None, known: Path | None) -> Trust:
    """Load the trust of a node or an aggregator.

    Args:
      ca: file with the CA that issued the certificates of others.
      known: file with a line NAME KEY for each other node.
    """
    if ca is not None and known is not None:
        raise UserError(
            "`known_nodes` is for nodes without certificates; "
            "with a CA, certificates identify nodes"
        )
    if ca is not None:
        return Trust(_certificates(ca))
    return Trust(known=None if known is None else _known(known))


def _signed_bytes(run: str, name: str, public: bytes, made: int) -> bytes:
    return msgspec.msgpack.encode((_CONTEXT, run, name, public, made))


def _name(certificate: x509.Certificate) -> str:
    """The common name, or the only DNS name of a certificate without one."""
    names = [
        str(each.value)
        for each in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    ]
    if not names:
        for extension in certificate.extensions:
            if isinstance(extension.value, x509.SubjectAlternativeName):
                names += extension.value.get_values_for_type(x509.DNSName)
    return names[0] if len(names) == 1 else ""


def _is_node(certificate: x509.Certificate) -> bool:
    """Whether a certificate is for client authentication, and not that of a CA."""
    usages: list[x509.ObjectIdentifier] = []
    for extension in certificate.extensions:
        if isinstance(extension.value, x509.BasicConstraints) and extension.value.ca:
            return False
        if isinstance(extension.value, x509.ExtendedKeyUsage):
            usages += extension.value
    return ExtendedKeyUsageOID.CLIENT_AUTH in usages


def _issued(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _shown_key(key: SignedKey) -> object:
    """Public key of a credential that no CA vouches for: a bare key or a certificate."""
    try:
        return ed25519.Ed25519PublicKey.from_public_bytes(key.credential)
    except ValueError:
        pass
    try:
        return x509.load_der_x509_certificate(key.credential).public_key()
    except ValueError:
        raise UntrustedKey(f"{key.name} has shown no identity") from None


def _verify(public: _PublicKey, signature: bytes, data: bytes) -> None:
    """Raise InvalidSignature unless the key signed the data."""
    if isinstance(public, ed25519.Ed25519PublicKey):
        public.verify(signature, data)
    elif isinstance(public, ec.EllipticCurvePublicKey):
        public.verify(signature, data, _ECDSA)
    else:
        public.verify(signature, data, _PSS, SHA256())


def _create_key(path: Path) -> ed25519.Ed25519PrivateKey:
    key = ed25519.Ed25519PrivateKey.generate()
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"cannot create {path}: {error.strerror}") from None
    return key


def _private_key(path: Path) -> object:
    try:
        return load_pem_private_key(_read(path), None)
    except (ValueError, TypeError):
        raise UserError(
            f"{path} is not a private key in PEM format without a password"
        ) from None


def _certificates(path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(_read(path))
    except ValueError:
        raise UserError(f"{path} is not a certificate in PEM format") from None


def _known(path: Path) -> dict[str, bytes]:
    keys = {}
    for line in _read(path).decode("utf-8", "replace").splitlines():
        name, _, key = line.partition("#")[0].strip().partition(" ")
        if not name:
            continue
        try:
            keys[name] = bytes.fromhex(key.strip())
        except ValueError:
            keys[name] = b""
        if list(keys.values()).count(keys[name]) > 1 and keys[name]:
            raise UserError(f"{path} has the key of {name} for another node too")
        if len(keys[name]) != 32:
            raise UserError(
                f"{path} needs a line NAME KEY for each node, with the key that the node "
                f"prints at its start: not {line!r}"
            )
    return keys


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
