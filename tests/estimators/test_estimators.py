"""Estimators for scikit-learn: its own checks, and the model that they train."""

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.model_selection import (
    FixedThresholdClassifier,
    GridSearchCV,
    GroupKFold,
    cross_val_score,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import fedbudget
from fedbudget import FedClassifier, FedKMeans, FedRegressor

SIMULATED: dict[str, Any] = {"costs": "simulated"}
FAST: dict[str, Any] = {"budget": "time=1s", "nodes": 2, "settings": SIMULATED}
X, Y = load_breast_cancer(return_X_y=True)
GROUPS = np.repeat(["east", "north", "west"], (200, 200, 169))


@pytest.mark.parametrize("kind", [FedClassifier, FedRegressor, FedKMeans])
def test_checks_of_scikit_learn(kind: Any) -> None:
    """All checks pass. The skipped one needs SCIPY_ARRAY_API=1 before SciPy is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = check_estimator(kind(**FAST), on_fail=None, on_skip=None)
    wrong = {each["check_name"] for each in done if each["status"] != "passed"}
    assert wrong <= {"check_array_api_input"}
    assert len(done) > 40


class TestSameModelAsTrain:
    def test_classifier_with_groups(self) -> None:
        own = FedClassifier(**{**FAST, "nodes": None}).fit(X, Y, groups=GROUPS)
        shards = [(X[site == GROUPS], Y[site == GROUPS]) for site in np.unique(GROUPS)]
        result = fedbudget.train(
            shards=shards, model="softmax", standardise=True, budget="time=1s", **SIMULATED
        )
        assert own.model_.w.tobytes() == result.w.tobytes()
        assert (own.predict(X) == result.model.predict(X)).all()
        assert set(own.result_.sites) == set(GROUPS.tolist())

    def test_regressor_without_groups(self) -> None:
        x, y = load_diabetes(return_X_y=True)
        own = FedRegressor(**FAST).fit(x, y)
        result = fedbudget.train(
            dataset=(x, y),
            model="linear",
            nodes=2,
            test_share=0.0,
            standardise=True,
            budget="time=1s",
            **SIMULATED,
        )
        assert own.model_.w.tobytes() == result.w.tobytes()
        np.testing.assert_allclose(own.predict(x), result.model.predict(x))

    def test_clusters(self) -> None:
        own = FedKMeans(3, **FAST).fit(X)
        nearest = np.square(X[:, None] - own.cluster_centers_) / X.var(axis=0)
        assert (own.labels_ == nearest.sum(axis=2).argmin(axis=1)).all()
        assert own.score(X) == pytest.approx(
            -nearest.sum(axis=2).min(axis=1).sum(), rel=1e-4
        )


def test_frame_with_column_of_sites() -> None:
    """Texts are categories, missing cells are filled, and the sites are no feature."""
    rng = np.random.default_rng(0)
    ward = rng.choice(["icu", "surgery"], 300)
    frame = pd.DataFrame(
        {
            "site": rng.choice(["a", "b", "c"], 300),
            "ward": ward,
            "age": np.where(rng.random(300) < 0.1, np.nan, rng.normal(60, 9, 300)),
            "smokes": rng.random(300) < 0.5,
        }
    )
    y = np.where((ward == "icu") ^ (rng.random(300) < 0.1), "ill", "well")
    model = FedClassifier(
        nodes="site", budget="time=1s", impute="mean", settings=SIMULATED
    ).fit(frame, y)
    assert model.score(frame, y) > 0.8
    assert sorted(model.result_.sites) == ["a", "b", "c"]
    assert model.model_.feature_names[:3] == ("ward=icu", "ward=surgery", "age")
    without = frame.drop(columns="site")
    assert (model.predict(without) == model.predict(frame)).all()
    assert model.feature_names_in_.tolist() == ["ward", "age", "smokes"]


class TestWithinScikitLearn:
    def test_clone_keeps_arguments(self) -> None:
        model = FedClassifier("svm", budget="time=3s", settings={"clusters": 2})
        assert clone(model).get_params() == model.get_params()
        with pytest.raises(TypeError, match="rounds"):
            FedClassifier(rounds=3)  # type: ignore[call-arg]

    def test_grid_search_in_pipeline(self) -> None:
        pipeline = make_pipeline(StandardScaler(), FedClassifier(**FAST))
        grid = {"fedclassifier__step_size": [1e-6, 0.1]}
        search = GridSearchCV(pipeline, grid, cv=2).fit(X, Y)
        assert search.best_params_ == {"fedclassifier__step_size": 0.1}
        assert search.best_score_ > 0.9

    def test_sites_are_left_out_in_turn(self) -> None:
        scores = cross_val_score(
            FedClassifier(**FAST), X, Y, groups=GROUPS, cv=GroupKFold(3)
        )
        assert scores.min() > 0.85

    def test_chosen_threshold(self) -> None:
        """A lower threshold finds more of the rarer class."""
        model = FedClassifier(**FAST).fit(X, Y)
        sure = FixedThresholdClassifier(model, threshold=0.9).fit(X, Y)
        assert (sure.predict(X) == (model.predict_proba(X)[:, 1] >= 0.9)).all()


class TestClassWeight:
    RARE = np.concatenate([np.flatnonzero(Y == 1), np.flatnonzero(Y == 0)[:20]])

    def recall(self, weight: Any, model: str = "softmax") -> float:
        x = X[self.RARE][:, :3]
        y = Y[self.RARE]
        fitted = FedClassifier(model, class_weight=weight, **FAST).fit(x, y)
        return float((fitted.predict(x)[y == 0] == 0).mean())

    @pytest.mark.parametrize("model", ["softmax", "mlp"])
    def test_weight_finds_more_of_a_class(self, model: str) -> None:
        assert self.recall("balanced", model) > self.recall(None, model)

    def test_balanced_weights_by_hand(self) -> None:
        """357 and 20 samples: 377 / (2 · 357) and 377 / (2 · 20)."""
        weights = {0: 377 / 40, 1: 377 / 714}
        assert self.recall(weights) == self.recall("balanced")

    def test_unsuitable_weights_are_refused(self) -> None:
        with pytest.raises(ValueError, match="class_weight has 7, which is no class of y"):
            FedClassifier(class_weight={7: 2.0}, **FAST).fit(X, Y)
        with pytest.raises(fedbudget.UserError, match="model svm cannot weight classes"):
            FedClassifier("svm", class_weight="balanced", **FAST).fit(X, Y)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"settings": {"seed": 1}}, "settings contains seed, which arguments of FedCl"),
        ({"settings": {"clusters": 1}}, "settings contains clusters"),
        ({"settings": "seed"}, "settings must be a mapping"),
        ({"class_weight": "equal"}, "class_weight must be balanced, or a mapping"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedClassifier(**{**FAST, **arguments}).fit(X, Y)


class TestUnsuitableFrames:
    FRAME = pd.DataFrame(X[:, :3], columns=["a", "b", "c"])

    def test_missing_cells_name_the_remedy(self) -> None:
        frame = self.FRAME.assign(a=[np.nan, *self.FRAME["a"][1:]])
        with pytest.raises(
            fedbudget.UserError, match=r"a has no value in 1 of 569 rows.*: impute mean"
        ):
            FedClassifier(**FAST).fit(frame, Y)

    def test_columns_of_one_name(self) -> None:
        frame = self.FRAME.set_axis(["a", "a", "c"], axis=1)
        with pytest.raises(fedbudget.UserError, match="two columns have the same name"):
            FedClassifier(**FAST).fit(frame, Y)

    @pytest.mark.parametrize("missing", [None, np.nan, pd.NA])
    def test_rows_without_a_site(self, missing: Any) -> None:
        frame = self.FRAME.assign(site=[missing, *GROUPS[1:]])
        with pytest.raises(fedbudget.UserError, match="nodes has no site for 1 of 569"):
            FedClassifier(nodes="site").fit(frame, Y)
        with pytest.raises(fedbudget.UserError, match="groups has no site for 1 of 569"):
            FedClassifier().fit(X, Y, groups=frame["site"])


def test_more_clusters_than_samples() -> None:
    with pytest.raises(ValueError, match="7 clusters are more than the 5 samples"):
        FedKMeans(7, **FAST).fit(X[:5])


def test_wrong_sites_are_refused() -> None:
    with pytest.raises(fedbudget.UserError, match=r"groups has shape \(3,\)"):
        FedClassifier(**FAST).fit(X, Y, groups=[1, 2, 3])
    with pytest.raises(fedbudget.UserError, match="no column 'ward' of sites"):
        FedClassifier(nodes="ward").fit(X, Y)
