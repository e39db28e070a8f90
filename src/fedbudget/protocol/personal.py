"""Personal models: each node corrects the final model on its own rows.

After the last round, every node receives the result w of the run. It fits candidates on its
own rows, in the coordinates of site_frames.py:

    w itself
    corrected:  argmin F_i(v) + λ/(2n) ‖v - w‖²       for λ in `STRENGTHS`, and infinity
    alone:      argmin F_i(v) + λ/(2n) ‖v - w(0)‖²    for λ in `STRENGTHS`

with n rows and F_i the mean loss. λ is in units of the sum of losses, so a node with more
rows moves further from w. It is `FREE` for intercepts, so that a node whose outcome is more
frequent than elsewhere need not change the effects of features; with λ of infinity only
intercepts change. Models without known intercepts have no such candidate.

The node measures each candidate on rows that it was not fitted to, in `FOLDS` folds of all
its rows. It fits once and measures on the rows that it held out of the training if it has
at least `MANY_ROWS` rows, a large model or a network.

**Votes.** Each node reports by how much the sum of losses of each candidate is below that
of w. The aggregator estimates how often each candidate is the best of a node, by
expectation maximisation: with e_ij = exp(vote j of node i), it repeats

    π_j ∝ prior_j + Σ_i π_j e_ij / Σ_k π_k e_ik

where `default_prior` counts as much as one node. So a node with few rows learns from the
others how different nodes of this federation are (empirical Bayes). No node has more
influence than 1/(nodes + 1), whatever it reports.

**Choice.** The personal model is the mean of the candidates, weighted by pseudo-BMA+ (Yao
et al., Bayesian Analysis 13, 2018): weight j is the mean of softmax(ln π_j - sum of losses
of j) over `DRAWS` random weightings of the rows (Bayesian bootstrap). The loss of a linear
model is convex in the parameters, and its mean includes the candidates `alone`. For other
models, parameters from another start cannot be averaged: `alone` is chosen if it has most
of the weight, and the mean is over the rest otherwise.

A node keeps w if it has fewer than `FEWEST_ROWS` rows or rows of one class only.

**Figures.** All figures of a node are on the same rows: those that it held out of the
training, or all its rows if it held out none. Then w has been trained on them, and its
figure is too good. The personal figure uses candidates and weights that come from the other
rows; only π, an estimate from all nodes, contains these.

Nothing is sent but votes and figures, and a node may refuse to send them. A node with fewer
than `FEWEST_ROWS` rows has none, because they would reveal too much of each row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedbudget.arrays import Flags, Float32, Float64, Int32, Int64
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards, Table
from fedbudget.evaluation.metrics import RowScores
from fedbudget.models.base import Model
from fedbudget.models.minimise import minimise
from fedbudget.protocol.messages import VOTES, PeerError, VoteReport, VoteRound
from fedbudget.protocol.site_figures import (
    Kept,
    SiteFigures,
    difference_of,
    figure_of,
    trivial_scores,
)
from fedbudget.protocol.site_frames import SiteFrame, frame_of
from fedbudget.randomness import Stream, generator

STRENGTHS = (1.0, 10.0, 100.0, 1000.0)
FREE = 1.0
FOLDS = 5
DRAWS = 200
PRIOR = 0.8
"""Default prior of w."""

FEWEST_ROWS = 10
MANY_ROWS = 3000
LARGE = 20_000_000
"""Rows times parameters of a node that fits once, without folds."""

BLOCKS = 60
"""Most groups of rows whose losses are measured separately."""

_EXPECTATIONS = 200
_LARGEST = 1e6
_MOST_KEPT = 30_000_000
"""Parameters of candidates that are kept between votes and choice; others are fitted
again."""


@dataclass(frozen=True)
class Personal:
    """The personal model of one node.

    Args:
      w: its parameters, [parameters].
      figures: how good it is.
      shift: added to every output.
    """

    w: Float32
    figures: SiteFigures
    shift: float = 0.0


class Sites:
    """Nodes that correct the same model, each on its own rows.

    Args:
      model: defines the loss.
      shards: all rows of the nodes.
      trained: the rows that nodes trained on.
      w: the global model, [parameters].
      seed: seed of the run.
    """

    def __init__(
        self, model: Model, shards: Shards, trained: Shards, w: Float32, seed: int
    ) -> None:
        self.w = w
        self._model = model
        self._shards = shards
        self._trained = trained
        self._seed = seed
        self._start = np.asarray(model.initial(seed), np.float32)
        self._fitted: dict[tuple[int, int], _Site] = {}
        self._kept = 0  # parameters of fitted candidates

    def votes(self) -> Float64:
        """Return the votes of each node, [nodes, candidates]; NaN if it has none."""
        known: dict[tuple[int, int], Float64] = {}
        for node, key in enumerate(self._keys()):
            if key not in known:
                known[key] = self._site(node, key).votes()
        votes = np.full((len(self._shards), len(VOTES)), np.nan)
        for row, key in zip(votes, self._keys(), strict=True):
            row[: len(known[key])] = known[key]
        return votes

    def personal(self, prior: Sequence[float] = ()) -> list[Personal]:
        """Return the personal model of each node.

        Args:
          prior: of the candidates; empty for the default.
        """
        known: dict[tuple[int, int], Personal] = {}
        for node, key in enumerate(self._keys()):
            if key not in known:  # identical shards have identical models
                known[key] = self._site(node, key).personal(prior)
                self._fitted.pop(key, None)
        return [known[key] for key in self._keys()]

    def _keys(self) -> list[tuple[int, int]]:
        starts = self._shards.start.tolist()
        sizes = self._shards.size.tolist()
        return list(zip(starts, sizes, strict=True))

    def _site(self, node: int, key: tuple[int, int]) -> "_Site":
        site = self._fitted.get(key)
        if site is None:
            rows = self._shards.rows_of(node)
            held_out = ~np.isin(rows, self._trained.rows_of(node))
            table = _rows(self._shards.table, rows)
            site = _Site(self._model, table, held_out, self.w, self._start, self._seed)
            self._kept += site.numbers
            if self._kept <= _MOST_KEPT:
                self._fitted[key] = site
        return site


def personalise(
    model: Model,
    shards: Shards,
    trained: Shards,
    w: Float32,
    seed: int,
) -> list[Personal]:
    """Fit the personal model of each node, with the prior that all nodes vote for.

    Args:
      model: defines the loss.
      shards: all rows of the nodes.
      trained: the rows that nodes trained on.
      w: the global model, [parameters].
      seed: seed of the run.
    """
    sites = Sites(model, shards, trained, w, seed)
    return sites.personal(prior_of(sites.votes()))


def alone(model: Model, shards: Shards, seed: int) -> list[tuple[Float32, float]]:
    """Train the model of each node on its own rows only, from w(0).

    The strength of the penalty is that with the lowest loss in folds; with few rows, it is
    the smallest one.

    Args:
      model: defines the loss.
      shards: rows of the nodes.
      seed: seed of the run.

    Returns:
      The parameters and the shift of the outputs of each node.
    """
    start = np.asarray(model.initial(seed), np.float32)
    result = []
    for node in range(len(shards)):
        table = _rows(shards.table, shards.rows_of(node))
        trained = np.zeros(len(table), bool)
        result.append(_Site(model, table, trained, start, start, seed).alone())
    return result


def prior_of(votes: Float64) -> tuple[float, ...]:
    """Return the prior of the candidates that the votes of nodes make most likely.

    Args:
      votes: [nodes, candidates]; NaN of nodes without votes, and of candidates that the
        model does not have.

    Returns: shares of the candidates, with a sum of 1; empty without votes.
    """
    having = np.asarray(~np.isnan(votes), bool)
    voters = votes[having.any(axis=1)]
    used = np.asarray(having.any(axis=0), bool)
    if not len(voters) or not used[0]:
        return ()
    scores = voters[:, used]
    scores = np.where(np.isnan(scores), 0.0, np.clip(scores, -_LARGEST, _LARGEST))
    likelihoods = np.exp(scores - scores.max(axis=1, keepdims=True))
    start = default_prior(int(used.sum()))
    prior = start
    for _ in range(_EXPECTATIONS):
        shares = prior * likelihoods
        shares /= shares.sum(axis=1, keepdims=True)
        prior = (start + shares.sum(axis=0)) / (1 + len(scores))
    return tuple(prior.tolist())


def default_prior(candidates: int) -> Float64:
    """Return the prior of candidates without votes: `PRIOR` for w, equal for the rest."""
    rest = (1 - PRIOR) / (candidates - 1)
    return np.array([PRIOR, *[rest] * (candidates - 1)])


def _rows(table: Table, rows: Int64 | Int32 | Flags) -> Table:
    return replace(table, x=table.x[rows], y=table.y[rows])


@dataclass(frozen=True)
class _Mixture:
    """A mean of candidates.

    Args:
      frame: its coordinates.
      v: its parameters in these.
      kept: share of the candidates that started from w.
    """

    frame: SiteFrame
    v: Float32
    kept: float


@dataclass(frozen=True)
class _Candidates:
    """Candidates that were fitted to some rows.

    Args:
      corrected: w and its corrections, [candidates, parameters of the frame].
      alone: [candidates, parameters of the other frame].
    """

    corrected: Float32
    alone: Float32


@dataclass(frozen=True)
class _Site:
    """One node.

    Args:
      model: the model of the run.
      table: the rows of the node.
      held_out: which of them were held out of the training, [rows].
      w: the global model.
      start: w(0).
      seed: seed of the run.
    """

    model: Model
    table: Table
    held_out: Flags
    w: Float32
    start: Float32
    seed: int

    @cached_property
    def frame(self) -> SiteFrame:
        """Coordinates of corrections."""
        return frame_of(self.model, self.table, self.w)

    @cached_property
    def averages(self) -> bool:
        """Whether models from different starts can be averaged."""
        return bool(getattr(self.model, "convex", False))

    @cached_property
    def alone_frame(self) -> SiteFrame:
        """Coordinates of models that are trained alone."""
        return self.frame if self.averages else SiteFrame(self.model, self.table)

    @cached_property
    def kept(self) -> Kept:
        """Why there is nothing to fit."""
        if len(self.table) < FEWEST_ROWS:
            return "few rows"
        scores = RowScores.of(self.model, self.w, self.table)
        one = scores.metric == "accuracy" and len(np.unique(scores.targets)) < 2
        return "one class" if one else ""

    @cached_property
    def numbers(self) -> int:
        """Parameters of all candidates."""
        if self.kept:
            return 0
        sets = 1 + len(self.folds)
        corrected = (1 + len(self.penalties)) * self.frame.model.parameters
        own = len(STRENGTHS) * self.alone_frame.model.parameters
        return sets * (corrected + own)

    def votes(self) -> Float64:
        """Return the sum of losses of each candidate below that of w; NaN if w is kept."""
        if self.kept:
            return np.array([np.nan])
        total = self.losses @ self.sizes
        return np.asarray(total[0] - total, np.float64)

    def personal(self, prior: Sequence[float]) -> Personal:
        """Return the personal model.

        Args:
          prior: of the candidates; empty for the default.
        """
        if self.kept:
            return Personal(self.w, self._kept_figures(self.kept))
        chances = np.array(prior) if prior else default_prior(len(self.losses))
        if len(chances) != len(self.losses):
            raise PeerError(
                f"a prior of {len(chances)} candidates; the model has {len(self.losses)}"
            )
        weights = self._weights(self.losses, self.sizes, chances)
        figures = self._figures(weights, chances)
        if weights[0] == 1:
            return Personal(self.w, figures)
        final = self._mixture(self.final, weights)
        own, shift = final.frame.out_of(final.v, self.w, final.kept)
        return Personal(own, figures, shift)

    def alone(self) -> tuple[Float32, float]:
        """Return the best candidate that was trained on this node only."""
        weights = np.zeros(1 + len(self.penalties) + len(STRENGTHS))
        weights[-len(STRENGTHS)] = 1.0
        if len(self.table) >= FEWEST_ROWS:
            weights = self._alone(self.losses, self.sizes)
        final = self._mixture(self.final, weights)
        return final.frame.out_of(final.v, self.w, final.kept)

    # Candidates.

    @cached_property
    def folds(self) -> list[Flags]:
        """The rows to measure on in each fold, [rows] each."""
        n = len(self.table)
        network = not self.averages
        large = n >= MANY_ROWS or n * self.frame.model.parameters > LARGE
        if (large or network) and self.held_out.sum() >= FEWEST_ROWS:
            return [self.held_out]
        folds = np.zeros((FOLDS, n), bool)
        order = generator(self.seed, Stream.PERSONAL, n).permutation(n)
        for fold, part in zip(folds, np.array_split(order, FOLDS), strict=True):
            fold[part] = True
        return list(folds)

    @cached_property
    def penalties(self) -> Float64:
        """λ of each correction, [corrections, parameters of the frame]."""
        intercepts = self.frame.intercepts
        if intercepts is None:
            shape = (len(STRENGTHS), self.frame.model.parameters)
            return np.broadcast_to(np.array(STRENGTHS)[:, None], shape)
        strengths = np.array([*STRENGTHS, np.inf])[:, None]
        return np.where(intercepts, FREE, strengths)

    @cached_property
    def fits(self) -> list[_Candidates]:
        """Candidates without the rows of each fold."""
        return self._fits([np.flatnonzero(~fold) for fold in self.folds])

    @cached_property
    def final(self) -> _Candidates:
        """Candidates of all rows."""
        everything = np.arange(len(self.table))
        return self._fits([everything])[0]

    def _fits(self, parts: Sequence[Int64]) -> list[_Candidates]:
        """Return the candidates for each set of rows."""
        shared = self.frame.into(self.w)
        start = self.alone_frame.into(self.start)
        count = len(self.penalties)
        if self.averages:
            penalties = np.concatenate([self.penalties, self.penalties[: len(STRENGTHS)]])
            centres = np.concatenate(
                [np.tile(shared, (count, 1)), np.tile(start, (len(STRENGTHS), 1))]
            )
            fitted = _fitted(self.frame, parts, centres, penalties)
            corrected = fitted[:, :count]
            own = fitted[:, count:]
        else:
            corrected = _fitted(
                self.frame, parts, np.tile(shared, (count, 1)), self.penalties
            )
            strengths = np.array(STRENGTHS)[:, None]
            centres = np.tile(start, (len(STRENGTHS), 1))
            own = _fitted(self.alone_frame, parts, centres, strengths)
        return [
            _Candidates(np.concatenate([shared[None], some]), each)
            for some, each in zip(corrected, own, strict=True)
        ]

    @cached_property
    def blocks(self) -> list[Int64]:
        """Groups of rows of each fold, in order."""
        blocks: list[Int64] = []
        for fold in self.folds:
            positions = np.flatnonzero(fold)
            count = min(len(positions), max(1, BLOCKS // len(self.folds)))
            blocks += np.array_split(positions, count)
        return blocks

    @cached_property
    def fold_of(self) -> Int64:
        """The fold of each block."""
        return np.array(
            [
                next(number for number, fold in enumerate(self.folds) if fold[block[0]])
                for block in self.blocks
            ]
        )

    @cached_property
    def sizes(self) -> Float64:
        """Rows of each block."""
        return np.array([len(block) for block in self.blocks], np.float64)

    @cached_property
    def losses(self) -> Float64:
        """Loss of each candidate on each block, [candidates, blocks]."""
        columns: list[Float64] = []
        for number, fits in enumerate(self.fits):
            parts = [self.blocks[at] for at in np.flatnonzero(self.fold_of == number)]
            corrected = _losses(self.frame, fits.corrected, parts)
            own = _losses(self.alone_frame, fits.alone, parts)
            columns.append(np.concatenate([corrected, own]))
        known = np.nan_to_num(np.concatenate(columns, axis=1), nan=_LARGEST)
        return np.clip(known, -_LARGEST, _LARGEST)

    # Weights.

    def _weights(self, losses: Float64, sizes: Float64, prior: Float64) -> Float64:
        """Return the weight of each candidate, [candidates]."""
        rng = generator(self.seed, Stream.PERSONAL, len(self.table), losses.shape[1])
        counts = rng.standard_gamma(sizes, (DRAWS, len(sizes)))
        counts *= sizes.sum() / counts.sum(axis=1, keepdims=True)
        with np.errstate(divide="ignore"):
            scores = np.log(prior) - counts @ losses.T
        scores -= scores.max(axis=1, keepdims=True)
        each = np.exp(scores)
        weights = (each / each.sum(axis=1, keepdims=True)).mean(axis=0)
        if self.averages:
            return np.asarray(weights, np.float64)
        own = len(losses) - len(STRENGTHS)
        if weights[own:].sum() > 0.5:
            best = own + int(weights[own:].argmax())
            return np.asarray(np.arange(len(weights)) == best, np.float64)
        weights[own:] = 0.0
        return np.asarray(weights / weights.sum(), np.float64)

    def _alone(self, losses: Float64, sizes: Float64) -> Float64:
        """Return the weights that choose the best candidate `alone`."""
        own = len(losses) - len(STRENGTHS)
        best = own + int((losses[own:] @ sizes).argmin())
        return np.asarray(np.arange(len(losses)) == best, np.float64)

    def _mixture(self, candidates: _Candidates, weights: Float64) -> _Mixture:
        """Return the mean of candidates."""
        own = len(candidates.corrected)
        kept = float(weights[:own].sum())
        if self.averages:
            every = np.concatenate([candidates.corrected, candidates.alone])
            frame = self.frame
            mean = weights @ every.astype(np.float64)
        elif weights[own:].any():
            frame = self.alone_frame
            mean = weights[own:] @ candidates.alone.astype(np.float64)
        else:
            frame = self.frame
            mean = weights[:own] @ candidates.corrected.astype(np.float64)
        return _Mixture(frame, np.asarray(mean, np.float32), kept)

    # Figures.

    def _figures(self, weights: Float64, prior: Float64) -> SiteFigures:
        """Measure all models, each on rows that it was not fitted to or chosen by."""
        losses = self.losses
        sizes = self.sizes
        blocks = self.blocks
        group_of = self.fold_of
        if len(self.folds) == 1:
            group_of = np.arange(len(blocks)) % min(FOLDS, len(blocks))
        scores: dict[str, list[Float64]] = {"shared": [], "alone": [], "personal": []}
        trivial: list[Float64] = []
        measured: list[Flags] = []
        metric = "loss"
        for group in np.unique(group_of):
            others = group_of != group
            positions = np.concatenate(
                [blocks[at] for at in np.flatnonzero(~others).tolist()]
            )
            candidates = self.fits[self.fold_of[group_of == group][0]]
            chosen = {
                "personal": self._weights(losses[:, others], sizes[others], prior),
                "alone": self._alone(losses[:, others], sizes[others]),
            }
            rest = np.setdiff1d(np.arange(len(self.table)), positions)
            shared = RowScores.of(self.model, self.w, _rows(self.table, positions))
            metric = shared.metric
            scores["shared"].append(shared.values)
            for name, mix in chosen.items():
                mixed = self._mixture(candidates, mix)
                part = mixed.frame.part(positions)
                measured_here = RowScores.of(mixed.frame.model, mixed.v, part)
                scores[name].append(measured_here.values)
            constant = RowScores.of(self.model, self.w, _rows(self.table, rest))
            trivial.append(trivial_scores(shared, constant))
            measured.append(self.held_out[positions])
        held_out = np.concatenate(measured)
        only_held_out = bool(held_out.sum() >= FEWEST_ROWS)
        used = held_out if only_held_out else np.ones(len(held_out), bool)
        rows = {name: np.concatenate(each)[used] for name, each in scores.items()}
        constants = None if metric == "loss" else np.concatenate(trivial)[used]
        own = len(losses) - len(STRENGTHS)
        return SiteFigures(
            metric,
            len(self.table),
            int(used.sum()),
            only_held_out,
            None if constants is None else figure_of(metric, constants),
            figure_of(metric, rows["alone"]),
            figure_of(metric, rows["shared"]),
            figure_of(metric, rows["personal"]),
            difference_of(metric, rows["personal"], rows["alone"]),
            difference_of(metric, rows["personal"], rows["shared"]),
            (float(weights[0]), float(weights[1:own].sum()), float(weights[own:].sum())),
        )

    def _kept_figures(self, kept: Kept) -> SiteFigures:
        """Return the figures of a node that keeps the global model."""
        held_out = bool(self.held_out.sum() >= FEWEST_ROWS)
        used = self.held_out if held_out else np.ones(len(self.table), bool)
        scores = RowScores.of(self.model, self.w, _rows(self.table, used))
        shared = None
        trivial = None
        if kept != "few rows":
            shared = figure_of(scores.metric, scores.values)
            if scores.metric != "loss":
                trivial = figure_of(scores.metric, trivial_scores(scores, scores))
        return SiteFigures(
            scores.metric,
            len(self.table),
            int(used.sum()),
            held_out,
            trivial,
            None,
            shared,
            shared,
            None,
            None,
            (1.0, 0.0, 0.0),
            kept,
        )


def _fitted(
    frame: SiteFrame, parts: Sequence[Int64], centres: Float32, penalties: Float64
) -> Float32:
    """Return the optima of all sets of rows, [sets, candidates, parameters]."""
    count = len(centres)
    each = np.repeat(np.arange(len(parts)), count)
    shards = Shards.of(frame.table, parts).only(each.tolist())
    strengths = np.tile(penalties, (len(parts), 1)) / shards.size[:, None]
    fitted = minimise(frame.model, shards, np.tile(centres, (len(parts), 1)), strengths)
    return fitted.reshape(len(parts), count, -1)


def _losses(frame: SiteFrame, candidates: Float32, parts: Sequence[Int64]) -> Float64:
    """Return the loss of each candidate on each set of rows, [candidates, sets]."""
    shards = Shards.of(frame.table, parts)
    whole = BatchIndices.whole(len(parts))
    with np.errstate(over="ignore", invalid="ignore"):
        return np.array([frame.model.losses(v[None], shards, whole) for v in candidates])


# Reports.


def vote_report_of(
    broadcast: VoteRound, nodes: Int64, sizes: Int64, votes: Float64 | None
) -> VoteReport:
    """Return the report of nodes; votes that they keep to themselves are NaN.

    Args:
      broadcast: the request.
      nodes: numbers of the nodes.
      sizes: D_i.
      votes: [nodes, candidates]; None if they keep their votes.
    """
    given = np.full((len(nodes), len(VOTES)), np.nan) if votes is None else votes
    numbers = dict(zip(VOTES, given.T, strict=True))
    return VoteReport(round=broadcast.round, nodes=nodes, sizes=sizes, numbers=numbers)


def prior_of_report(report: VoteReport) -> tuple[float, ...]:
    """Return the prior that the nodes vote for, whatever the order of their reports."""
    order = np.argsort(report.nodes)
    votes = np.column_stack([report.numbers[name] for name in VOTES])
    return prior_of(votes[order])
