"""Held-out quality of models in a natural federation, site by site.

Each seed draws the rows that a site holds out for testing (a fifth). Nothing is trained or
chosen on them. A score is the accuracy for classes. For real targets it is R² against the
variance of all test rows of the federation, also at a site, so that the mean over sites,
weighted by rows, is the R² of all rows.

`measure` runs one cell. The settings of the default yield four models at once:

- `default`: the result of the run, the same model for all sites;
- `personal`: the default, corrected by each site (protocol/personal.py);
- `alone`: the same model, trained by each site on its own rows;
- `pooled`: the same model, trained on the rows of all sites in one place.

`alone` and `pooled` have the penalty with the lowest loss in five folds. Other settings
yield one model. Its validation loss is that of the rows which the sites of the default hold
out as well, because both have the same seed.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from fedbudget.arrays import Float64, Int64
from fedbudget.data import natural
from fedbudget.data.dataset import Dataset, Part
from fedbudget.data.shards import Shards
from fedbudget.evaluation.metrics import RowScores
from fedbudget.experiments.cells import Columns, one_thread
from fedbudget.launch.execute import execute
from fedbudget.launch.prepared import Overrides
from fedbudget.launch.simulate import SimulatedRun, simulate
from fedbudget.protocol.personal import alone
from fedbudget.settings.settings import Settings
from fedbudget.trained.model import TrainedModel

MOST_ROWS = 2500
"""Rows of a site, training and test together. Each seed draws them."""

FEWER_ROWS = {"shakespeare": 200}
"""The same, for a federation with 99 sites and 33,865 parameters."""

MODELS = ("default", "personal", "alone", "pooled")


@dataclass(frozen=True)
class SplitFederation:
    """The samples of a federation with the test rows of one seed.

    Args:
      dataset: all samples, site by site.
      tests: test rows of each site.
    """

    dataset: Dataset
    tests: tuple[Part, ...]

    def scores(self, models: list[TrainedModel]) -> list[float | None]:
        """Return the score of each site's model on its test rows, None without rows."""
        squares = self._squares(models[0])
        scores: list[float | None] = []
        for model, part in zip(models, self.tests, strict=True):
            if not len(part):
                scores.append(None)
                continue
            table = model.samples.table(part, model.model.target)
            rows = RowScores.of(model.model, model.w, table)
            mean = float(rows.values.mean())
            scores.append(mean if rows.metric == "accuracy" else 1 - mean / squares)
        return scores

    def _squares(self, model: TrainedModel) -> float:
        """Return the variance of the targets of all test rows, in the model's unit."""
        everything = Part.join(self.tests)
        y = model.samples.table(everything, model.model.target).y
        return float(np.var(np.asarray(y, np.float64)))


@lru_cache(maxsize=1)
def load(name: str, data_dir: str | None, seed: int) -> SplitFederation:
    """Load a federation with the test rows of a seed.

    Args:
      name: of a natural federation.
      data_dir: the data folder to search first.
      seed: draws the test rows.
    """
    folder = None if data_dir is None else Path(data_dir)
    dataset = natural.load(name, folder, seed=seed)
    assert dataset.test is not None
    rng = np.random.default_rng([seed, 102])
    total = np.add(dataset.files, dataset.test_files)
    share = np.minimum(1.0, FEWER_ROWS.get(name, MOST_ROWS) / total)
    kept = _drawn(np.array(dataset.files), share, rng)
    tested = _drawn(np.array(dataset.test_files), share, rng)
    tests = tuple(dataset.test.rows(rows) for rows in tested)
    limited = replace(
        dataset,
        train=dataset.train.rows(np.concatenate(kept)),
        test=Part.join(tests),
        files=tuple(map(len, kept)),
        test_files=tuple(map(len, tests)),
    )
    return SplitFederation(limited, tests)


def _drawn(sizes: Int64, share: Float64, rng: np.random.Generator) -> list[Int64]:
    """Return the rows of each site, a share of them, in order."""
    starts = np.cumsum(sizes) - sizes
    counts = np.minimum(sizes, np.rint(sizes * share).astype(np.int64))
    return [
        start + np.sort(rng.choice(size, count, replace=False))
        for start, size, count in zip(starts, sizes, counts, strict=True)
    ]


def measure(settings: Settings) -> Columns:
    """Run one cell; return a row per model and site."""
    federation = load(settings.dataset, settings.data_dir, settings.seed)
    sites = federation.dataset.sites
    with one_thread():
        run = simulate(settings, Overrides(dataset=federation.dataset))
        result = execute(run).uninterrupted()
        models = {"tuned": [result.model] * len(sites)}
        if settings.personal:
            models = {
                "default": [result.model] * len(sites),
                "personal": [result.personal[name] for name in sites],
                "alone": _alone(run, result.model),
                "pooled": [_pooled(run, result.model)] * len(sites),
            }
        scores = {name: federation.scores(each) for name, each in models.items()}
    rows = [len(part) for part in federation.tests]
    return {
        "model": [name for name in scores for _ in sites],
        "site": [*sites] * len(scores),
        "rows": rows * len(scores),
        "score": [score for each in scores.values() for score in each],
        "validation": [result.validation_loss] * len(sites) * len(scores),
    }


def _alone(run: SimulatedRun, trained: TrainedModel) -> list[TrainedModel]:
    fits = alone(run.model, run.shards, run.settings.seed)
    return [trained.corrected(*fit) for fit in fits]


def _pooled(run: SimulatedRun, trained: TrainedModel) -> TrainedModel:
    assert run.train is not None
    everything = np.arange(len(run.train), dtype=np.int32)
    shards = Shards.of(run.train, [everything])
    (fit,) = alone(run.model, shards, run.settings.seed)
    return trained.corrected(*fit)
