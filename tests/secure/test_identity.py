"""Signed keys that nodes admit, and keys that are replayed, forged or swapped."""

from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedbudget.engines.grpc import certificates
from fedbudget.errors import UserError
from fedbudget.secure.identity import (
    CertificateIdentity,
    KeyIdentity,
    Trust,
    UntrustedKey,
    signed_key,
    trust_of,
)
from fedbudget.secure.messages import SignedKey
from support.masking import RUN

PUBLIC, OTHER = b"p" * 32, b"o" * 32


def with_fields(key: SignedKey, **other: Any) -> SignedKey:
    fields = {
        name: getattr(key, name)
        for name in ("name", "public", "made", "credential", "signature")
    }
    return SignedKey(**{**fields, **other})


def assert_refused(trust: Trust, key: SignedKey, reason: str, run: str = RUN) -> None:
    with pytest.raises(UntrustedKey, match=reason):
        trust.admit(run, key)


def test_signed_keys_are_admitted() -> None:
    trust = Trust()
    identity = KeyIdentity()
    trust.admit(RUN, signed_key(identity, RUN, "node-1", PUBLIC, 1))
    # The node restarts with the same identity.
    trust.admit(RUN, signed_key(identity, RUN, "node-1", OTHER, 2))
    trust.admit(RUN, signed_key(KeyIdentity(), RUN, "node-2", PUBLIC, 1))


def test_forged_keys_are_refused() -> None:
    key = signed_key(KeyIdentity(), RUN, "node-1", PUBLIC, 1)
    changes: list[dict[str, Any]] = [
        {"public": OTHER},
        {"name": "node-2"},
        {"made": 2},
        {"signature": bytes(64)},
        {"credential": KeyIdentity().credential},
    ]
    for change in changes:
        assert_refused(Trust(), with_fields(key, **change), "is not signed by")
    assert_refused(Trust(), with_fields(key, credential=b"none"), "has shown no identity")


def test_swapped_key_is_refused() -> None:
    """An aggregator cannot replace the key of a node that is already admitted."""
    trust = Trust()
    trust.admit(RUN, signed_key(KeyIdentity(), RUN, "node-1", PUBLIC, 1))
    assert_refused(
        trust, signed_key(KeyIdentity(), RUN, "node-1", OTHER, 2), "another identity"
    )


def test_replayed_keys_are_refused() -> None:
    identity, trust = KeyIdentity(), Trust()
    old = signed_key(identity, RUN, "node-1", PUBLIC, 1)
    assert_refused(Trust(), old, "not for this run", run="the next run")
    trust.admit(RUN, signed_key(identity, RUN, "node-1", OTHER, 2))
    assert_refused(trust, old, "replayed")


def test_unknown_identities_are_refused() -> None:
    known, stranger = KeyIdentity(), KeyIdentity()
    trust = Trust(known={"node-1": known.credential})
    trust.admit(RUN, signed_key(known, RUN, "node-1", PUBLIC, 1))
    assert_refused(
        Trust(known=trust.known),
        signed_key(stranger, RUN, "node-1", PUBLIC, 1),
        "does not match the known one",
    )
    assert_refused(
        trust, signed_key(known, RUN, "node-2", PUBLIC, 1), "does not match the known one"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with certificates of two CAs, both for node-1."""
    folder = tmp_path_factory.mktemp("certificates")
    for ca in ("ours", "theirs"):
        certificates.make(folder / ca, hosts=["localhost"], nodes=["node-1", "node-2"])
    return folder


def certificate_identity(folder: Path, ca: str, name: str) -> CertificateIdentity:
    certificate = x509.load_pem_x509_certificate((folder / ca / f"{name}.pem").read_bytes())
    key: Any = load_pem_private_key((folder / ca / f"{name}.key").read_bytes(), None)
    return CertificateIdentity(certificate, key)


def trust_in(folder: Path) -> Trust:
    return Trust(
        [x509.load_pem_x509_certificate((folder / "ours" / "ca.pem").read_bytes())]
    )


def test_certificates_sign_keys(folder: Path) -> None:
    trust = trust_in(folder)
    key = signed_key(
        certificate_identity(folder, "ours", "node-1"), RUN, "node-1", PUBLIC, 1
    )
    trust.admit(RUN, key)
    Trust().admit(RUN, key)  # without a trusted CA, it counts as a key
    assert_refused(trust_in(folder), with_fields(key, public=OTHER), "is not signed by")


def test_wrong_certificates_are_refused(folder: Path) -> None:
    trust = trust_in(folder)
    assert_refused(
        trust,
        signed_key(
            certificate_identity(folder, "theirs", "node-1"), RUN, "node-1", PUBLIC, 1
        ),
        "not from a trusted CA",
    )
    assert_refused(
        trust,
        signed_key(
            certificate_identity(folder, "ours", "node-2"), RUN, "node-1", PUBLIC, 1
        ),
        "not the name",
    )
    assert_refused(
        trust, signed_key(KeyIdentity(), RUN, "node-1", PUBLIC, 1), "no certificate"
    )


def issued(
    folder: Path,
    name: str,
    alternatives: list[str],
    usage: x509.ObjectIdentifier | None = ExtendedKeyUsageOID.CLIENT_AUTH,
) -> CertificateIdentity:
    """A certificate of our CA; without a common name if `name` is empty."""
    ca = x509.load_pem_x509_certificate((folder / "ours" / "ca.pem").read_bytes())
    ca_key: Any = load_pem_private_key((folder / "ours" / "ca.key").read_bytes(), None)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = [x509.NameAttribute(NameOID.COMMON_NAME, name)] if name else []
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name(subject))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(ca.not_valid_before_utc)
        .not_valid_after(ca.not_valid_after_utc)
    )
    if alternatives:
        names = x509.SubjectAlternativeName([x509.DNSName(each) for each in alternatives])
        builder = builder.add_extension(names, critical=False)
    if usage is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    return CertificateIdentity(builder.sign(ca_key, SHA256()), key)


def test_aggregator_is_no_node(folder: Path) -> None:
    """Its certificate comes from the CA of the nodes, but is for servers."""
    identity = certificate_identity(folder, "ours", "aggregator")
    for name in ("aggregator", "localhost"):
        with pytest.raises(UntrustedKey):
            trust_in(folder).admit(RUN, signed_key(identity, RUN, name, PUBLIC, 1))
    with pytest.raises(UntrustedKey, match="not one of a node"):
        trust_in(folder).admit(
            RUN, signed_key(issued(folder, "n", [], None), RUN, "n", PUBLIC, 1)
        )
    server = issued(folder, "n", [], ExtendedKeyUsageOID.SERVER_AUTH)
    assert_refused(
        trust_in(folder), signed_key(server, RUN, "n", PUBLIC, 1), "not one of a node"
    )
    ca = certificate_identity(folder, "ours", "ca")
    assert_refused(
        trust_in(folder),
        signed_key(ca, RUN, "fedbudget CA", PUBLIC, 1),
        "not one of a node",
    )


def test_certificate_is_one_node(folder: Path) -> None:
    identity = issued(folder, "a", ["a", "b", "c"])
    trust = trust_in(folder)
    trust.admit(RUN, signed_key(identity, RUN, "a", PUBLIC, 1))
    for name in ("b", "c"):
        assert_refused(trust, signed_key(identity, RUN, name, OTHER, 2), "not the name")
    unnamed = issued(folder, "", ["a", "b"])
    assert_refused(
        trust_in(folder), signed_key(unnamed, RUN, "a", PUBLIC, 1), "not the name"
    )
    trust_in(folder).admit(RUN, signed_key(issued(folder, "", ["d"]), RUN, "d", PUBLIC, 1))


def test_key_is_one_node(tmp_path: Path) -> None:
    identity = KeyIdentity()
    trust = Trust()
    trust.admit(RUN, signed_key(identity, RUN, "node-1", PUBLIC, 1))
    assert_refused(
        trust,
        signed_key(identity, RUN, "node-2", OTHER, 2),
        "node-2 has the identity of node-1",
    )
    file = tmp_path / "known"
    file.write_text(f"n1 {'ab' * 32}\nn2 {'ab' * 32}\n")
    with pytest.raises(UserError, match="has the key of n2 for another node too"):
        trust_of(None, file)
