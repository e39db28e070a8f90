"""Settings: accepted and refused values in Python and in files, and lossless writing and
reading.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import fedbudget
from fedbudget import data
from fedbudget.errors import UserError
from fedbudget.models import catalogue
from fedbudget.settings.option import declarations
from fedbudget.settings.settings import DATASETS, MODELS, Settings
from fedbudget.settings.types import SettingsOptions

positive = st.floats(1e-9, 1e9)
any_settings = st.builds(
    Settings,
    model=st.none() | st.text(max_size=20),
    dataset=st.text(max_size=40),
    target=st.none() | st.text(max_size=20),
    test_share=st.floats(0, 1, exclude_max=True),
    nodes=st.none() | st.integers(1, 10**6),
    partition=st.sampled_from([None, "case:1", "case:4", "dirichlet:0.5", "files"]),
    tau=st.just("adaptive") | st.integers(1, 10**6),
    budget=st.sampled_from([("time=15s",), ("time=2min", "bytes=20MB", "money=0.40")]),
    costs=st.sampled_from(["simulated", "measured"]),
    batch_size=st.none() | st.just("full") | st.integers(1, 10**6),
    step_size=positive,
    phi=positive,
    gamma=st.floats(1, 1e6),
    tau_max=st.integers(1, 10**6),
    seed=st.integers(0, 2**63 - 1),
    rounds=st.none() | st.integers(1, 10**6),
    watts=positive,
)


def read(folder: Path, text: str) -> dict[str, object]:
    path = folder / "settings.toml"
    path.write_text(text, encoding="utf-8")
    return Settings.from_toml(path)


@hypothesis_settings(deadline=None)  # writes files
@given(settings=any_settings)
def test_toml_round_trip(
    settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("settings") / "config.toml"
    path.write_text(settings.to_toml(), encoding="utf-8")
    assert Settings(**Settings.from_toml(path)) == settings


def test_file_contains_every_option(tmp_path: Path) -> None:
    files = (
        Settings(
            model="softmax",
            nodes=5,
            partition="case:1",
            batch_size=100,
            rounds=9,
            until=("loss=0.3",),
            patience=20,
            target="y",
            drop=("id", "size, m2"),
            categorical=("ward",),
            impute="median",
            missing=("<0.5",),
            class_weights=(1.0, 5.0),
            classes=("well", "ill"),
            standardise=False,
            data_dir="/data",
            train_samples=1000,
            test_samples=100,
            speeds=(4.0, 1.0),
            drift_correction=True,
            delta="gradient",
            phi=0.01,
            step_size=0.1,
            step_fall=0.35,
            min_nodes=3,
            round_timeout=2.5,
            compress="8-bit",
            max_share=0.4,
            combine="clipped",
            attack="noise",
            attackers=2,
            workload="by-speed",
        ),
        Settings(
            update="fedadam",
            server_step_size=0.1,
            server_momentum=0.9,
            server_beta2=0.99,
            server_epsilon=1e-3,
            proximal=0.01,
        ),
        Settings(local_step="dog", tau=10),
        Settings(
            budget=("privacy=4",),
            privacy_delta=1e-6,
            privacy_noise="secret",
            privacy_unit="sample",
            schema="schema.toml",
            privacy_ledger="ward.json",
        ),
        Settings(secure_aggregation=True, secure_threshold=0.75, validation=0.2),
    )
    written = {name for each in files for name in read(tmp_path, each.to_toml())}
    assert written == {field.name for field in fields(Settings)}
    assert "step-size = 0.01" in Settings(step_size=0.01).to_toml().splitlines()


def test_file_may_contain_some_options(tmp_path: Path) -> None:
    assert read(tmp_path, "nodes = 7\nbatch-size = 'full'\n") == {
        "nodes": 7,
        "batch_size": "full",
    }


def test_file_values_are_converted(
    tmp_path: Path,
) -> None:
    """A single limit needs no list, and an integer is accepted for a float."""
    settings = read(tmp_path, "budget = 'time=3s'\nphi = 1\n")
    assert settings["budget"] == ("time=3s",)
    assert (settings["phi"], type(settings["phi"])) == (1.0, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node = 5", r"unknown key 'node'; did you mean nodes\?"),
        ("xyz = 5", "unknown key 'xyz'; known are model, dataset, .*step-size"),
        ("step_size = 0.1", r"unknown key 'step_size'; did you mean step-size\?"),
        ("nodes = 'five'", "nodes must be a whole number of at least 1, not 'five'"),
        ("nodes = 5.0", r"nodes must be a whole number of at least 1, not 5\.0"),
        ("nodes = true", "nodes must be a whole number of at least 1, not True"),
        ("tau = [1]", r"tau must be adaptive or a whole number of at least 1, not \[1\]"),
        ("phi = 'much'", "phi must be a positive number, not 'much'"),
        ("drift-correction = 1", "drift-correction must be true or false, not 1"),
        ("model = 3", "model must be a text, not 3"),
        ("budget = 15", "budget must be a text or a list of texts, not 15"),
        ("budget = [15, 20]", r"budget must be a text or a list of texts, not \[15, 20\]"),
        ("[run]\nnodes = 5", "unknown key 'run'"),
        ("nodes = ", "is not valid TOML"),
    ],
)
def test_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """The message names the file and the key."""
    with pytest.raises(UserError, match=rf"settings\.toml.*{message}"):
        read(tmp_path, text)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"none\.toml cannot be read: No such file or directory"
    ):
        Settings.from_toml(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"binary\.toml is not valid TOML"):
        Settings.from_toml(tmp_path / "binary.toml")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tau": 0}, "tau must be adaptive or a whole number of at least 1, not 0"),
        (
            {"tau": "fast"},
            "tau must be adaptive or a whole number of at least 1, not 'fast'",
        ),
        ({"phi": 0.0}, "phi must be a positive number, not 0"),
        ({"gamma": 0.9}, "gamma must be a number of at least 1, not 0.9"),
        ({"tau_max": 0}, "tau_max must be a whole number of at least 1, not 0"),
        ({"budget": ()}, "a run needs a budget"),
        ({"budget": ("time=1s", "time=2s")}, "budget time is given twice"),
        ({"partition": "case:5"}, "case 5 does not exist"),
        ({"partition": "half"}, "partition 'half' is not understood"),
        ({"costs": "guessed"}, "costs must be simulated or measured, not 'guessed'"),
        ({"step_size": 0.0}, "step_size must be auto or a positive number, not 0"),
        (
            {"step_size": float("nan")},
            "step_size must be auto or a positive number, not nan",
        ),
        (
            {"step_size": float("inf")},
            "step_size must be auto or a positive number, not inf",
        ),
        (
            {"step_size": "large"},
            "step_size must be auto or a positive number, not 'large'",
        ),
        (
            {"batch_size": "half"},
            "batch_size must be full or a whole number of at least 1, not 'half'",
        ),
        ({"nodes": 0}, "nodes must be a whole number of at least 1, not 0"),
        ({"nodes": "5"}, "nodes must be a whole number of at least 1, not '5'"),
        ({"rounds": 2.5}, r"rounds must be a whole number of at least 1, not 2\.5"),
        ({"seed": True}, "seed must be a whole number of at least 0, not True"),
        (
            {"speeds": ["fast"]},
            r"speeds must be a list of numbers or a text, not \['fast'\]",
        ),
        (
            {"speeds": "fast"},
            r"speeds must be a number for each node, such as 4,4,1,1,1, "
            r"or lognormal:SPREAD .* 'fast'",
        ),
        ({"speeds": "lognormal:9"}, "a spread of at most 5, not 'lognormal:9'"),
        ({"watts": -1}, "watts must be a number of at least 0, not -1"),
        (
            {"test_share": 1.0},
            r"test_share must be a number of at least 0 and below 1, not 1\.0",
        ),
        (
            {"method": "papr"},
            r"method must be accelerated, frugal, paper, .*; did you mean paper\?",
        ),
        ({"rounds": 0}, "rounds must be a whole number of at least 1, not 0"),
        ({"delta": "loss"}, "delta must be gradient or parameters, not 'loss'"),
        (
            {"participation": 0.0},
            "participation must be a number of more than 0 and at most 1, not 0",
        ),
        (
            {"participation": 1.5},
            "participation must be a number of more than 0 and at most 1, not 1.5",
        ),
        (
            {"update": "fedadm"},
            r"update must be average, accelerate, .*; did you mean fedadam\?",
        ),
        (
            {"step_fall": 1.5},
            r"step_fall must be a number of at least 0 and at most 1, not 1\.5",
        ),
        ({"seed": -1}, "seed must be a whole number of at least 0, not -1"),
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Settings(**wrong)  # type: ignore[arg-type]


def test_numpy_numbers_are_converted() -> None:
    values: dict[str, Any] = {"nodes": np.int64(4), "step_size": np.float64(0.5)}
    settings = Settings(**values, speeds=[np.float32(2), 1])  # type: ignore[arg-type]
    assert settings == Settings(nodes=4, step_size=0.5, speeds=(2.0, 1.0))
    assert [type(value) for value in (settings.nodes, settings.step_size)] == [int, float]


def test_budget_may_be_one_text() -> None:
    assert Settings(budget="time=3s") == Settings(budget=("time=3s",))  # type: ignore[arg-type]
    assert Settings(budget="time=3s, bytes=1MB").budget == ("time=3s", "bytes=1MB")  # type: ignore[arg-type]


def test_known_names_match_the_catalogues() -> None:
    assert (tuple(catalogue.MODELS), tuple(data.DATASETS)) == (MODELS, DATASETS)


class TestFromPython:
    def test_arguments_match_the_fields(self) -> None:
        """Some arguments of `train` accept more types than the fields. All others have the
        same type.
        """
        wider = (
            *("model", "dataset", "nodes", "budget"),
            *("until", "step_size", "update", "combine"),
        )
        fields_of = {
            name: declared.type
            for name, declared in declarations(Settings).items()
            if name not in wider
        }
        assert get_type_hints(SettingsOptions, include_extras=True) == fields_of

    def test_case_and_task_are_shortcuts(self) -> None:
        assert Settings.combined({"nodes": 2}, case=3) == Settings(
            partition="case:3", nodes=2
        )
        settings = Settings.combined({"budget": "time=2s", "phi": 1}, task="svm-sgd-mnist")
        assert (settings.dataset, settings.budget, settings.phi) == (
            "mnist",
            ("time=2s",),
            1.0,
        )

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"nodez": 5}, r"unknown argument 'nodez'; did you mean nodes\?"),
            ({"step-size": 5}, r"unknown argument 'step-size'; did you mean step_size\?"),
            ({"nodes": 5.5}, r"^nodes must be a whole number of at least 1, not 5\.5$"),
            ({"step_size": -1}, "^step_size must be auto or a positive number, not -1$"),
            ({"case": 2, "partition": "files"}, "^give case or partition, not both$"),
            ({"model": "sofmax"}, r"unknown model 'sofmax'; did you mean softmax\?"),
            ({"dataset": "digit"}, r"unknown dataset 'digit'; did you mean digits\?"),
            (
                {"task": "svm-sgd-mnst"},
                r"unknown task 'svm-sgd-mnst'; did you mean svm-sgd-mnist\?",
            ),
        ],
    )
    def test_errors_name_the_argument(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError, match=message):
            fedbudget.train(**options)
