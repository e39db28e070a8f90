"""W1 with pfl-research: its simulated backend, FedAvg, and a numpy model."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.base import StatefulModel
from pfl.stats import MappedVectorStatistics

from benchmarks.peer_apps.common import Work, descend, main


class SquaredSvm(StatefulModel):
    """Squared SVM whose parameters are one vector."""

    def __init__(self, features: int) -> None:
        self.w = np.zeros(features, np.float32)

    def get_parameters(self, placeholders: Any = None) -> Any:
        return MappedVectorStatistics({"w": self.w.copy()})

    def set_parameters(self, w: Any) -> None:
        self.w = w["w"].copy()

    def get_model_difference(self, other_parameters: Any, clone: bool = False) -> Any:
        return MappedVectorStatistics({"w": self.w - other_parameters["w"]})

    def apply_model_update(self, statistics: Any) -> Any:
        self.w = (self.w + statistics["w"]).astype(np.float32)
        return self, Metrics()

    def evaluate(
        self, dataset: Any, name_formatting_fn: Any = None, eval_params: Any = None
    ) -> Any:
        return Metrics()

    def save(self, dir_path: str) -> None:
        raise NotImplementedError("rounds are timed, and nothing is kept")

    def load(self, dir_path: str) -> None:
        raise NotImplementedError("rounds are timed, and nothing is kept")


def run(work: Work, report: Callable[[Any], None]) -> None:
    class Averaging(FederatedAveraging):
        def train_one_user(
            self,
            initial_model_state: Any,
            model: Any,
            user_dataset: Any,
            central_context: Any,
        ) -> Any:
            batches = work.batches[
                central_context.current_central_iteration, int(user_dataset.user_id)
            ]
            x, y = user_dataset.raw_data
            model.w = descend(model.w, x, y, batches)
            statistics = model.get_model_difference(initial_model_state)
            statistics.reweight(len(y))
            return statistics, Metrics()

    class Reporter(TrainingProcessCallback):
        def after_central_iteration(
            self, aggregate_metrics: Any, model: Any, *, central_iteration: int
        ) -> Any:
            report(model.w)
            return False, Metrics()

    users = [
        Dataset([work.x[node], work.y[node]], user_id=str(node))
        for node in range(work.nodes)
    ]
    turns = cycle(range(work.nodes))
    dataset = FederatedDataset(lambda node: users[node], lambda: next(turns))
    Averaging().run(
        NNAlgorithmParams(
            central_num_iterations=work.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=work.nodes,
            val_cohort_size=None,
        ),
        SimulatedBackend(dataset, dataset),
        SquaredSvm(work.x[0].shape[1]),
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=0.01, local_batch_size=100
        ),
        callbacks=[Reporter()],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main(run)
