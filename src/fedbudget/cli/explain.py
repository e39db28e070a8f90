"""`fedbudget explain`."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbudget.cli.command import command
from fedbudget.cli.options import RUN, OutputOptions
from fedbudget.option import REQUIRED, option

if TYPE_CHECKING:
    from fedbudget.runs.explain import Explanation

_BARS, _WIDTH = 20, 50


@command
def explain(
    *, run: Path = RUN, round: int = option(REQUIRED, "Which round's choice to explain."), output: OutputOptions
) -> None:
    """Show the G(τ) curve of a round, and why its τ was chosen.

    Examples:

      fedbudget explain runs/NAME --round 12
    """
    from fedbudget.launch.method import build_method
    from fedbudget.runs.explain import explain as recompute
    from fedbudget.runs.folder import Run

    opened = Run.open(run)
    explanation = recompute(opened, round, build_method(opened.settings).controller)
    if output.json:
        curve = [{"tau": int(t), "G": float(g)} for t, g in zip(explanation.candidates, explanation.curve, strict=True)]
        about = {"round": round, "tau": explanation.tau, "eta": explanation.eta, "corrected": explanation.corrected}
        work = {} if explanation.work is None else {"work": explanation.work}
        print(json.dumps({**about, "reason": explanation.reason, "curve": curve, **work}))
        return
    print(f"round {round}: τ = {explanation.tau}, chosen by {explanation.reason}: {explanation.sentence}.")
    eta = f"η = {explanation.eta:.4g}" if explanation.eta else "η is each node's own, and not told"
    print(f"{eta}; local updates were {'' if explanation.corrected else 'not '}corrected for drift")
    if explanation.work is not None:
        print(f"{explanation.shared}.")
        print("\n".join(work_table(explanation.work)))
    if explanation.estimates is not None:
        estimates = explanation.estimates
        print(f"ρ̂ = {estimates.rho:.4g}, β̂ = {estimates.beta:.4g}, δ̂ = {estimates.delta:.4g}")
        print()
        print("\n".join(chart(explanation)))


def work_table(work: dict[str, Any]) -> list[str]:
    """Every node's updates, and how long it waited; nothing where there are too many."""
    if not work["node"]:
        return []
    rows = zip(work["node"], work["updates"], work["idle"], work["idle_equal"], strict=True)
    return [
        "node  updates  waited  with the same τ",
        *(f"{node:4d}  {updates:7d}  {idle:6.0%}  {equal:15.0%}" for node, updates, idle, equal in rows),
    ]


def chart(explanation: "Explanation") -> list[str]:
    """The curve as bars, thinned, always with the chosen τ; a longer bar is a worse bound on the loss.

    G grows by many powers of ten beyond its minimum, and what matters is near it. The root of log(G / smallest G) shows
    both: around the minimum it grows by steps of τ, further on with the number of powers of ten.
    """
    import numpy as np

    finite = explanation.curve[np.isfinite(explanation.curve)]
    if not len(finite):
        return ["G is not finite at any τ"]
    low = float(finite.min())
    longest = _length(float(finite.max()), low)
    spaced = np.unique(np.geomspace(1, len(explanation.candidates), _BARS).round().astype(int))
    lines = ["   τ  G(τ)       bars: √ of log(G / smallest G)"]
    special = {"smallest": explanation.minimum or 1, "chosen": explanation.tau}
    for tau in sorted({*spaced.tolist(), *special.values()} & set(explanation.candidates.tolist())):
        value = float(explanation.curve[tau - 1])
        share = _length(value, low) / longest if longest > 0 and np.isfinite(value) else 0.0
        bar = "█" * (1 + round(share * (_WIDTH - 1))) if np.isfinite(value) else "∞"
        marks = [mark for mark, of in special.items() if of == tau]
        lines.append(f"{tau:4d}  {value:<10.5g} {bar} {' and '.join(marks)}".rstrip())
    return lines


def _length(value: float, low: float) -> float:
    return math.sqrt(math.log(value) - math.log(low)) if low > 0 else value - low
