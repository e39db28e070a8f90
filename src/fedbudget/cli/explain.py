"""`fedbudget explain`."""

import json as jsonlib
from typing import TYPE_CHECKING, Annotated

import typer

from fedbudget.cli import options as o

if TYPE_CHECKING:
    from fedbudget.runs.explain import Explanation

_BARS, _WIDTH = 20, 50


def explain(
    run: o.RunFolder,
    number: Annotated[int, typer.Option("--round", help="Which round's choice to explain.")],
    json: o.Json = False,
) -> None:
    """Show the G(τ) curve of a round, and why its τ was chosen.

    Examples:

      fedbudget explain runs/NAME --round 12
    """
    from fedbudget.runs.explain import explain as find
    from fedbudget.runs.folder import Run

    found = find(Run.open(run), number)
    if json:
        curve = [{"tau": int(t), "G": float(g)} for t, g in zip(found.candidates, found.curve, strict=True)]
        about = {"round": number, "tau": found.tau, "eta": found.eta, "corrected": found.corrected}
        print(jsonlib.dumps({**about, "reason": found.reason, "curve": curve}))
        return
    print(f"round {number}: τ = {found.tau}, chosen by {found.reason}: {found.words}.")
    print(f"η = {found.eta:.4g}; local updates were {'' if found.corrected else 'not '}corrected for drift")
    if found.estimates is not None:
        estimates = found.estimates
        print(f"ρ̂ = {estimates.rho:.4g}, β̂ = {estimates.beta:.4g}, δ̂ = {estimates.delta:.4g}")
        print()
        print("\n".join(_chart(found)))


def _chart(found: "Explanation") -> list[str]:
    """The curve as bars, thinned, always with the chosen τ; a longer bar is a worse bound on the loss."""
    import numpy as np

    finite = found.curve[np.isfinite(found.curve)]
    if not len(finite):
        return ["G is not finite at any τ"]
    low, high = float(finite.min()), float(finite.max())
    spaced = np.unique(np.geomspace(1, len(found.candidates), _BARS).round().astype(int))
    lines = ["   τ  G(τ)"]
    for tau in sorted({*spaced.tolist(), *({found.tau} & set(found.candidates.tolist())), found.minimum or 1}):
        value = float(found.curve[tau - 1])
        share = (value - low) / (high - low) if high > low else 0.0
        bar = "█" * (1 + round(share * (_WIDTH - 1))) if np.isfinite(value) else "∞"
        marks = [text for text, here in (("smallest", tau == found.minimum), ("chosen", tau == found.tau)) if here]
        lines.append(f"{tau:4d}  {value:<10.5g} {bar} {' and '.join(marks)}".rstrip())
    return lines
