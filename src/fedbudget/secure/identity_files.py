"""Identities from files: a certificate and its key, a key of one's own, and who else is known."""

import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from fedbudget.errors import UserError
from fedbudget.secure.identity import CertificateIdentity, Identity, KeyIdentity, Trust


def identity_of(cert: Path | None, key: Path | None, own: Path | None) -> Identity:
    """Who a node is: by its certificate where it has one, by a key in a file, or by one that ends with the process.

    Args:
      own: of an Ed25519 key; it is made where it is not there.
    """
    if cert is not None and key is not None:
        if own is not None:
            raise UserError("`identity` is for nodes without a certificate; this one has `cert`")
        private = _private_key(key)
        if not isinstance(private, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey):
            raise UserError(f"{key} must be a key of RSA, of an elliptic curve or of Ed25519")
        return CertificateIdentity(_certificates(cert)[0], private)
    if own is None:
        return KeyIdentity()
    if not own.exists():
        return KeyIdentity(_make(own))
    private = _private_key(own)
    if not isinstance(private, ed25519.Ed25519PrivateKey):
        raise UserError(f"{own} must be an Ed25519 key; one is made where there is no such file")
    return KeyIdentity(private)


def trust_of(ca: Path | None, known: Path | None) -> Trust:
    """Whom a node believes, or an aggregator.

    Args:
      ca: who must have signed others' certificates.
      known: a file with a line NAME KEY for each other node.
    """
    if ca is not None and known is not None:
        raise UserError("`known_nodes` is for nodes without certificates; those of a CA are known by it")
    if ca is not None:
        return Trust(_certificates(ca))
    return Trust(known=None if known is None else _known(known))


def _make(path: Path) -> ed25519.Ed25519PrivateKey:
    key = ed25519.Ed25519PrivateKey.generate()
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"{path} cannot be made: {error.strerror}") from None
    return key


def _private_key(path: Path) -> object:
    try:
        return load_pem_private_key(_read(path), None)
    except (ValueError, TypeError):
        raise UserError(f"{path} is not a private key in PEM format, without a password") from None


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
            raise UserError(f"{path} needs a line NAME KEY for each node, with a key as the node says it: not {line!r}")
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
