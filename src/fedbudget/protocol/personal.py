"""Personal models: each node corrects the final model on its own rows.

After the last round, every node receives the result w of the run. It fits candidates on its
own rows:

    w itself
    corrected:  argmin F_i(v) + λ/(2n) ‖v - w‖²       for λ in `STRENGTHS`
    alone:      argmin F_i(v) + λ/(2n) ‖v - w(0)‖²    for λ in `STRENGTHS`

with n rows and F_i the mean loss. λ is in units of the sum of losses, so a node with more
rows moves further from w. The node measures each candidate on rows that it was not fitted
to, in `FOLDS` folds of all its rows. A node with at least `MANY_ROWS` rows, or with a large
model, fits once and measures on the rows that it held out of the training.

**Choice.** The personal model is the mean of the candidates, weighted by pseudo-BMA+ (Yao
et al., Bayesian Analysis 13, 2018): weight j is the mean of softmax(ln prior of j - sum of
losses of j) over `DRAWS` random weightings of the rows (Bayesian bootstrap). The prior of w
is `PRIOR`, so w keeps most of the weight until the rows of the node clearly contradict it.
The loss of a linear model is convex in the parameters, and its mean includes the candidates
`alone`. For other models, parameters from another start cannot be averaged: `alone` is
chosen if it has most of the weight, and the mean is over the rest otherwise.

**Intercepts.** A feature that is constant at a node says nothing about its own effect
there. It would serve as an intercept, and its coefficient would become wrong for other
values of the feature. So softmax and linear regression keep w's coefficients of such
features, or 0 in `alone`, and correct the intercept. Linear regression has none, so its
personal model has a `shift` of its outputs.

A node keeps w if it has fewer than `FEWEST_ROWS` rows or rows of one class only.

**Figures.** All figures of a node are on the same rows: those that it held out of the
training, or all its rows if it held out none. Then w has been trained on them, and its
figure is too good. The personal figure uses candidates and weights that come from the other
rows. Errors are standard errors of the mean over rows.

Nothing is sent but these figures, and a node may refuse to send them. A node with fewer
than `FEWEST_ROWS` rows has no figures, because they would reveal too much of each row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedbudget.arrays import Flags, Float32, Float64, Int32, Int64
from fedbudget.data.sampling import BatchIndices
from fedbudget.data.shards import Shards, Table
from fedbudget.evaluation.metrics import RowScores
from fedbudget.models.base import Model
from fedbudget.models.builtin import LinearRegression, Softmax
from fedbudget.models.minimise import ITERATIONS, minimise
from fedbudget.protocol.messages import FIGURES, PersonalReport, PersonalRound
from fedbudget.randomness import Stream, generator

STRENGTHS = (1.0, 10.0, 100.0, 1000.0)
FOLDS = 5
DRAWS = 200
PRIOR = 0.8

FEWEST_ROWS = 10
MANY_ROWS = 3000
LARGE = 200_000
"""Parameters of a model that is fitted once, without folds."""

BLOCKS = 60
"""Most groups of rows whose losses are measured separately."""

_LARGEST = 1e6

Kept = Literal["", "few rows", "one class"]
"""Why a node keeps the global model; empty if it fitted candidates."""

_KEPT: tuple[Kept, ...] = ("", "few rows", "one class")
METRICS = ("loss", "accuracy", "rmse")


@dataclass(frozen=True)
class SiteFigure:
    """A figure of one model at one node.

    Args:
      value: the metric.
      error: its standard error.
    """

    value: float
    error: float


@dataclass(frozen=True)
class SiteFigures:
    """Figures of all models at one node, on the same rows.

    Args:
      metric: `accuracy`, `rmse` (in the unit of the model) or `loss`.
      rows: rows of the node.
      measured: rows that the figures are for.
      held_out: whether these rows were held out of the training.
      trivial: the most frequent class or the mean of the node; None without targets.
      alone: the same model, trained on this node only; None if the node is too small.
      shared: the global model; None if the node has too few rows.
      personal: the personal model; None in the same case.
      gain: how much better the personal model is than `alone`: positive if it is better,
        with the error of the difference; None without `alone`.
      correction: how much better the personal model is than the global one.
      weights: shares of the global model, of corrections and of `alone` in the personal
        model.
      kept: why the node keeps the global model.
    """

    metric: str
    rows: int
    measured: int
    held_out: bool
    trivial: SiteFigure | None
    alone: SiteFigure | None
    shared: SiteFigure | None
    personal: SiteFigure | None
    gain: SiteFigure | None
    correction: SiteFigure | None
    weights: tuple[float, float, float]
    kept: Kept = ""

    def in_unit(self, unit: float) -> "SiteFigures":
        """Return the figures in the unit of the target.

        Args:
          unit: standard deviation by which real targets were divided.
        """
        if self.metric != "rmse":
            return self

        def scaled(figure: SiteFigure | None) -> SiteFigure | None:
            return figure and SiteFigure(unit * figure.value, unit * figure.error)

        return replace(
            self,
            trivial=scaled(self.trivial),
            alone=scaled(self.alone),
            shared=scaled(self.shared),
            personal=scaled(self.personal),
            gain=scaled(self.gain),
            correction=scaled(self.correction),
        )

    @property
    def served(self) -> bool:
        """Whether the global model is better here than a trivial prediction."""
        if self.trivial is None or self.shared is None:
            return True
        better = self.shared.value - self.trivial.value
        return better > 0 if self.metric == "accuracy" else better < 0


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


def personalise(
    model: Model,
    shards: Shards,
    trained: Shards,
    w: Float32,
    seed: int,
) -> list[Personal]:
    """Fit the personal model of each node.

    Args:
      model: defines the loss.
      shards: all rows of the nodes.
      trained: the rows that nodes trained on.
      w: the global model, [parameters].
      seed: seed of the run.
    """
    start = np.asarray(model.initial(seed), np.float32)
    known: dict[tuple[int, int], Personal] = {}
    result = []
    for node in range(len(shards)):
        key = int(shards.start[node]), int(shards.size[node])
        if key not in known:  # identical shards have identical models
            rows = shards.rows_of(node)
            held_out = ~np.isin(rows, trained.rows_of(node))
            table = shards.table
            table = replace(table, x=table.x[rows], y=table.y[rows])
            frame = _frame(model, table)
            site = _Site(
                frame.model,
                frame.table,
                np.arange(len(rows), dtype=np.int32),
                held_out,
                frame.into(w),
                frame.into(start),
                seed,
            )
            found = site.personal()
            known[key] = replace(found, w=w)
            if found.figures.weights[0] < 1:
                own, shift = frame.out_of(found.w)
                known[key] = Personal(own, found.figures, shift)
        result.append(known[key])
    return result


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
        rows = shards.rows_of(node)
        table = shards.table
        frame = _frame(model, replace(table, x=table.x[rows], y=table.y[rows]))
        site = _Site(
            frame.model,
            frame.table,
            np.arange(len(rows), dtype=np.int32),
            np.zeros(len(rows), bool),
            frame.into(start),
            frame.into(start),
            seed,
        )
        result.append(frame.out_of(site.alone()))
    return result


class _Frame:
    """The coordinates in which a node fits: here the model's own."""

    def __init__(self, model: Model, table: Table) -> None:
        self.model = model
        self.table = table

    def into(self, w: Float32) -> Float32:
        """Return parameters in these coordinates."""
        return w

    def out_of(self, w: Float32) -> tuple[Float32, float]:
        """Return the model's parameters, and the shift of its outputs."""
        return w, 0.0


class _VaryingFeatures(_Frame):
    """Constant features are 0, and the intercept contains their effect."""

    def __init__(self, model: Model, table: Table) -> None:
        super().__init__(model, table)
        constant = table.x.max(axis=0) == table.x.min(axis=0)
        self.values = np.where(constant, table.x[0], 0).astype(np.float64)
        x = np.where(constant, 0, table.x).astype(np.float32)
        self.table = replace(table, x=x)


class _SoftmaxFrame(_VaryingFeatures):
    """Softmax regression: the bias is the intercept."""

    def into(self, w: Float32) -> Float32:
        return self._moved(w, 1.0)

    def out_of(self, w: Float32) -> tuple[Float32, float]:
        return self._moved(w, -1.0), 0.0

    def _moved(self, w: Float32, sign: float) -> Float32:
        rows = w.reshape(-1, len(self.values) + 1).astype(np.float64)
        rows[:, -1] += sign * (rows[:, :-1] @ self.values)
        return rows.ravel().astype(np.float32)


class _LinearFrame(_VaryingFeatures):
    """Linear regression: a last feature of 1 is the intercept."""

    def __init__(self, model: Model, table: Table) -> None:
        super().__init__(model, table)
        one = np.ones((len(table), 1), np.float32)
        self.table = replace(self.table, x=np.hstack([self.table.x, one]))
        self.model = LinearRegression(len(self.values) + 1)

    def into(self, w: Float32) -> Float32:
        return np.append(w, w.astype(np.float64) @ self.values).astype(np.float32)

    def out_of(self, w: Float32) -> tuple[Float32, float]:
        own = w[:-1]
        return own, float(w[-1]) - float(own.astype(np.float64) @ self.values)


def _frame(model: Model, table: Table) -> _Frame:
    """Return the coordinates for the rows of one node."""
    if table.store is None and table.scale == 1:
        if isinstance(model, Softmax):
            return _SoftmaxFrame(model, table)
        if isinstance(model, LinearRegression):
            return _LinearFrame(model, table)
    return _Frame(model, table)


@dataclass(frozen=True)
class _Site:
    """One node.

    Args:
      rows: row numbers, [n].
      held_out: which of them were held out of the training, [n].
      w: the global model.
      start: w(0).
    """

    model: Model
    table: Table
    rows: Int32
    held_out: Flags
    w: Float32
    start: Float32
    seed: int

    def personal(self) -> Personal:
        kept = self._kept()
        if kept:
            return Personal(self.w, self._kept_figures(kept))
        plan = self._plan()
        fits = self._fits([self.rows[~fold] for fold in plan])
        losses, blocks = self._losses(plan, fits)
        sizes = np.array([len(block) for block in blocks], np.float64)
        weights = self._weights(losses, sizes)
        final = fits[0]
        if len(plan) == 1 or plan[0].any():
            final = self._fits([self.rows])[0]
        figures = self._figures(plan, fits, losses, blocks, weights)
        return Personal(self._mean(final, weights), figures)

    def alone(self) -> Float32:
        """Return the best candidate that was trained on this node only."""
        final = self._fits([self.rows])[0]
        if len(self.rows) < FEWEST_ROWS:
            return np.asarray(final[1 + len(STRENGTHS)], np.float32)
        plan = self._plan()
        losses, blocks = self._losses(plan, self._fits([self.rows[~fold] for fold in plan]))
        sizes = np.array([len(block) for block in blocks], np.float64)
        return self._mean(final, self._alone(losses, sizes))

    # Candidates.

    def _kept(self) -> Kept:
        """Return why there is nothing to fit."""
        if len(self.rows) < FEWEST_ROWS:
            return "few rows"
        own = self._part(np.arange(len(self.rows)))
        scores = RowScores.of(self.model, self.w, own)
        one = scores.metric == "accuracy" and len(np.unique(scores.targets)) < 2
        return "one class" if one else ""

    def _plan(self) -> list[Flags]:
        """Return the rows to measure on in each fold, [n] each."""
        n = len(self.rows)
        large = n >= MANY_ROWS or self.model.parameters > LARGE
        if large and self.held_out.sum() >= FEWEST_ROWS:
            return [self.held_out]
        folds = np.zeros((FOLDS, n), bool)
        order = generator(self.seed, Stream.PERSONAL, n).permutation(n)
        for fold, part in zip(folds, np.array_split(order, FOLDS), strict=True):
            fold[part] = True
        return list(folds)

    def _fits(self, parts: Sequence[Int32]) -> Float32:
        """Return the candidates for each set of rows, [sets, candidates, parameters]."""
        count = len(STRENGTHS)
        centres = np.concatenate(
            [np.tile(self.w, (count, 1)), np.tile(self.start, (count, 1))]
        )
        each = np.repeat(np.arange(len(parts)), 2 * count)
        shards = Shards.of(self.table, parts).only(each.tolist())
        strengths = np.tile(STRENGTHS, 2 * len(parts)) / shards.size
        fitted = minimise(
            self.model, shards, np.tile(centres, (len(parts), 1)), strengths, ITERATIONS
        ).reshape(len(parts), 2 * count, -1)
        shared = np.broadcast_to(self.w, (len(parts), 1, len(self.w)))
        return np.concatenate([shared, fitted], axis=1)

    def _losses(self, plan: Sequence[Flags], fits: Float32) -> tuple[Float64, list[Int64]]:
        """Return the loss of each candidate on each block, and the rows of each block."""
        columns: list[Float64] = []
        blocks: list[Int64] = []
        for fold, candidates in zip(plan, fits, strict=True):
            positions = np.flatnonzero(fold)
            count = min(len(positions), max(1, BLOCKS // len(plan)))
            parts = np.array_split(positions, count)
            shards = Shards.of(self.table, [self.rows[part] for part in parts])
            whole = BatchIndices.whole(count)
            with np.errstate(over="ignore", invalid="ignore"):
                losses = [
                    self.model.losses(each[None], shards, whole) for each in candidates
                ]
            columns.append(np.array(losses))
            blocks += parts
        known = np.nan_to_num(np.concatenate(columns, axis=1), nan=_LARGEST)
        return np.clip(known, -_LARGEST, _LARGEST), blocks

    # Weights.

    def _weights(self, losses: Float64, sizes: Float64) -> Float64:
        """Return the weight of each candidate, [candidates]."""
        rng = generator(self.seed, Stream.PERSONAL, len(self.rows), losses.shape[1])
        counts = rng.standard_gamma(sizes, (DRAWS, len(sizes)))
        counts *= sizes.sum() / counts.sum(axis=1, keepdims=True)
        others = len(losses) - 1
        prior = np.array([PRIOR, *[(1 - PRIOR) / others] * others])
        scores = np.log(prior) - counts @ losses.T
        scores -= scores.max(axis=1, keepdims=True)
        each = np.exp(scores)
        weights = (each / each.sum(axis=1, keepdims=True)).mean(axis=0)
        if getattr(self.model, "convex", False):
            return np.asarray(weights, np.float64)
        own = 1 + len(STRENGTHS)
        if weights[own:].sum() > 0.5:
            best = own + int(weights[own:].argmax())
            return np.asarray(np.arange(len(weights)) == best, np.float64)
        weights[own:] = 0.0
        return np.asarray(weights / weights.sum(), np.float64)

    def _alone(self, losses: Float64, sizes: Float64) -> Float64:
        """Return the weights that choose the best candidate `alone`."""
        own = 1 + len(STRENGTHS)
        best = own + int((losses[own:] @ sizes).argmin())
        return np.asarray(np.arange(len(losses)) == best, np.float64)

    def _mean(self, candidates: Float32, weights: Float64) -> Float32:
        if weights[0] == 1:
            return self.w
        return np.asarray(weights @ candidates.astype(np.float64), np.float32)

    # Figures.

    def _figures(
        self,
        plan: Sequence[Flags],
        fits: Float32,
        losses: Float64,
        blocks: Sequence[Int64],
        weights: Float64,
    ) -> SiteFigures:
        """Measure all models, each on rows that it was not fitted to or chosen by."""
        fold_of = np.array([_fold_of(plan, block) for block in blocks])
        group_of = fold_of
        if len(plan) == 1:
            group_of = np.arange(len(blocks)) % min(FOLDS, len(blocks))
        sizes = np.array([len(block) for block in blocks], np.float64)
        scores: dict[str, list[Float64]] = {"shared": [], "alone": [], "personal": []}
        trivial: list[Float64] = []
        measured: list[Flags] = []
        metric = "loss"
        for group in np.unique(group_of):
            others = group_of != group
            positions = np.concatenate(
                [blocks[at] for at in np.flatnonzero(~others).tolist()]
            )
            candidates = fits[fold_of[group_of == group][0]]
            chosen = {
                "personal": self._weights(losses[:, others], sizes[others]),
                "alone": self._alone(losses[:, others], sizes[others]),
            }
            part = self._part(positions)
            rest = self._part(np.setdiff1d(np.arange(len(self.rows)), positions))
            shared = RowScores.of(self.model, self.w, part)
            metric = shared.metric
            scores["shared"].append(shared.values)
            for name, mix in chosen.items():
                mixed = RowScores.of(self.model, self._mean(candidates, mix), part)
                scores[name].append(mixed.values)
            trivial.append(_trivial(shared, RowScores.of(self.model, self.w, rest)))
            measured.append(self.held_out[positions])
        held_out = np.concatenate(measured)
        only_held_out = bool(held_out.sum() >= FEWEST_ROWS)
        used = held_out if only_held_out else np.ones(len(held_out), bool)
        rows = {name: np.concatenate(each)[used] for name, each in scores.items()}
        constant = None if metric == "loss" else np.concatenate(trivial)[used]
        own = 1 + len(STRENGTHS)
        return SiteFigures(
            metric,
            len(self.rows),
            int(used.sum()),
            only_held_out,
            None if constant is None else _figure(metric, constant),
            _figure(metric, rows["alone"]),
            _figure(metric, rows["shared"]),
            _figure(metric, rows["personal"]),
            _difference(metric, rows["personal"], rows["alone"]),
            _difference(metric, rows["personal"], rows["shared"]),
            (float(weights[0]), float(weights[1:own].sum()), float(weights[own:].sum())),
        )

    def _kept_figures(self, kept: Kept) -> SiteFigures:
        """Return the figures of a node that keeps the global model."""
        held_out = bool(self.held_out.sum() >= FEWEST_ROWS)
        used = self.held_out if held_out else np.ones(len(self.rows), bool)
        scores = RowScores.of(self.model, self.w, self._part(np.flatnonzero(used)))
        shared = None
        trivial = None
        if kept != "few rows":
            shared = _figure(scores.metric, scores.values)
            if scores.metric != "loss":
                trivial = _figure(scores.metric, _trivial(scores, scores))
        return SiteFigures(
            scores.metric,
            len(self.rows),
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

    def _part(self, positions: Int64) -> Table:
        rows = self.rows[positions]
        return replace(self.table, x=self.table.x[rows], y=self.table.y[rows])


def _fold_of(plan: Sequence[Flags], block: Int64) -> int:
    return next(number for number, fold in enumerate(plan) if fold[block[0]])


def _trivial(scores: RowScores, others: RowScores) -> Float64:
    """Return the scores of a constant that the other rows determine, [rows]."""
    if scores.metric == "accuracy":
        values, counts = np.unique(others.targets, return_counts=True)
        return np.asarray(scores.targets == values[counts.argmax()], np.float64)
    return np.asarray(np.square(scores.targets - others.targets.mean()), np.float64)


def _figure(metric: str, values: Float64) -> SiteFigure:
    """Return the mean of the rows' scores; its root for squared errors."""
    mean = float(values.mean())
    error = _error(values)
    if metric != "rmse":
        return SiteFigure(mean, error)
    root = math.sqrt(mean)
    return SiteFigure(root, error / (2 * root) if root else 0.0)


def _difference(metric: str, values: Float64, others: Float64) -> SiteFigure:
    """Return how much better the first model is, from the same rows."""
    gap = values - others
    mean = float(gap.mean())
    error = _error(gap)
    if metric == "accuracy":
        return SiteFigure(mean, error)
    if metric == "loss":
        return SiteFigure(-mean, error)
    first = math.sqrt(float(values.mean()))
    second = math.sqrt(float(others.mean()))
    total = first + second
    return SiteFigure(second - first, error / total if total else 0.0)


def _error(values: Float64) -> float:
    """Return the standard error of the mean; of one row, the value itself."""
    if len(values) == 1:
        return abs(float(values[0]))
    return float(values.std(ddof=1) / math.sqrt(len(values)))


# Messages.


def report_of(
    broadcast: PersonalRound, nodes: Int64, sizes: Int64, models: Sequence[Personal]
) -> PersonalReport:
    """Return the report of nodes; figures that they keep to themselves are NaN.

    Args:
      broadcast: the request.
      nodes: numbers of the nodes.
      sizes: D_i.
      models: personal models of the nodes; none if they keep their figures.
    """
    count = len(nodes)
    numbers = {name: np.full(count, math.nan) for name in broadcast.report.numbers}
    for index, each in enumerate(models if numbers else ()):
        for name, value in _to_numbers(each.figures).items():
            numbers[name][index] = value
    return PersonalReport(round=broadcast.round, nodes=nodes, sizes=sizes, numbers=numbers)


def _to_numbers(figures: SiteFigures) -> dict[str, float]:
    numbers = {
        "metric": METRICS.index(figures.metric),
        "rows": figures.rows,
        "measured": figures.measured,
        "held_out": figures.held_out,
        "kept": _KEPT.index(figures.kept),
        "weight_shared": figures.weights[0],
        "weight_corrected": figures.weights[1],
        "weight_alone": figures.weights[2],
    }
    for name in FIGURES:
        figure: SiteFigure | None = getattr(figures, name)
        if figure is not None:
            numbers[name] = figure.value
            numbers[f"{name}_error"] = figure.error
    return numbers


def figures_of(report: PersonalReport) -> dict[int, SiteFigures]:
    """Return the figures by node number; without nodes that keep theirs.

    Numbers come from other machines: figures that are impossible are left out.
    """
    found = {}
    for index, node in enumerate(report.nodes.tolist()):
        numbers = {name: float(each[index]) for name, each in report.numbers.items()}
        figures = _from_numbers(numbers)
        if figures is not None:
            found[node] = figures
    return found


def _from_numbers(numbers: dict[str, float]) -> SiteFigures | None:
    def figure(name: str) -> SiteFigure | None:
        value = numbers[name]
        return SiteFigure(value, numbers[f"{name}_error"]) if math.isfinite(value) else None

    if not numbers or not math.isfinite(numbers["metric"]):
        return None
    shared = figure("shared")
    personal = figure("personal")
    metric = int(numbers["metric"])
    kept = int(numbers["kept"]) if math.isfinite(numbers["kept"]) else 0
    known = 0 <= metric < len(METRICS) and 0 <= kept < len(_KEPT)
    missing = shared is None or personal is None
    if not known or (missing and _KEPT[kept] != "few rows"):
        return None
    counts = numbers["rows"], numbers["measured"]
    if not all(0 <= count < 2**53 for count in counts):
        return None
    return SiteFigures(
        METRICS[metric],
        int(counts[0]),
        int(counts[1]),
        bool(numbers["held_out"]),
        figure("trivial"),
        figure("alone"),
        shared,
        personal,
        figure("gain"),
        figure("correction"),
        (
            numbers["weight_shared"],
            numbers["weight_corrected"],
            numbers["weight_alone"],
        ),
        _KEPT[kept],
    )
