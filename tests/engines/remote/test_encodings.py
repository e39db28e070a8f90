"""Encodings of costs, tallies, and descriptions of data and tasks: exact round trips, and
refusal of invalid bytes.
"""

import math
import zlib
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbudget.data.agreement import Moments, TableDescription
from fedbudget.data.tables import Layout, LayoutColumn
from fedbudget.engines.remote import wire_pb2 as pb
from fedbudget.engines.remote.encodings import (
    MAX_DESCRIPTION_BYTES,
    MAX_TALLIES_BYTES,
    VERSION,
    describe,
    expected_bytes,
    from_bytes,
    pack_costs,
    pack_tallies,
    plausible_tallies,
    read,
    unpack_costs,
    unpack_tallies,
)
from fedbudget.engines.remote.messages import Hello, Welcome
from fedbudget.engines.remote.task import SamplesDescription, Task
from fedbudget.errors import UserError
from fedbudget.evaluation.metrics import BINS, ClassCounts, ErrorSums, Tally
from fedbudget.models.description import ModelDescription
from fedbudget.protocol.messages import PeerError
from fedbudget.resources.resource import Reading, Usage
from support.messages import COSTS, MODELS, NAMES, SAMPLES, TASK, TASKS
from support.methods import bits

VALID_COSTS = Usage({"time": Reading(0.25, 2.0), "energy": Reading(3.0, 40.0, "host")})


@given(COSTS)
def test_costs_round_trip(costs: Usage) -> None:
    assert unpack_costs(pack_costs(costs)) == costs


def test_evaluation_costs_round_trip() -> None:
    costs = replace(
        VALID_COSTS, evaluation={"time": Reading(0.0, 0.5), "cpu": Reading(0.0, 0.25)}
    )
    assert unpack_costs(pack_costs(costs)) == costs
    with pytest.raises(PeerError, match=r"cpu \(whole\) is -1"):
        unpack_costs(pack_costs(replace(costs, evaluation={"cpu": Reading(0.0, -1.0)})))


def test_here_flag_is_not_sent() -> None:
    assert unpack_costs(pack_costs(replace(VALID_COSTS, here=True))) == VALID_COSTS


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("whole", math.nan, r"energy \(whole\) is nan"),
        ("whole", math.inf, r"energy \(whole\) is inf"),
        ("step", -0.1, r"energy \(step\) is -0.1"),
        ("step", -math.inf, r"energy \(step\) is -inf"),
        ("host", "x" * 201, "a host name of 201 characters"),
        ("whole", None, "cannot be read"),
        ("whole", "long", "cannot be read"),
        ("host", 1.0, "cannot be read"),
    ],
)
def test_invalid_readings_are_refused(field: str, value: Any, reason: str) -> None:
    energy = replace(VALID_COSTS.readings["energy"], **{field: value})
    with pytest.raises(PeerError, match=reason):
        unpack_costs(pack_costs(Usage({**VALID_COSTS.readings, "energy": energy})))


@pytest.mark.parametrize("name", ["", "x" * 201, "two words", "émile"])
def test_invalid_resource_names_are_refused(name: str) -> None:
    with pytest.raises(PeerError, match="is not a name of a resource"):
        unpack_costs(pack_costs(Usage({**VALID_COSTS.readings, name: Reading(1.0, 1.0)})))


TIME = ("time", 0.1, 0.5, "")


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "without the time"),
        ([TIME, TIME], "time is read twice"),
        (
            [TIME, *(("a" * count, 0.0, 0.0, "") for count in range(1, 65))],
            "costs of 65 readings",
        ),
        ([TIME] * 2000, "costs of .* bytes"),
        ([TIME[:3]], "cannot be read"),
    ],
)
def test_invalid_cost_rows_are_refused(rows: list[Any], reason: str) -> None:
    with pytest.raises(PeerError, match=reason):
        unpack_costs(msgspec.msgpack.encode([rows, []]))


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", msgspec.msgpack.encode([1.0]), b"\x91" * 1000]
)
def test_invalid_cost_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(PeerError):
        unpack_costs(data)


def tally_of(seed: int, samples: int, classes: int, *, scored: bool = True) -> Tally:
    rng = np.random.default_rng(seed)
    actual, predicted = rng.integers(0, classes, samples), rng.integers(0, classes, samples)
    scores = rng.normal(size=(samples, 1 if classes == 2 else classes)) if scored else None
    return Tally(
        samples, 0.25, ClassCounts.of(actual, predicted, classes, scores), own={"own": 3.5}
    )


def same_tally(one: Tally, other: Tally) -> bool:
    return str(_as_lists(one)) == str(_as_lists(other))


def _as_lists(tally: Tally) -> list[Any]:
    counts = tally.classes
    arrays = (
        []
        if counts is None
        else [counts.actual, counts.predicted, counts.right, counts.scores]
    )
    lists = [each if each is None else each.tolist() for each in arrays]
    return [tally.samples, tally.loss, lists, tally.errors, tally.own]


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 1000), st.integers(1, 300), st.sampled_from([2, 3, 10]), st.booleans()
)
def test_class_counts_round_trip(
    seed: int, samples: int, classes: int, scored: bool
) -> None:
    tally = tally_of(seed, samples, classes, scored=scored)
    (result,) = unpack_tallies(pack_tallies([tally]), 1)
    assert same_tally(result, tally)


def test_error_sums_round_trip() -> None:
    """NaN and infinity included."""
    errors = ErrorSums(-3.0, 2.0, 1.0, 0.5), ErrorSums(1.0, 0.0, np.nan, np.inf)
    tallies = [Tally(5, 0.5, errors=errors[0]), Tally(5, np.inf, errors=errors[1])]
    assert all(map(same_tally, unpack_tallies(pack_tallies(tallies), 2), tallies))


def test_no_tallies_take_no_bytes() -> None:
    assert pack_tallies([]) == b""
    assert unpack_tallies(b"", 1) == ()


def test_long_histograms_are_omitted() -> None:
    tally = tally_of(1, 5_000, 100)
    data = pack_tallies([tally])
    assert len(data) <= MAX_TALLIES_BYTES
    (result,) = unpack_tallies(data, 1)
    assert result.classes is not None
    assert result.classes.scores is None
    assert result.metrics()["f1"] == tally.metrics()["f1"]


@pytest.mark.parametrize(("samples", "classes"), [(60, 2), (300, 10), (5000, 3), (100, 0)])
def test_tally_size_matches_estimate(samples: int, classes: int) -> None:
    errors = ErrorSums(1.1, 2.2, 3.3, 4.4)
    tally = tally_of(0, samples, classes) if classes else Tally(samples, 0.1, errors=errors)
    assert 0.3 < len(pack_tallies([tally])) / expected_bytes(samples, classes) < 1.5


def class_counts(**changed: Any) -> ClassCounts:
    scores = np.zeros((1, 2, BINS), np.int64)
    scores[0, 0, 3], scores[0, 1, 7] = 6, 4
    given: dict[str, Any] = {
        "actual": [6, 4],
        "predicted": [5, 5],
        "right": [4, 3],
        "scores": scores,
        **changed,
    }
    return ClassCounts(*(np.array(each, np.int64) for each in given.values()))


WRONG_TOTAL = np.array([[[1] + [0] * (BINS - 1), [4] + [0] * (BINS - 1)]])


@pytest.mark.parametrize(
    ("tally", "reason"),
    [
        (Tally(0, 0.1), "of 0 samples"),
        (Tally(2**41, 0.1), "of 2199023255552 samples"),
        (Tally(9, 0.1, class_counts()), "class counts that do not match"),
        (Tally(10, 0.1, class_counts(actual=[-1, 11])), "counts from -1 to 11"),
        (Tally(10, 0.1, class_counts(right=[6, 3])), "class counts that do not match"),
        (Tally(10, 0.1, class_counts(predicted=[6, 5])), "class counts that do not match"),
        (
            Tally(10, 0.1, class_counts(actual=[10], predicted=[10], right=[3])),
            "counts of 1, 1 and 1 classes",
        ),
        (Tally(10, 0.1, class_counts(right=[4, 3, 0])), "counts of 2, 2 and 3 classes"),
        (
            Tally(10, 0.1, class_counts(scores=np.zeros((3, 2, BINS)))),
            "histograms of 3 scores",
        ),
        (
            Tally(10, 0.1, class_counts(scores=WRONG_TOTAL)),
            "do not match the number of samples",
        ),
        (
            Tally(10, 0.1, class_counts(actual=[5, 5], predicted=[5, 5])),
            "do not match the samples of each class",
        ),
        (Tally(10, 0.1, errors=ErrorSums(np.nan, 1, 1, 1)), "the sum nan"),
        (Tally(10, 0.1, errors=ErrorSums(1, -1, 1, 1)), "the spread -1"),
        (Tally(10, 0.1, errors=ErrorSums(1, 1, -1, 1)), "errors of -1"),
        (Tally(10, 0.1, own={"x" * 201: 1.0}), "long names"),
        (
            Tally(10, 0.1, own={str(number): 1.0 for number in range(65)}),
            "65 custom metrics",
        ),
    ],
)
def test_invalid_tallies_are_refused(tally: Tally, reason: str) -> None:
    with pytest.raises(PeerError, match=reason):
        unpack_tallies(pack_tallies([tally]), 1)


def test_number_of_tallies_must_match() -> None:
    tally = replace(tally_of(0, 20, 3), own={})
    for expected in (0, 2):
        with pytest.raises(PeerError, match=f"1 tallies instead of {expected}"):
            unpack_tallies(pack_tallies([tally]), expected)


@pytest.mark.parametrize(
    "data",
    [
        b"\x00",
        zlib.compress(b"\xff"),
        zlib.compress(msgspec.msgpack.encode([[1, "a"]])),
        b"\x01" * (MAX_TALLIES_BYTES + 1),
        zlib.compress(b"\x00" * 2**26),
    ],
)
def test_invalid_tally_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(PeerError, match="tallies"):
        unpack_tallies(data, 1)


@pytest.mark.parametrize(
    ("changes", "plausible"),
    [
        ({}, True),
        ({"loss": 1e9}, True),
        ({"loss": math.nan}, False),
        ({"classes": None}, False),
        ({"samples": 400_000}, True),
        ({"samples": 2**40 - 1}, False),
    ],
)
def test_implausible_tally_is_ignored(changes: dict[str, Any], plausible: bool) -> None:
    """One node of three cannot distort the evaluation."""
    honest = [(tally_of(seed, 50, 3),) for seed in (1, 2)]
    other = (replace(tally_of(3, 50, 3), **changes),)
    assert plausible_tallies([honest[0], other, (), honest[1]]) == [
        True,
        plausible,
        True,
        True,
    ]


def test_two_tallies_are_both_kept() -> None:
    """Two nodes have no majority."""
    diverged = (replace(tally_of(1, 50, 3), loss=math.nan),)
    assert plausible_tallies([diverged, (), (tally_of(2, 50, 3),)]) == [True, True, True]


def test_diverged_majority_is_kept() -> None:
    diverged = [(replace(tally_of(seed, 50, 3), loss=math.nan),) for seed in (1, 2)]
    assert plausible_tallies([*diverged, (tally_of(3, 50, 3),)]) == [True, True, False]


HELLO = Hello("me", SamplesDescription((5,), (2, 3), features=Moments(*np.ones((2, 6)))))
WELCOME = Welcome("run", TASK, (0, 1))


@settings(deadline=None)
@given(
    NAMES,
    SAMPLES,
    NAMES,
    st.lists(st.integers(0, 2**32 - 1), max_size=8),
    st.none() | NAMES | MODELS,
)
def test_hello_round_trip(
    instance: str, samples: SamplesDescription, run: str, rounds: list[int], model: Any
) -> None:
    hello = Hello(instance, samples, run, tuple(rounds), model)
    assert bits(read(Hello, from_bytes(describe(hello).SerializeToString()))) == bits(hello)


@settings(deadline=None)
@given(NAMES, TASKS, st.sets(st.integers(0, 2**62 - 1), max_size=5))
def test_welcome_round_trip(run: str, task: Task, numbers: set[int]) -> None:
    welcome = Welcome(run, task, tuple(sorted(numbers)))
    assert bits(read(Welcome, from_bytes(describe(welcome).SerializeToString()))) == bits(
        welcome
    )
    assert bits(read(Task, describe(task))) == bits(task)


def test_long_descriptions_are_refused_locally() -> None:
    columns = MAX_DESCRIPTION_BYTES // 16 + 1
    many = SamplesDescription(
        (10,), (columns,), features=Moments(np.ones(columns), np.ones(columns))
    )
    with pytest.raises(UserError, match="fewer columns to standardise"):
        describe(Hello("me", many))
    named = SamplesDescription((), (1,), classes=("name" * 40,) * 10_000)
    with pytest.raises(UserError, match="fewer classes"):
        describe(Welcome("run", replace(TASK, samples=named), (0,)))


def with_samples(**other: Any) -> dict[str, Any]:
    return {"samples": replace(HELLO.samples, **other)}


def moments(mean: list[float], deviation: list[float]) -> Moments:
    return Moments(np.array(mean), np.array(deviation))


@pytest.mark.parametrize(
    "other",
    [
        {"instance": "x" * 201},
        {"run": "x" * 201},
        {"rounds": (1,) * 17},
        {"rounds": (-1,)},
        {"rounds": (2**32,)},
        {"rounds": ("1",)},
        {"samples": None},
        with_samples(sizes=()),
        with_samples(sizes=(5, 0)),
        with_samples(sizes=(-5,)),
        with_samples(sizes=(2**40,)),
        with_samples(sizes=(1,) * 5001),
        with_samples(sizes=(True,)),
        with_samples(shape=()),
        with_samples(shape=(0,)),
        with_samples(shape=(-2, -3)),
        with_samples(shape=(1, 1, 1, 1, 6)),
        with_samples(shape=(10**4, 10**5)),
        with_samples(shape=(2**32 - 1,) * 200_000),
        with_samples(stored="object"),
        with_samples(scale=0.0),
        with_samples(scale=-1.0),
        with_samples(scale=math.nan),
        with_samples(scale=math.inf),
        with_samples(values=1),
        with_samples(classes=("",) * 100_001),
        with_samples(classes=("x" * 201,)),
        with_samples(features=moments([1.0] * 5, [1.0] * 6)),
        with_samples(features=moments([math.nan] * 6, [1.0] * 6)),
        with_samples(features=moments([1.0] * 6, [1.0] * 7)),
        with_samples(features=moments([1.0] * 6, [-1.0] * 6)),
        with_samples(features=moments([1.0] * 6, [math.inf] * 6)),
        with_samples(target=moments([1.0, 1.0], [1.0, 1.0])),
    ],
)
def test_invalid_hellos_are_refused(other: dict[str, Any]) -> None:
    assert read(Hello, describe(HELLO)) is not None
    with pytest.raises(PeerError):
        read(Hello, describe(replace(HELLO, **other)))


TABLE = TableDescription(
    ("a", "b"),
    ("number", "category"),
    5,
    np.array([5.0, 0.0]),
    moments([1.0, 0.0], [2.0, 0.0]),
    ({"x": 3, "y": 2},),
    "median",
    np.array([1.5, math.nan]),
    np.array([5.0, 0.0]),
    ("id",),
    "t",
)
NAMED = Hello("me", SamplesDescription((5,), (2,), "float64", table=TABLE))


def test_table_description_round_trip() -> None:
    assert bits(read(Hello, describe(NAMED))) == bits(NAMED)


@pytest.mark.parametrize(
    "other",
    [
        {"names": ("a", "a")},
        {"names": ("a",)},
        {"names": ("a", "b\x1b[2J")},
        {"names": ("a", "x" * 201)},
        {"kinds": ("number",)},
        {"kinds": ("number", "date")},
        {"kinds": ("number", "number")},
        {"rows": 6},
        {"present": np.array([6.0, 0.0])},
        {"present": np.array([-1.0, 0.0])},
        {"present": np.array([1.5, 0.0])},
        {"present": np.array([math.nan, 0.0])},
        {"present": np.array([5.0])},
        {"numbers": moments([1], [2])},
        {"numbers": moments([math.inf, 0], [2, 0])},
        {"categories": ()},
        {"categories": ({"x": 6},)},
        {"categories": ({"x": 0},)},
        {"categories": ({str(number): 1 for number in range(1001)},)},
        {"categories": ({"x" * 201: 1},)},
        {"impute": "guess"},
        {"fills": None},
        {"fills": np.array([math.inf, 0.0])},
        {"weights": np.array([9.0, 0.0])},
    ],
)
def test_invalid_tables_are_refused(other: dict[str, Any]) -> None:
    wrong = replace(NAMED.samples, table=replace(TABLE, **other))
    with pytest.raises(PeerError):
        read(Hello, describe(replace(NAMED, samples=wrong)))


@pytest.mark.parametrize(
    "columns",
    [
        (LayoutColumn("a"),),
        (LayoutColumn("a"), LayoutColumn("a"), LayoutColumn("b")),
        (LayoutColumn("a", fill="x"), LayoutColumn("b", ("x", "y"))),
        (LayoutColumn("a", fill=math.inf), LayoutColumn("b", ("x", "y"))),
        (LayoutColumn("a"), LayoutColumn("b", ("x", "x"))),
        (LayoutColumn("a"), LayoutColumn("b", ("x", "y"), "z")),
        (LayoutColumn("a\n"), LayoutColumn("b", ("x", "y"))),
    ],
)
def test_invalid_layouts_are_refused(columns: tuple[LayoutColumn, ...]) -> None:
    fine = Layout((LayoutColumn("a", fill=0.5), LayoutColumn("b", ("x", "y"), "y")), "t")
    agreed = replace(TASK, samples=SamplesDescription((), (3,), layout=fine))
    assert read(Task, describe(agreed)) == agreed
    with pytest.raises(PeerError):
        read(
            Task,
            describe(
                replace(TASK, samples=replace(agreed.samples, layout=Layout(columns, "t")))
            ),
        )


def with_task(**other: Any) -> dict[str, Any]:
    return {"task": replace(TASK, **other)}


@pytest.mark.parametrize(
    "other",
    [
        {"run": "x" * 201},
        {"numbers": (2**62,)},
        {"numbers": (-1,)},
        {"numbers": (1, 1)},
        {"numbers": (2, 1)},
        {"numbers": tuple(range(5001))},
        {"task": None},
        with_task(model="x" * 201),
        with_task(parameters=0),
        with_task(parameters=2**34 + 1),
        with_task(batch=0),
        with_task(batch=2**32),
        with_task(seed=-1),
        with_task(compress="zip"),
        with_task(tau_max=0),
        with_task(tau_max=10**9 + 1),
        with_task(model_options={str(number): 1 for number in range(101)}),
        with_task(model_options={"x" * 201: 1}),
        with_task(model_options={"name": "x" * 201}),
        with_task(model_options={"name": math.nan}),
        with_task(model_options={"name": True}),
        with_task(model_options={"name": [1]}),
        with_task(model_options={"name": None}),
        with_task(request=None),
        with_task(readings=("cpu", "two words")),
        with_task(readings=("x" * 201,)),
        with_task(readings=("cpu",) * 65),
        with_task(readings=(1,)),
        with_task(samples=SamplesDescription((), (0,))),
    ],
)
def test_invalid_welcomes_are_refused(other: dict[str, Any]) -> None:
    assert read(Welcome, describe(WELCOME)) is not None
    with pytest.raises(PeerError):
        read(Welcome, describe(replace(WELCOME, **other)))


@pytest.mark.parametrize("version", [0, VERSION - 1, VERSION + 1])
def test_other_protocol_versions_are_refused(version: int) -> None:
    """Version 1 has another hello, but the same first field."""
    description = describe(HELLO)
    description.version = version
    with pytest.raises(
        PeerError,
        match=rf"uses version {version} of the protocol, and this is version {VERSION}",
    ):
        read(Hello, description)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xc1",
        b"\x80",
        msgspec.msgpack.encode({"instance": 1}),
        b"\x91" * 100_000 + b"\x90",
    ],
)
def test_invalid_descriptions_are_refused(value: bytes) -> None:
    kinds: list[Any] = [Hello, Welcome, Task]
    for kind in kinds:
        with pytest.raises(PeerError, match="cannot be read"):
            read(kind, pb.Description(version=VERSION, value=value))
    with pytest.raises(PeerError, match="bytes that are not a description"):
        from_bytes(b"\xff")


def test_model_names_are_printable() -> None:
    """Logs and terminals show them."""
    hello = replace(HELLO, model=ModelDescription("net\x1b[2J", "TorchModel", (), "", ""))
    with pytest.raises(PeerError, match=r"\$\.model\.name"):
        read(Hello, describe(hello))
