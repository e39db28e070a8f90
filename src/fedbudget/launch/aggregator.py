"""The aggregator of a run, with a ledger opened, so that a budget which cannot work is refused before it starts."""

from fedbudget.arrays import Float32
from fedbudget.launch.method import Method
from fedbudget.meters.meter import Meters, RoundTrip
from fedbudget.protocol.aggregator import Aggregator, Quantize
from fedbudget.protocol.memory import Memory
from fedbudget.protocol.messages import Broadcast, Drift


def build_aggregator(
    method: Method,
    meters: Meters,
    start: tuple[Float32, RoundTrip] | Memory,
    *,
    rounds: int | None,
    quantize: Quantize | None = None,
) -> Aggregator:
    """The aggregator of a run.

    Args:
      start: w(0), [parameters], and a trial round; or the state of the run's aggregator before this one.
      rounds: the most rounds to make, besides the budget.
      quantize: what nodes will hold of a new w; the w itself when left out.
    """
    common = {
        "budget": meters.budget,
        "controller": method.controller,
        "step_size": method.step_size,
        "rounds": rounds,
        "correct_drift": method.correct_drift,
        "delta": method.delta,
        "quantize": quantize,
    }
    if isinstance(start, Memory):
        return Aggregator.recall(start, **common)  # type: ignore[arg-type]
    w, trial = start
    return Aggregator(w, expected=meters.expect(trial), **common)  # type: ignore[arg-type]


def trial_broadcast(method: Method, w: Float32) -> Broadcast:
    """What a trial round begins with: what the run's first broadcast says."""
    controller, step_size = method.controller, method.step_size
    return Broadcast(
        round=1,
        w=w,
        tau=1,
        eta=step_size.first().eta,
        estimate=controller.estimates or step_size.adapts,
        best=False,
        stop=False,
        gradient=method.delta == "gradient",
        curvature=step_size.adapts,
        drift=Drift(correct=True, share=1.0) if method.correct_drift else None,
    )
