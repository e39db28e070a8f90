"""`FedClassifier`, `FedRegressor` and `FedKMeans`, with the interface of scikit-learn.

`fit` gives its samples to `fedbudget.train`, so the model inside is the same. Rules here:

- `groups` holds the site of each row; with a DataFrame, `nodes` may name its column
  instead. Without either, rows are distributed over `nodes` simulated nodes.
- Arrays, and DataFrames of numbers without missing cells, follow the checks of
  scikit-learn. Other DataFrames are tables: texts are categories, as in `fedbudget.train`.
- An estimator stores its arguments unchanged; `fit` checks them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedbudget.api import train
from fedbudget.arrays import Float32, Float64, Int64
from fedbudget.data.columns import Columns, category_name, is_missing
from fedbudget.data.dataset import Dataset
from fedbudget.data.files import from_columns, from_tables
from fedbudget.data.read_tables import from_frame, is_frame
from fedbudget.data.tables import TableOptions, require_usable
from fedbudget.errors import UserError, requires_package
from fedbudget.result import Result
from fedbudget.settings.option import Impute
from fedbudget.settings.types import MethodName

with requires_package("an estimator"):
    from sklearn.base import BaseEstimator, ClassifierMixin, ClusterMixin, RegressorMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import (
        _check_feature_names,
        _num_samples,
        check_is_fitted,
        column_or_1d,
        validate_data,
    )

_TARGET = "(target)"
"""Name of the target in a table."""

_OF_TABLES = ("drop", "categorical", "missing")
"""Settings that describe how tables are read."""

_NOT_SETTINGS = (
    "dataset",
    "target",
    "partition",
    "test_share",
    "class_weights",
    "clusters",
)
"""Settings that follow from the arguments of an estimator."""


class _Estimator(BaseEstimator):  # type: ignore[misc]
    """What the three estimators have in common."""

    _of_training = ("budget", "method", "batch_size", "step_size", "validation", "seed")
    """Arguments with the name and the meaning of those of `fedbudget.train`."""

    def __init__(
        self,
        model: Any = "linear",
        *,
        budget: str | tuple[str, ...] = "time=15s",
        nodes: int | str | None = None,
        method: MethodName | None = None,
        batch_size: int | str | None = None,
        step_size: float | str | None = None,
        validation: float | None = None,
        seed: int = 0,
        standardise: bool = True,
        impute: Impute | None = None,
        settings: Mapping[str, Any] | None = None,
        verbose: bool = False,
    ) -> None:
        self.model = model
        self.budget = budget
        self.nodes = nodes
        self.method = method
        self.batch_size = batch_size
        self.step_size = step_size
        self.validation = validation
        self.seed = seed
        self.standardise = standardise
        self.impute = impute
        self.settings = settings
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None, groups: ArrayLike | None = None) -> Any:
        """Train under the budget.

        Args:
          X: features, [samples, features], or a DataFrame.
          y: targets, [samples].
          groups: the site of each row, [samples]; each site is a node.

        Returns:
          the estimator. `result_` has the records of the run, `model_` the trained model.
        """
        self._check_settings()
        name = "nodes" if isinstance(self.nodes, str) else "groups"
        if isinstance(self.nodes, str):
            if groups is not None:
                raise UserError("`nodes` names a column of sites already: omit `groups`")
            if not is_frame(X) or self.nodes not in X.columns:
                raise UserError(f"X has no column {self.nodes!r} of sites (`nodes`)")
            groups = X[self.nodes]
            X = X.drop(columns=[self.nodes])
        plain = _is_numeric(X) if is_frame(X) and self.impute is None else not is_frame(X)
        self._reads_tables = not plain
        if self._reads_tables:
            _check_feature_names(self, X, reset=True)
            self.n_features_in_ = len(X.columns)
            targets = self._targets(self._checked_target(y, _num_samples(X)))
        else:
            X, y = self._checked(X, y)
            targets = self._targets(y)
        sites, rows = _rows_of_sites(groups, _num_samples(X), name)
        dataset = self._dataset(X, targets, rows)
        files = dataset.files if sites else ()
        dataset = replace(dataset, files=files, sites=sites)
        options = {name: getattr(self, name) for name in self._of_training}
        options = {name: value for name, value in options.items() if value is not None}
        if not sites and self.nodes is not None:
            options["nodes"] = self.nodes
        options |= {**self._of_model(), **self._settings_without_table()}
        result = train(dataset=dataset, progress=self.verbose, **options)
        self.result_: Result = result
        self.model_ = result.model
        self.n_iter_ = max(1, result.aggregations)
        return self

    def _check_settings(self) -> None:
        if not isinstance(self.settings, Mapping | None):
            raise UserError(f"`settings` must be a mapping, not {self.settings!r}")
        own = [*self.get_params(deep=False), *_NOT_SETTINGS]
        if wrong := [name for name in self.settings or {} if name in own]:
            raise UserError(
                f"`settings` contains {wrong[0]}, which arguments of "
                f"{type(self).__name__} decide"
            )

    def _checked_target(self, y: Any, samples: int) -> Any:
        if y is None:
            raise ValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is None."
            )
        y = column_or_1d(y, warn=True)
        if len(y) != samples:
            raise ValueError(f"y has {len(y)} rows, but X has {samples}")
        return y

    def _checked(self, X: Any, y: Any) -> tuple[Any, Any]:
        """Return X, [samples, features], and y as checked arrays."""
        x, y = validate_data(self, X, y, ensure_min_samples=2, dtype=_FLOATS)
        return x, y

    def _targets(self, y: Any) -> tuple[Columns, tuple[str, ...] | None]:
        """Return the targets, and the names of the classes, if there are any."""
        raise NotImplementedError

    def _of_model(self) -> dict[str, Any]:
        """Return the arguments of `fedbudget.train` for the model."""
        raise NotImplementedError

    def _dataset(
        self,
        X: Any,
        targets: tuple[Columns, tuple[str, ...] | None],
        rows: list[Int64],
    ) -> Dataset:
        """Return the samples of all sites, one after the other."""
        columns, classes = targets
        none = np.arange(0)
        given = self.settings or {}
        of_table: Any = {name: tuple(given[name]) for name in _OF_TABLES if name in given}
        options = TableOptions(classes=classes, impute=self.impute, **of_table)
        if not self._reads_tables:
            everything = replace(columns, x=X)
            pairs = [(everything.rows(own), everything.rows(none)) for own in rows]
            dataset = from_columns("X", pairs, options)
            return dataset.standardised() if self.standardise else dataset
        table = from_frame((X, columns.targets), "X", replace(options, target=_TARGET))
        require_usable([table])
        dataset = from_tables("X", [table.rows(own) for own in rows], options)
        return dataset.standardised() if self.standardise else dataset

    def _settings_without_table(self) -> dict[str, Any]:
        given = dict(self.settings or {})
        return {name: value for name, value in given.items() if name not in _OF_TABLES}

    def _outputs(self, X: Any) -> Float32:
        """Return the outputs of the model, [samples, outputs]."""
        check_is_fitted(self)
        if isinstance(self.nodes, str) and is_frame(X) and self.nodes in X.columns:
            X = X.drop(columns=[self.nodes])
        if not self._reads_tables:
            x = validate_data(self, X, reset=False, dtype=_FLOATS)
            return self.model_.outputs(x)
        if not is_frame(X):
            X = dict(zip(self.feature_names_in_, np.asarray(X, object).T, strict=True))
        else:
            _check_feature_names(self, X, reset=False)
        return self.model_.outputs(X)


class FedClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc]
    """A classifier that trains over sites under a budget, with scikit-learn's interface.

    Args:
      model: `softmax`, `svm` (two classes), `mlp`, or an object of your own, as for
        `fedbudget.train`.
      budget: one limit or several, such as `"time=10s"`.
      nodes: number of simulated nodes if `fit` gets no `groups`, 5 by default; or the
        column of a DataFrame with the site of each row.
      class_weight: weight of each class, as a mapping from classes to numbers, or
        `balanced`: inversely proportional to the class's share of the samples. Needs
        `model` mlp or softmax.
      method, batch_size, step_size, validation, seed: as in `fedbudget.Settings`.
      standardise: whether to scale features to mean 0 and standard deviation 1.
      impute: value for missing cells of a DataFrame with texts; see `fedbudget.Settings`.
      settings: further fields of `fedbudget.Settings` by name.
      verbose: whether to show a line with the last round.

    >>> from sklearn.datasets import load_breast_cancer
    >>> x, y = load_breast_cancer(return_X_y=True)
    >>> bool(FedClassifier(budget="time=2s").fit(x, y, groups=y).score(x, y) > 0.9)
    True
    """

    classes_: NDArray[Any]

    def __init__(
        self,
        model: Any = "softmax",
        *,
        budget: str | tuple[str, ...] = "time=15s",
        nodes: int | str | None = None,
        class_weight: Mapping[Any, float] | str | None = None,
        method: MethodName | None = None,
        batch_size: int | str | None = None,
        step_size: float | str | None = None,
        validation: float | None = None,
        seed: int = 0,
        standardise: bool = True,
        impute: Impute | None = None,
        settings: Mapping[str, Any] | None = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(
            model,
            budget=budget,
            nodes=nodes,
            method=method,
            batch_size=batch_size,
            step_size=step_size,
            validation=validation,
            seed=seed,
            standardise=standardise,
            impute=impute,
            settings=settings,
            verbose=verbose,
        )
        self.class_weight = class_weight

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the class of each sample, [samples]."""
        outputs = self._outputs(X)
        if outputs.shape[1] == 1:
            numbers = (outputs[:, 0] >= 0).astype(np.int64)
        else:
            numbers = outputs[:, : len(self.classes_)].argmax(axis=1)
        return np.take(self.classes_, numbers)

    def predict_proba(self, X: Any) -> Float64:
        """Return probabilities in the order of `classes_`, [samples, classes].

        `model` svm has none.
        """
        outputs = self._outputs(X)
        meaning = self.model_.meaning(outputs.shape[1])
        return meaning.probabilities(outputs, self.model_.name)

    def decision_function(self, X: Any) -> Float64:
        """Return scores, [samples, classes]; for two classes, of the second, [samples]."""
        outputs = self._outputs(X).astype(np.float64)
        if outputs.shape[1] == 1:
            return outputs[:, 0]
        return outputs[:, 1] - outputs[:, 0] if len(self.classes_) == 2 else outputs

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = self.model != "svm"
        return tags

    def _targets(self, y: Any) -> tuple[Columns, tuple[str, ...] | None]:
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"y has one class, {self.classes_[0]}: a classifier needs at least two"
            )
        if self.model == "svm" and len(self.classes_) > 2:
            raise ValueError(
                "Only binary classification is supported by model svm. The type of the "
                f"target is multiclass, with {len(self.classes_)} classes"
            )
        names = tuple(category_name(str(name)) for name in self.classes_.tolist())
        if len(set(names)) < len(names):
            names = tuple(map(str, range(len(names))))
        empty = np.zeros((len(numbers), 1))
        return Columns(empty, np.array(names)[numbers.ravel()]), names

    def _of_model(self) -> dict[str, Any]:
        given = self.class_weight
        if given is None or given == "balanced":
            return {"model": self.model, "class_weights": given}
        if not isinstance(given, Mapping):
            raise ValueError(
                "class_weight must be balanced, or a mapping from classes to numbers, "
                f"not {given!r}"
            )
        known = self.classes_.tolist()
        unknown = [each for each in given if each not in known]
        if unknown:
            raise ValueError(f"class_weight has {unknown[0]!r}, which is no class of y")
        weights = tuple(float(given.get(each, 1.0)) for each in known)
        return {"model": self.model, "class_weights": weights}


class FedRegressor(RegressorMixin, _Estimator):  # type: ignore[misc]
    """A regression that trains over sites under a budget, with scikit-learn's interface.

    Args:
      model: `linear`, `mlp`, or an object of your own, as for `fedbudget.train`.
      budget, nodes, method, batch_size, step_size, validation, seed, standardise, impute,
        settings, verbose: as for `FedClassifier`. With `standardise`, the target is scaled
        too; without it, `linear` has no intercept.

    >>> from sklearn.datasets import load_diabetes
    >>> x, y = load_diabetes(return_X_y=True)
    >>> bool(FedRegressor(budget="time=2s").fit(x, y).score(x, y) > 0.4)
    True
    """

    def predict(self, X: Any) -> Float64:
        """Return a number for each sample, in the unit of y, [samples]."""
        outputs = self._outputs(X)
        predicted = self.model_.meaning(outputs.shape[1]).predicted(outputs)
        return np.asarray(predicted, np.float64)

    def _checked(self, X: Any, y: Any) -> tuple[Any, Any]:
        x, y = validate_data(
            self, X, y, ensure_min_samples=2, dtype=_FLOATS, y_numeric=True
        )
        return x, y

    def _targets(self, y: Any) -> tuple[Columns, None]:
        return Columns(np.zeros((len(y), 1)), np.asarray(y, np.float64)), None

    def _dataset(
        self,
        X: Any,
        targets: tuple[Columns, tuple[str, ...] | None],
        rows: list[Int64],
    ) -> Dataset:
        dataset = super()._dataset(X, targets, rows)
        # Few whole numbers would count as classes.
        return replace(dataset, train=replace(dataset.train, labels=None), classes=())

    def _of_model(self) -> dict[str, Any]:
        return {"model": self.model}


class FedKMeans(ClusterMixin, _Estimator):  # type: ignore[misc]
    """K-means over sites under a budget, with scikit-learn's interface.

    Args:
      n_clusters: number of clusters.
      budget, nodes, method, batch_size, validation, seed, standardise, impute, settings,
        verbose: as for `FedClassifier`.

    >>> from sklearn.datasets import load_wine
    >>> model = FedKMeans(3, budget="time=2s").fit(load_wine().data)
    >>> model.cluster_centers_.shape, sorted(set(model.labels_.tolist()))
    ((3, 13), [0, 1, 2])
    """

    labels_: Int64

    def __init__(
        self,
        n_clusters: int = 4,
        *,
        budget: str | tuple[str, ...] = "time=15s",
        nodes: int | str | None = None,
        method: MethodName | None = None,
        batch_size: int | str | None = None,
        validation: float | None = None,
        seed: int = 0,
        standardise: bool = True,
        impute: Impute | None = None,
        settings: Mapping[str, Any] | None = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(
            "kmeans",
            budget=budget,
            nodes=nodes,
            method=method,
            batch_size=batch_size,
            validation=validation,
            seed=seed,
            standardise=standardise,
            impute=impute,
            settings=settings,
            verbose=verbose,
        )
        self.n_clusters = n_clusters

    def fit(self, X: Any, y: Any = None, groups: ArrayLike | None = None) -> "FedKMeans":
        """Train under the budget; `y` is ignored. See `FedClassifier.fit`."""
        super().fit(X, y, groups)
        self.labels_ = self.predict(X)
        return self

    def predict(self, X: Any) -> Int64:
        """Return the number of the nearest cluster of each sample, [samples]."""
        return np.asarray(self._outputs(X).argmax(axis=1), np.int64)

    def score(self, X: Any, y: Any = None) -> float:
        """Return minus the sum of squared distances to the nearest centres.

        Distances are those of the standardised features, if features are standardised.
        """
        return 2.0 * float(self._outputs(X).max(axis=1).sum(dtype=np.float64))

    @property
    def cluster_centers_(self) -> Float64:
        """The centres in the unit of the features, [clusters, features]."""
        check_is_fitted(self)
        centres = self.model_.tensors["centres"].astype(np.float64)
        how = self.model_.samples.standardization
        return centres if how is None else centres * how.deviation + how.mean

    def _checked_target(self, y: Any, samples: int) -> Any:
        return np.zeros(samples)

    def _checked(self, X: Any, y: Any) -> tuple[Any, Any]:
        x = validate_data(self, X, ensure_min_samples=2, dtype=_FLOATS)
        if len(x) < self.n_clusters:
            raise ValueError(
                f"{self.n_clusters} clusters are more than the {len(x)} samples"
            )
        return x, np.zeros(len(x))

    def _targets(self, y: Any) -> tuple[Columns, None]:
        return Columns(np.zeros((len(y), 1)), np.zeros(len(y))), None

    def _of_model(self) -> dict[str, Any]:
        return {"model": "kmeans", "clusters": self.n_clusters}


_FLOATS = [np.float64, np.float32]


def _is_numeric(frame: Any) -> bool:
    """Return whether all columns of a DataFrame are plain numbers, without missing ones."""
    if len(set(frame.columns)) < len(frame.columns):
        raise UserError("X: two columns have the same name: give each its own name")
    columns = [np.asarray(frame[title]) for title in frame.columns]
    return all(
        column.dtype.kind in "iuf"
        and str(frame[title].dtype) != "category"
        and not np.isnan(column).any()
        for title, column in zip(frame.columns, columns, strict=True)
    )


def _rows_of_sites(
    groups: Any, samples: int, name: str
) -> tuple[tuple[str, ...], list[Int64]]:
    """Return the names of the sites and the rows of each; one list without sites."""
    if groups is None:
        return (), [np.arange(samples)]
    groups = np.asarray(groups)
    if groups.shape != (samples,):
        raise UserError(f"`{name}` has shape {groups.shape}, but X has {samples} rows")
    texts = np.array([category_name(str(each)) for each in groups.tolist()])
    without = np.flatnonzero([is_missing(text) for text in texts])
    if len(without):
        raise UserError(
            f"`{name}` has no site for {len(without)} of {samples} rows, such as row "
            f"{without[0]}: name the sites of these rows, or leave them out"
        )
    sites = np.unique(texts)
    return tuple(sites.tolist()), [np.flatnonzero(texts == site) for site in sites]
