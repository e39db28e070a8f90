"""White-box attacks on private runs: a fast version of `benchmarks privacy --audit`."""

import math

import pytest
from benchmarks.privacy_audit import DELTA, PAIRS, attack

from fedbudget.arrays import Float64
from fedbudget.engines.noise import SecretNoise
from fedbudget.resources.privacy import rho_of


@pytest.mark.parametrize("kind", PAIRS)
def test_attack_reaches_claim_only(kind: str) -> None:
    """The best attack is as strong as the ledger predicts, and no stronger."""
    found = attack(kind, 8.0, 40)
    assert found.measured <= found.claimed + 4 * found.error
    assert found.measured >= found.claimed - 4 * found.error
    assert found.claimed == pytest.approx(math.sqrt(2 * rho_of(8.0, DELTA)), rel=1e-3)


def test_attack_finds_missing_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """With half of the noise, the attack refutes the claim."""
    draw = SecretNoise.draw

    def half(source: SecretNoise, round_: int, size: int) -> Float64:
        return draw(source, round_, size) / 2

    monkeypatch.setattr(SecretNoise, "draw", half)
    assert not attack("nodes", 8.0, 40).bounded
