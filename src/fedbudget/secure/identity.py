"""Who a node is to other nodes: what signs the key that it agrees on masks with, and who believes that.

An aggregator carries nodes' keys to each other, and could hand out keys of its own in their place. So a node signs its
key, for one run and with the time when it was made, and nodes believe

- a certificate of a CA that they trust, which is in the node's name; or, where they have none,
- an Ed25519 key: one that was given to them for that name beforehand, or else the first that they were shown.

A name keeps what it was first known by for the whole run, and a key that is older than the last of its name is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
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


def signed_key(identity: Identity, run: str, name: str, public: bytes, made: int) -> SignedKey:
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
            raise UntrustedKey(f"{key.name}'s key is older than the one that it had before: it is replayed")
        try:
            verify(key.signature, _said(run, key.name, key.public, key.made))
        except InvalidSignature:
            raise UntrustedKey(f"{key.name}'s key is not signed by {key.name}, or not for this run") from None
        self._seen[key.name] = key

    def _certified(self, key: SignedKey) -> x509.Certificate:
        """Of whoever signed, if it is one to trust, and in its name."""
        try:
            certificate = x509.load_der_x509_certificate(key.credential)
            names = {str(each.value) for each in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)}
            found = [each for each in certificate.extensions if isinstance(each.value, x509.SubjectAlternativeName)]
            names |= {name for each in found for name in each.value.get_values_for_type(x509.DNSName)}
        except ValueError:
            raise UntrustedKey(f"{key.name} has shown no certificate for its key, and all others have one") from None
        if not any(_issued(certificate, ca) for ca in self.authorities):
            raise UntrustedKey(f"{key.name}'s certificate is not of a CA that is trusted here")
        if not certificate.not_valid_before_utc <= datetime.now(UTC) <= certificate.not_valid_after_utc:
            raise UntrustedKey(f"{key.name}'s certificate is not valid now")
        if key.name not in names:
            raise UntrustedKey(f"{key.name} is not a name that the certificate of its key is for")
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
            return _of_public_key(ed25519.Ed25519PublicKey.from_public_bytes(key.credential))
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
    raise UntrustedKey("certificates must have keys of RSA, of an elliptic curve or of Ed25519")


def _issued(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _said(run: str, name: str, public: bytes, made: int) -> bytes:
    return msgspec.msgpack.encode((_CONTEXT, run, name, public, made))
