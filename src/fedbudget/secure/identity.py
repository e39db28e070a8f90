"""Who a node is to other nodes: what signs the key that it agrees on masks with, and who believes that.

An aggregator carries nodes' keys to each other, and could hand out keys of its own in their place. So a node signs its
key, for one run and with the time when it was made, and nodes believe

- a certificate of a CA that they trust, which is in the node's name; or, where they have none,
- an Ed25519 key: one that was given to them for that name beforehand, or else the first that they were shown.

A name keeps what it was first known by for the whole run, and a key that is older than the last of its name is refused.

Identities from files: a certificate and its key, a key of one's own, and who else is known.
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
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from fedbudget.errors import UserError
from fedbudget.secure.messages import SignedKey

_CONTEXT = "fedbudget: a key to mask with"


class UntrustedKey(UserError):
    """A key that is not, or not now, the one of the node whose name it bears."""


class Identity(Protocol):
    """Signs in a node's name."""

    @property
    def credential(self) -> bytes:
        """By which others know it."""

    def sign(self, data: bytes) -> bytes: ...


class KeyIdentity:
    """A key alone, known by its public part.

    Args:
      key: a new one when not given.
    """

    def __init__(self, key: ed25519.Ed25519PrivateKey | None = None) -> None:
        self._key = key or ed25519.Ed25519PrivateKey.generate()
        self.credential = self._key.public_key().public_bytes_raw()

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data)


class CertificateIdentity:
    """A certificate and its key."""

    def __init__(
        self,
        certificate: x509.Certificate,
        key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey,
    ) -> None:
        self._key = key
        self.credential = certificate.public_bytes(Encoding.DER)

    def sign(self, data: bytes) -> bytes:
        if isinstance(self._key, ec.EllipticCurvePrivateKey):
            return self._key.sign(data, ec.ECDSA(SHA256()))
        if isinstance(self._key, rsa.RSAPrivateKey):
            return self._key.sign(data, padding.PSS(padding.MGF1(SHA256()), 32), SHA256())
        return self._key.sign(data)


def signed_key(
    identity: Identity, run: str, name: str, public: bytes, made: int
) -> SignedKey:
    """A node's key of a run, with who says so.

    Args:
      made: when, in any unit that grows.
    """
    signature = identity.sign(_said(run, name, public, made))
    return SignedKey(name, public, made, identity.credential, signature)


@dataclass
class Trust:
    """Whom one believes.

    Args:
      authorities: CAs, one of which must have signed everyone's certificate itself; none where keys are believed.
      known: credentials by name, known beforehand; None where the first that is seen is believed.
    """

    authorities: Sequence[x509.Certificate] = ()
    known: Mapping[str, bytes] | None = None
    _seen: dict[str, SignedKey] = field(default_factory=dict)

    def admit(self, run: str, key: SignedKey) -> None:
        """Takes a key for that of its name from now on; raises `UntrustedKey` where it may not be."""
        before = self._seen.get(key.name)
        if before == key:
            return
        verify = _verifier(key, self._certified(key) if self.authorities else None)
        if self.known is not None and self.known.get(key.name) != key.credential:
            raise UntrustedKey(f"{key.name}'s identity is not the one that is known here")
        if before is not None and self._changed(before, key):
            raise UntrustedKey(
                f"{key.name} has shown another identity in this run before; a node that may be started again keeps its "
                "own with --identity FILE, or has a certificate"
            )
        if before is not None and key.made <= before.made:
            raise UntrustedKey(
                f"{key.name}'s key is older than the one that it had before: it is replayed"
            )
        try:
            verify(key.signature, _said(run, key.name, key.public, key.made))
        except InvalidSignature:
            raise UntrustedKey(
                f"{key.name}'s key is not signed by {key.name}, or not for this run"
            ) from None
        self._seen[key.name] = key

    def _certified(self, key: SignedKey) -> x509.Certificate:
        """Of whoever signed, if it is one to trust, and in its name."""
        try:
            certificate = x509.load_der_x509_certificate(key.credential)
            names = {
                str(each.value)
                for each in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
            }
            found = [
                each
                for each in certificate.extensions
                if isinstance(each.value, x509.SubjectAlternativeName)
            ]
            names |= {
                name
                for each in found
                for name in each.value.get_values_for_type(x509.DNSName)
            }
        except ValueError:
            raise UntrustedKey(
                f"{key.name} has shown no certificate for its key, and all others have one"
            ) from None
        if not any(_issued(certificate, ca) for ca in self.authorities):
            raise UntrustedKey(
                f"{key.name}'s certificate is not of a CA that is trusted here"
            )
        if (
            not certificate.not_valid_before_utc
            <= datetime.now(UTC)
            <= certificate.not_valid_after_utc
        ):
            raise UntrustedKey(f"{key.name}'s certificate is not valid now")
        if key.name not in names:
            raise UntrustedKey(
                f"{key.name} is not a name that the certificate of its key is for"
            )
        return certificate

    def _changed(self, before: SignedKey, key: SignedKey) -> bool:
        """Whether who bears a name is another; a certificate may be renewed."""
        return not self.authorities and before.credential != key.credential


class _Verify(Protocol):
    def __call__(self, signature: bytes, data: bytes, /) -> None: ...


def _verifier(key: SignedKey, certificate: x509.Certificate | None) -> _Verify:
    """What raises InvalidSignature where it is not by whom it should be."""
    if certificate is None:
        try:
            return _of_public_key(
                ed25519.Ed25519PublicKey.from_public_bytes(key.credential)
            )
        except ValueError:
            pass
        try:  # of one that has a certificate, and is known by it as others are by a key
            certificate = x509.load_der_x509_certificate(key.credential)
        except ValueError:
            raise UntrustedKey(f"{key.name} has shown no identity") from None
    return _of_public_key(certificate.public_key())


def _of_public_key(public: object) -> _Verify:
    if isinstance(public, ed25519.Ed25519PublicKey):
        return public.verify
    if isinstance(public, ec.EllipticCurvePublicKey):
        return lambda signature, data: public.verify(signature, data, ec.ECDSA(SHA256()))
    if isinstance(public, rsa.RSAPublicKey):
        pss = padding.PSS(padding.MGF1(SHA256()), 32)
        return lambda signature, data: public.verify(signature, data, pss, SHA256())
    raise UntrustedKey(
        "certificates must have keys of RSA, of an elliptic curve or of Ed25519"
    )


def _issued(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _said(run: str, name: str, public: bytes, made: int) -> bytes:
    return msgspec.msgpack.encode((_CONTEXT, run, name, public, made))


def identity_of(cert: Path | None, key: Path | None, own: Path | None) -> Identity:
    """Who a node is: by its certificate where it has one, by a key in a file, or by one that ends with the process.

    Args:
      own: of an Ed25519 key; it is made where it is not there.
    """
    if cert is not None and key is not None:
        if own is not None:
            raise UserError(
                "`identity` is for nodes without a certificate; this one has `cert`"
            )
        private = _private_key(key)
        if not isinstance(
            private,
            ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey,
        ):
            raise UserError(
                f"{key} must be a key of RSA, of an elliptic curve or of Ed25519"
            )
        return CertificateIdentity(_certificates(cert)[0], private)
    if own is None:
        return KeyIdentity()
    if not own.exists():
        return KeyIdentity(_make(own))
    private = _private_key(own)
    if not isinstance(private, ed25519.Ed25519PrivateKey):
        raise UserError(
            f"{own} must be an Ed25519 key; one is made where there is no such file"
        )
    return KeyIdentity(private)


def trust_of(ca: Path | None, known: Path | None) -> Trust:
    """Whom a node believes, or an aggregator.

    Args:
      ca: who must have signed others' certificates.
      known: a file with a line NAME KEY for each other node.
    """
    if ca is not None and known is not None:
        raise UserError(
            "`known_nodes` is for nodes without certificates; those of a CA are known by it"
        )
    if ca is not None:
        return Trust(_certificates(ca))
    return Trust(known=None if known is None else _known(known))


def _make(path: Path) -> ed25519.Ed25519PrivateKey:
    key = ed25519.Ed25519PrivateKey.generate()
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        with os.fdopen(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
        ) as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"{path} cannot be made: {error.strerror}") from None
    return key


def _private_key(path: Path) -> object:
    try:
        return load_pem_private_key(_read(path), None)
    except (ValueError, TypeError):
        raise UserError(
            f"{path} is not a private key in PEM format, without a password"
        ) from None


def _certificates(path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(_read(path))
    except ValueError:
        raise UserError(f"{path} is not a certificate in PEM format") from None


def _known(path: Path) -> dict[str, bytes]:
    found = {}
    for line in _read(path).decode("utf-8", "replace").splitlines():
        name, _, key = line.partition("#")[0].strip().partition(" ")
        if not name:
            continue
        try:
            found[name] = bytes.fromhex(key.strip())
        except ValueError:
            found[name] = b""
        if len(found[name]) != 32:
            raise UserError(
                f"{path} needs a line NAME KEY for each node, with a key as the node says it: not {line!r}"
            )
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
