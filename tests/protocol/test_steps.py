"""Which w is the best, and where a run goes back to it: when nothing is finite or, where η
adapts, all got worse.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from fedbudget.budget.control import AdaptiveTau, Estimates, FixedTau, Reason
from fedbudget.budget.step_size import AutoStep
from fedbudget.protocol.aggregator import Aggregator, Outcome
from fedbudget.protocol.messages import Broadcast, Drift
from support.hand_made import ONE, ended, go_on, last, make, report, w_of


class TestBestW:
    def play(
        self, losses: Sequence[float], bests: Sequence[float] | None = None
    ) -> tuple[list[bool], Outcome]:
        """The w of round k+1 is (k, -k); returns what broadcasts say of the one before
        them, and the outcome.

        Without `bests`, F(w^f) is the lowest loss so far, as with whole shards.
        """
        bests = bests or [float(np.nanmin(losses[: max(1, k)])) for k in range(len(losses))]
        aggregator = make(controller=FixedTau(1), rounds=len(losses) - 1)
        broadcast: Broadcast | Outcome = aggregator.start()
        flags = []
        for k, (loss, best) in enumerate(zip(losses, bests, strict=True)):
            broadcast = go_on(broadcast)
            flags.append(broadcast.best)
            assert broadcast.w.tolist() == w_of(k).tolist()
            broadcast = aggregator.receive(report(broadcast, loss, w=k + 1, best=best), ONE)
        return flags, ended(broadcast)

    def test_is_the_w_of_the_lowest_loss_and_nodes_are_told_one_broadcast_later(
        self,
    ) -> None:
        flags, outcome = self.play([5, 3, 4, 2, 6])
        assert flags == [False, False, True, False, True]
        assert outcome.w.tolist() == w_of(3).tolist()

    def test_is_the_last_w_when_the_final_loss_is_the_lowest(self) -> None:
        assert self.play([5, 3, 4, 1])[1].w.tolist() == w_of(3).tolist()

    def test_is_the_first_w_when_no_other_is_better(self) -> None:
        flags, outcome = self.play([5, 5, 6, 7])
        assert not any(flags)
        assert outcome.w.tolist() == [0, 0]

    def test_is_compared_on_the_same_mini_batches(self) -> None:
        # On the third round's samples w^f has loss 9, so that w(2) with 4 is better,
        # although w(1) had 3.
        flags, outcome = self.play([5, 3, 4, 6], [5, 5, 9, 4])
        assert flags == [False, False, True, True]
        assert outcome.w.tolist() == w_of(2).tolist()

    def test_a_loss_that_is_no_number_is_never_the_best(self) -> None:
        assert self.play([5, 3, np.nan, np.inf])[1].w.tolist() == w_of(1).tolist()

    def test_the_record_has_both_losses_after_the_comparison(self) -> None:
        aggregator = make(controller=FixedTau(1))
        broadcast = aggregator.start()
        found = []
        for k, (loss, best) in enumerate([(5.0, 5.0), (3.0, 5.0), (4.0, 3.0)]):
            broadcast = go_on(
                aggregator.receive(report(broadcast, loss, w=k, best=best), ONE)
            )
            found.append((last(aggregator).loss, last(aggregator).best_loss))
        assert found == [(5, 5), (3, 3), (4, 3)]


class TestRecovery:
    def lost(self, aggregator: Aggregator, broadcast: Broadcast, loss: float) -> Broadcast:
        nothing = np.full((2, 2), np.nan, np.float32)
        return go_on(
            aggregator.receive(replace(report(broadcast, loss, best=5), w=nothing), ONE)
        )

    def test_goes_back_to_where_the_round_started_with_one_update(self) -> None:
        aggregator = make(1000)
        broadcast = go_on(aggregator.receive(report(aggregator.start(), 5, w=1), ONE))
        again = self.lost(aggregator, broadcast, loss=4)
        assert again.w.tolist() == w_of(1).tolist()
        assert (again.tau, last(aggregator).left_out) == (1, (0, 1))
        aggregator.receive(report(again, 4), ONE)
        assert last(aggregator).reason is Reason.RECOVERY

    def test_goes_further_back_when_the_loss_there_is_no_number(self) -> None:
        aggregator = make(1000)
        broadcast = go_on(aggregator.receive(report(aggregator.start(), 5, w=1), ONE))
        broadcast = go_on(aggregator.receive(report(broadcast, 4, w=2, best=5), ONE))
        again = self.lost(aggregator, broadcast, loss=np.inf)
        assert again.w.tolist() == w_of(1).tolist()

    def test_afterwards_the_controller_decides_again(self) -> None:
        aggregator = make(1000)
        again = self.lost(aggregator, aggregator.start(), loss=4)
        assert go_on(aggregator.receive(report(again, 4), ONE)).tau == 3

    def test_keeps_all_estimates(self) -> None:
        aggregator = make(1000, controller=AdaptiveTau())
        broadcast = go_on(aggregator.receive(report(aggregator.start(), 1), ONE))
        broadcast = go_on(
            aggregator.receive(report(broadcast, 1, estimates=(1.0, 2.0, 3.0)), ONE)
        )
        nothing = np.full((2, 2), np.inf, np.float32)
        aggregator.receive(
            replace(report(broadcast, 1, estimates=(4.0, 5.0, 6.0)), w=nothing), ONE
        )
        assert last(aggregator).kept == ("rho", "beta", "delta")
        assert last(aggregator).estimates == Estimates(1.0, 2.0, 3.0)

    def test_is_within_the_budget_too(self) -> None:
        aggregator = make(7.5)
        final = self.lost(aggregator, aggregator.start(), loss=4)
        assert (final.tau, final.stop) == (0, True)


class TestGoingAstray:
    """With a step size that adapts, a run goes back from losses that are far above the
    best.
    """

    def after(self, *losses: float, best: float = 1.0) -> tuple[Aggregator, Broadcast]:
        """Losses on samples on which w^f has loss 1, after a first round with loss 1."""
        aggregator = make(
            1000, step_size=AutoStep(), correct_drift=True, delta="parameters"
        )
        broadcast = aggregator.start()
        for k, loss in enumerate((1.0, *losses)):
            answer = report(broadcast, loss, w=k + 1, best=best)
            broadcast = go_on(
                aggregator.receive(
                    replace(answer, plain=np.ones(2), corrected=np.zeros(2)), ONE
                )
            )
        return aggregator, broadcast

    def test_tenfold_at_once(self) -> None:
        aggregator, broadcast = self.after(1.2, 16.0)
        assert broadcast.w.tolist() == [0, 0]
        assert (broadcast.tau, broadcast.eta) == (1, 0.001 / 4)
        assert broadcast.drift == Drift(correct=False, share=0.0)
        aggregator.receive(
            replace(report(broadcast, 1.0), plain=np.ones(2), corrected=np.zeros(2)), ONE
        )
        assert last(aggregator).reason is Reason.RECOVERY

    def test_by_half_twice_in_a_row(self) -> None:
        assert self.after(1.6)[1].w.tolist() == w_of(2).tolist()
        assert self.after(1.6, 1.2, 1.6)[1].w.tolist() == w_of(4).tolist()
        assert self.after(1.6, 1.6)[1].w.tolist() == [0, 0]

    def test_not_where_the_losses_are_all_next_to_nothing(self) -> None:
        assert self.after(0.09, 0.09, best=0.001)[1].w.tolist() == w_of(3).tolist()
        assert self.after(0.11, 0.11, best=0.001)[1].w.tolist() == [0, 0]

    def test_a_loss_that_is_no_number_is_far_above(self) -> None:
        assert self.after(np.nan)[1].w.tolist() == [0, 0]

    def test_with_a_fixed_step_size_the_run_goes_on(self) -> None:
        aggregator = make(1000)
        broadcast = aggregator.start()
        for k, loss in enumerate((1.0, 100.0, 100.0)):
            broadcast = go_on(
                aggregator.receive(report(broadcast, loss, w=k + 1, best=1.0), ONE)
            )
        assert broadcast.w.tolist() == w_of(3).tolist()


def test_the_step_size_sees_the_steepest_node_that_is_sane() -> None:
    aggregator = make(1000, step_size=AutoStep(kappa=1.0, start=0.01))
    broadcast = aggregator.start()
    assert broadcast.request.estimate
    assert broadcast.request.curvature
    broadcast = go_on(aggregator.receive(report(broadcast, 1.0), ONE))
    answer = replace(
        report(broadcast, 1.0, estimates=(1.0, 1.0, 1.0)), beta=np.array([np.inf, 40.0])
    )
    assert go_on(aggregator.receive(answer, ONE)).eta == pytest.approx(1 / 40)
