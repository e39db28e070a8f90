"""Signed keys that nodes admit, and keys that are replayed, forged or swapped."""

from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fedbudget.engines.grpc import certificates
from fedbudget.secure.identity import (
    CertificateIdentity,
    KeyIdentity,
    Trust,
    UntrustedKey,
    signed_key,
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
        "not a name",
    )
    assert_refused(
        trust, signed_key(KeyIdentity(), RUN, "node-1", PUBLIC, 1), "no certificate"
    )
