"""Keys that nodes believe, and keys that are replayed, forged or swapped."""

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


def refused(trust: Trust, key: SignedKey, reason: str, run: str = RUN) -> None:
    with pytest.raises(UntrustedKey, match=reason):
        trust.admit(run, key)


def test_a_key_is_believed_that_its_node_has_signed() -> None:
    trust, identity = Trust(), KeyIdentity()
    trust.admit(RUN, signed_key(identity, RUN, "node-1", PUBLIC, 1))
    trust.admit(
        RUN, signed_key(identity, RUN, "node-1", OTHER, 2)
    )  # it was started again, with its identity
    trust.admit(RUN, signed_key(KeyIdentity(), RUN, "node-2", PUBLIC, 1))


def test_a_forged_key_is_refused() -> None:
    key = signed_key(KeyIdentity(), RUN, "node-1", PUBLIC, 1)
    changes: list[dict[str, Any]] = [
        {"public": OTHER},
        {"name": "node-2"},
        {"made": 2},
        {"signature": bytes(64)},
        {"credential": KeyIdentity().credential},
    ]
    for change in changes:
        refused(Trust(), with_fields(key, **change), "is not signed by")
    refused(Trust(), with_fields(key, credential=b"nobody"), "has shown no identity")


def test_a_swapped_key_is_refused() -> None:
    """An aggregator that has a key of its own for a node: it would have to be there before
    the node was.
    """
    trust = Trust()
    trust.admit(RUN, signed_key(KeyIdentity(), RUN, "node-1", PUBLIC, 1))
    refused(trust, signed_key(KeyIdentity(), RUN, "node-1", OTHER, 2), "another identity")


def test_a_replayed_key_is_refused() -> None:
    identity, trust = KeyIdentity(), Trust()
    old = signed_key(identity, RUN, "node-1", PUBLIC, 1)
    refused(Trust(), old, "not for this run", run="the next run")
    trust.admit(RUN, signed_key(identity, RUN, "node-1", OTHER, 2))
    refused(trust, old, "replayed")


def test_known_identities_are_the_only_ones() -> None:
    known, stranger = KeyIdentity(), KeyIdentity()
    trust = Trust(known={"node-1": known.credential})
    trust.admit(RUN, signed_key(known, RUN, "node-1", PUBLIC, 1))
    refused(
        Trust(known=trust.known),
        signed_key(stranger, RUN, "node-1", PUBLIC, 1),
        "does not match the known one",
    )
    refused(
        trust, signed_key(known, RUN, "node-2", PUBLIC, 1), "does not match the known one"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With certificates of two CAs, both for node-1."""
    made = tmp_path_factory.mktemp("certificates")
    for ca in ("ours", "theirs"):
        certificates.make(made / ca, hosts=["localhost"], nodes=["node-1", "node-2"])
    return made


def certified(folder: Path, ca: str, name: str) -> CertificateIdentity:
    certificate = x509.load_pem_x509_certificate((folder / ca / f"{name}.pem").read_bytes())
    key: Any = load_pem_private_key((folder / ca / f"{name}.key").read_bytes(), None)
    return CertificateIdentity(certificate, key)


def trusting(folder: Path) -> Trust:
    return Trust(
        [x509.load_pem_x509_certificate((folder / "ours" / "ca.pem").read_bytes())]
    )


def test_certificates_sign_keys(folder: Path) -> None:
    trust = trusting(folder)
    key = signed_key(certified(folder, "ours", "node-1"), RUN, "node-1", PUBLIC, 1)
    trust.admit(RUN, key)
    Trust().admit(RUN, key)  # by who trusts no CA, as if it were a key
    refused(trusting(folder), with_fields(key, public=OTHER), "is not signed by")


def test_a_certificate_of_another_ca_or_name_is_refused(folder: Path) -> None:
    trust = trusting(folder)
    refused(
        trust,
        signed_key(certified(folder, "theirs", "node-1"), RUN, "node-1", PUBLIC, 1),
        "not from a trusted CA",
    )
    refused(
        trust,
        signed_key(certified(folder, "ours", "node-2"), RUN, "node-1", PUBLIC, 1),
        "not a name",
    )
    refused(trust, signed_key(KeyIdentity(), RUN, "node-1", PUBLIC, 1), "no certificate")
