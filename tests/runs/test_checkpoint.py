"""Checkpoints: a run resumes from any of them to the same bits, and damaged or hostile
files are refused.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors import safe_open
from safetensors.numpy import load, load_file, save, save_file

from fedbudget import durable_files
from fedbudget.budget.budget import Budget, Ledger
from fedbudget.budget.control import Decision, Estimates, Reason
from fedbudget.budget.step_size import AutoStepState
from fedbudget.errors import UserError
from fedbudget.frozen import updated
from fedbudget.protocol.features.drift import Divergence, DriftPart, DriftState
from fedbudget.protocol.features.estimates import EstimateSlopes, EstimatesState
from fedbudget.protocol.state import AggregatorState, Phase
from fedbudget.runs.checkpoint import Checkpoint, _checksum, safetensors_parts
from fedbudget.runs.folder import CHECKPOINT
from fedbudget.runs.record import RoundRecord
from support.messages import settings_of
from support.methods import (
    METHODS,
    RoundResult,
    bits,
    new_aggregator,
    nodes,
    one_round,
    resume,
    simulated_time,
)
from support.problems import MODELS, costs
from support.small_disk import fill, small_disk


@pytest.mark.parametrize("batch", [None, 5])
@pytest.mark.parametrize(
    ("name", "method"),
    [*((name, "frugal") for name in MODELS), *(("svm", how) for how in METHODS)],
)
def test_resume_gives_same_bits(
    tmp_path: Path, name: str, method: str, batch: int | None
) -> None:
    aggregator = new_aggregator(name, method)
    fleets = nodes(name, batch, METHODS[method].features)
    time = simulated_time()
    aggregator.start()
    results: list[RoundResult] = []
    forks = []
    while aggregator.pending is not None:
        folder = tmp_path / str(len(results))
        folder.mkdir()
        Checkpoint(aggregator.state, lines(results), {"time": time.state()}).save(folder)
        forks.append([fleet.fork() for fleet in fleets])
        results.append(one_round(aggregator, fleets, time))
    assert len(results) > 5
    for number, fork in enumerate(forks):
        checkpoint = Checkpoint.load(tmp_path / str(number), METHODS[method])
        again = resume(checkpoint.state, method)
        time = simulated_time()
        time.restore(checkpoint.engine["time"])
        for expected in results[number:]:
            assert bits(one_round(again, fork, time)) == bits(expected)
        assert again.pending is None
        assert checkpoint.records == lines(results[:number])


def lines(results: list[RoundResult]) -> tuple[str, ...]:
    """The last two records as lines of rounds.jsonl."""
    records = [each.record for each in results[-2:] if each.record is not None]
    return tuple(
        RoundRecord.of(record, accuracy=None, wall=0.5).to_json() for record in records
    )


def example(**other: Any) -> AggregatorState[Any, Any]:
    fields: dict[str, Any] = {
        "phase": Phase.ROUND,
        "features": settings_of(FRUGAL.features),
        "round": 3,
        "tau": 2,
        "became_best": True,
        "stop": False,
        "w": np.array([1.5, -0.0, 1e-40], np.float32),
        "best": np.array([0.1, 0.2, 0.3], np.float32),
        "loss": math.nan,
        "best_loss": 0.1 + 0.2,
        "first_loss": math.inf,
        "worse": True,
        "t": 12,
        "decision": Decision(2, Reason.SEARCH_LIMIT),
        "step_size": AutoStepState(0.1, False, 0.2, 1.3, -5e-324, 0.25),
        "update": None,
        "states": STATES,
        "ledger": LEDGER,
        "stopped_by": None,
    }
    return AggregatorState(**{**fields, **other})


FRUGAL = METHODS["frugal"]
LEDGER = Ledger.open(Budget({"time": 9.5, "bytes": 1e301}), costs([0.1, 0.2], [0.3, 0.0]))
LEDGER = LEDGER.charge(3, costs([0.2, 1e-300], [0.3, 0.1])).charge_extra(
    np.array([1 / 3, 1e300])
)
DRIFT = DriftState(
    mean=np.array([np.nan, np.inf, 3e38], np.float32),
    coming=DriftPart(correct=False, share=0.7),
    divergence=Divergence(math.inf, 1e-300),
    uncorrected=2,
    nodes=np.array([0, 7, 2**40]),
    sizes=np.array([1, 2, 3]),
)
ESTIMATES = EstimatesState(Estimates(1 / 3, 2 / 3, math.nan))
STATES = {"drift": DRIFT, "estimates": ESTIMATES}
RECORD = RoundRecord(
    *(2, 12, 3, "fixed", 0.01, 0.5, 0.25, None, None, None, None, ()),
    {"time": 0.1},
    {"time": 0.2},
    {"time": 1.4},
    3,
    (),
    0.2,
).to_json()
EXAMPLE = Checkpoint(
    example(),
    (RECORD,),
    {"names": {"0": "a “node”"}, "wide": 2**127 + 1, "none": None, "list": [1, 2.5]},
)


def with_drift(**other: Any) -> dict[str, Any]:
    return {"states": {**STATES, "drift": replace(DRIFT, **other)}}


def file_bytes(checkpoint: Checkpoint) -> bytes:
    """Content of the file of a checkpoint."""
    return b"".join(checkpoint.parts())


class TestRoundTrip:
    @pytest.mark.parametrize(
        "other",
        [
            {},
            {
                "features": settings_of([EstimateSlopes()]),
                "states": {"estimates": ESTIMATES},
            },
            with_drift(
                divergence=None,
                nodes=np.empty(0, np.int64),
                sizes=np.empty(0, np.int64),
            ),
            {
                "states": {**STATES, "estimates": EstimatesState()},
                "stopped_by": "time",
                "step_size": AutoStepState(0.1),
            },
            {"phase": Phase.FINAL, "evaluated": True},
            {"decision": Decision(7, "a custom reason")},
        ],
    )
    def test_states_to_the_bit(self, tmp_path: Path, other: dict[str, Any]) -> None:
        checkpoint = replace(EXAMPLE, state=example(**other))
        checkpoint.save(tmp_path)
        read = Checkpoint.load(tmp_path, FRUGAL)
        assert bits(read.state) == bits(checkpoint.state)
        assert (read.records, read.engine) == (checkpoint.records, checkpoint.engine)

    @settings(max_examples=50)
    @given(
        loss=st.floats(),
        level=st.none() | st.floats(),
        spent=st.floats(0, allow_infinity=False),
    )
    def test_random_numbers(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        loss: float,
        level: float | None,
        spent: float,
    ) -> None:
        folder = tmp_path_factory.mktemp("run")
        step_size = AutoStepState(0.1, level=level)
        checkpoint = Checkpoint(
            example(
                loss=loss,
                step_size=step_size,
                ledger=LEDGER.charge_extra(np.array([spent, 0.0])),
            )
        )
        checkpoint.save(folder)
        state = Checkpoint.load(folder, FRUGAL).state
        assert state.ledger.spent.tobytes() == checkpoint.state.ledger.spent.tobytes()
        for one, other in ((state.loss, loss), (state.step_size.level, level)):
            assert (one is None) == (other is None)
            assert str(one) == str(other)  # NaN has many bit patterns, and JSON one

    def test_new_checkpoint_replaces_old(self, tmp_path: Path) -> None:
        EXAMPLE.save(tmp_path)
        replace(EXAMPLE, state=example(t=13)).save(tmp_path)
        assert Checkpoint.load(tmp_path, FRUGAL).state.t == 13
        assert [each.name for each in tmp_path.iterdir()] == [CHECKPOINT]

    def test_safetensors_package_reads_vectors(self, tmp_path: Path) -> None:
        EXAMPLE.save(tmp_path)
        tensors = load_file(tmp_path / CHECKPOINT)
        assert tensors["state.0"].tolist() == EXAMPLE.state.w.tolist()
        assert tensors["state.1"].tolist() == EXAMPLE.state.best.tolist()


def test_non_finite_w_resumes_from_best(tmp_path: Path) -> None:
    """The run resumes from w^f, without an estimate of drift."""
    saved = EXAMPLE.state
    replace(EXAMPLE, state=updated(saved, w=np.array([1, np.inf, 2], np.float32))).save(
        tmp_path
    )
    state = Checkpoint.load(tmp_path, FRUGAL).state
    assert state.w.tobytes() == saved.best.tobytes()
    drift = state.states["drift"]
    assert not drift.mean.any()
    assert not drift.coming.correct
    assert state.ledger.spent.tolist() == saved.ledger.spent.tolist()


def test_full_disk_keeps_the_old(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2**18) as disk:
        EXAMPLE.save(disk)
        fill(disk, but=4096)
        larger = np.zeros(4000, np.float32)
        with pytest.raises(OSError, match="No space left"):
            replace(
                EXAMPLE,
                state=example(w=larger, best=larger, **with_drift(mean=larger)),
            ).save(disk)
        assert file_bytes(Checkpoint.load(disk, FRUGAL)) == file_bytes(EXAMPLE)
        assert {each.name for each in disk.iterdir()} == {CHECKPOINT, "filler"}


class TestDamagedFile:
    """A damaged file is refused, unless it still describes the same state."""

    def check(self, folder: Path, content: bytes) -> bool:
        (folder / CHECKPOINT).write_bytes(content)
        try:
            read = Checkpoint.load(folder, FRUGAL)
        except UserError:
            return False
        assert file_bytes(read) == file_bytes(EXAMPLE)
        return True

    @pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
    def test_truncation(self, tmp_path: Path, every: int) -> None:
        whole = file_bytes(EXAMPLE)
        assert self.check(tmp_path, whole)
        assert not any(
            self.check(tmp_path, whole[:length]) for length in range(0, len(whole), every)
        )

    def test_appended_byte(self, tmp_path: Path) -> None:
        self.check(tmp_path, file_bytes(EXAMPLE) + b"x")

    @pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.slow)])
    def test_flipped_bits(self, tmp_path: Path, every: int) -> None:
        whole = file_bytes(EXAMPLE)
        same = 0
        for place in range(0, 8 * len(whole), every):
            damaged = bytearray(whole)
            damaged[place // 8] ^= 1 << place % 8
            same += self.check(tmp_path, bytes(damaged))
        assert same < 100  # such as spaces at the end of the header

    @settings(deadline=None, max_examples=200)
    @given(data=st.data())
    def test_replaced_bytes(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        whole = file_bytes(EXAMPLE)
        begin = data.draw(st.integers(0, len(whole)))
        end = data.draw(st.integers(begin, len(whole)))
        folder = tmp_path_factory.mktemp("run")
        self.check(folder, whole[:begin] + data.draw(st.binary(max_size=40)) + whole[end:])

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(
            UserError,
            match=r"has no checkpoint\.safetensors: the run cannot be resumed",
        ):
            Checkpoint.load(tmp_path, FRUGAL)

    def test_file_of_another_program(self, tmp_path: Path) -> None:
        for metadata in (None, {"format": "pt"}):
            save_file({"w": np.zeros(3, np.float32)}, tmp_path / CHECKPOINT, metadata)
            with pytest.raises(UserError, match="it is not a checkpoint of fedbudget"):
                Checkpoint.load(tmp_path, FRUGAL)


class TestHostileFile:
    """Files with a correct checksum and impossible contents."""

    def load(self, folder: Path, tensors: dict[str, Any], text: str) -> None:
        (folder / CHECKPOINT).write_bytes(
            save(tensors, {"fedbudget-checkpoint": _checksum(tensors, text) + text})
        )
        with pytest.raises(UserError, match="the checkpoint cannot be read"):
            Checkpoint.load(folder, FRUGAL)

    def parts(self, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        EXAMPLE.save(folder)
        content = (folder / CHECKPOINT).read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        return load_file(folder / CHECKPOINT), json.loads(
            header["__metadata__"]["fedbudget-checkpoint"][8:]
        )

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("best", np.array([1, np.nan, 2], np.float32)),
            ("w", np.zeros(4, np.float32)),
            ("w", np.zeros((3, 1), np.float32)),
            ("w", np.zeros(3)),
            ("states.drift.mean", None),
            ("states.drift.mean", np.zeros(4, np.float32)),
            ("best", None),
            ("extra", np.zeros(3)),
            ("states.drift.nodes", np.array([1, 1, 2])),
            ("states.drift.nodes", np.array([-1, 1, 2])),
            ("states.drift.nodes", np.array([1, 2])),
            ("states.drift.sizes", np.array([1, 0, 2])),
            ("ledger.spent", np.array([-1.0, 0.0])),
            ("ledger.spent", np.array([np.inf, 0.0])),
            ("ledger.spent", np.zeros(1)),
            ("ledger.costs.step", np.array([-1.0, 0.0])),
            ("ledger.previous.aggregation", np.array([np.nan, 0.0])),
            ("ledger.statistics.variance.step", np.array([-1.0, 0.0])),
            ("ledger.statistics.peak", np.array([np.inf, 0.0])),
        ],
    )
    def test_arrays(self, tmp_path: Path, name: str, value: object) -> None:
        tensors, plain = self.parts(tmp_path)
        place = plain["state"]
        for part in name.split("."):
            place = place.get(part, 99)  # an unknown array
        tensors = {**tensors, f"state.{place}": value}
        self.load(
            tmp_path,
            {name: value for name, value in tensors.items() if value is not None},
            json.dumps(plain),
        )

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("phase", "ready"),
            ("phase", "final"),
            ("phase", "over"),
            ("features", {}),
            ("round", -1),
            ("round", 2.0),
            ("round", 9),
            ("tau", 0),
            ("tau", 2**70),
            ("stop", 1),
            ("t", None),
            ("loss", "1"),
            ("loss", True),
            ("first_loss", 10**400),
            ("decision", {"tau": 0, "reason": "fixed"}),
            ("decision", {"tau": 1}),
            ("decision", None),
            ("step_size", {}),
            ("step_size", {**vars(AutoStepState(0.1)), "eta": -0.1}),
            ("step_size", {**vars(AutoStepState(0.1)), "kappa": math.inf}),
            ("update", {}),
            ("states", {}),
            ("states", None),
            ("stopped_by", 3),
            ("extra", 3),
        ],
    )
    def test_state_values(self, tmp_path: Path, name: str, value: object) -> None:
        tensors, plain = self.parts(tmp_path)
        self.load(
            tmp_path,
            tensors,
            json.dumps({**plain, "state": {**plain["state"], name: value}}),
        )

    @pytest.mark.parametrize(
        ("name", "value"), [("share", -0.5), ("share", math.nan), ("correct", 1)]
    )
    def test_drift_values(self, tmp_path: Path, name: str, value: object) -> None:
        tensors, plain = self.parts(tmp_path)
        plain["state"]["states"]["drift"]["coming"][name] = value
        self.load(tmp_path, tensors, json.dumps(plain))

    @pytest.mark.parametrize("states", [{}, {"drift": ESTIMATES, "estimates": ESTIMATES}])
    def test_states_must_match_features(self, tmp_path: Path, states: Any) -> None:
        replace(EXAMPLE, state=example(states=states)).save(tmp_path)
        with pytest.raises(UserError, match="the state of DriftCorrection is missing"):
            Checkpoint.load(tmp_path, FRUGAL)

    @pytest.mark.parametrize(
        "value", [[1, 2, 3], {"rho": -1.0, "beta": 1.0, "delta": 1.0}, {"rho": 1.0}]
    )
    def test_estimates(self, tmp_path: Path, value: object) -> None:
        tensors, plain = self.parts(tmp_path)
        plain["state"]["states"]["estimates"]["values"] = value
        self.load(tmp_path, tensors, json.dumps(plain))

    @pytest.mark.parametrize(
        "other",
        [
            {"version": 1},
            {"version": None},
            {"state": []},
            {"records": 3},
            {"records": ["{}"]},
            {"records": ["no"]},
            {"records": [RECORD, RECORD]},
            {"engine": 1},
        ],
    )
    def test_other_fields(self, tmp_path: Path, other: dict[str, object]) -> None:
        tensors, plain = self.parts(tmp_path)
        self.load(tmp_path, tensors, json.dumps({**plain, **other}))

    @pytest.mark.parametrize("version", [5, 7])
    def test_other_versions(self, tmp_path: Path, version: int) -> None:
        tensors, plain = self.parts(tmp_path)
        self.load(tmp_path, tensors, json.dumps({**plain, "version": version}))
        with pytest.raises(UserError, match="written by another version of fedbudget"):
            Checkpoint.load(tmp_path, FRUGAL)

    @pytest.mark.parametrize("text", ["", "{}", "[]", "null", "no", "[" * 100_000])
    def test_metadata_that_is_no_state(self, tmp_path: Path, text: str) -> None:
        self.load(tmp_path, self.parts(tmp_path)[0], text)


ARRAYS = st.one_of(
    *(
        arrays(kind, array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=4))
        for kind in ("<f4", "<f8", "<i8", "?")
    )
)


@given(
    st.dictionaries(st.text("abc.", min_size=1, max_size=4), ARRAYS, max_size=5),
    st.text(max_size=20),
)
def test_safetensors_parts_are_readable(tensors: dict[str, np.ndarray], text: str) -> None:
    content = b"".join(safetensors_parts(tensors, {"text": text}))
    read = load(content)
    assert read.keys() == tensors.keys()
    for name, values in tensors.items():
        assert read[name].dtype == values.dtype
        assert read[name].shape == values.shape
        assert read[name].tobytes() == values.tobytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header["__metadata__"] == {"text": text}
    assert all(
        header[name]["data_offsets"][0] % max(1, values.dtype.itemsize) == 0
        for name, values in tensors.items()
    )


def test_safetensors_parts_copy_nothing(tmp_path: Path) -> None:
    w = np.arange(5, dtype=np.float32)
    *_, part = parts = safetensors_parts({"w": w}, {})
    assert np.shares_memory(np.frombuffer(part, np.uint8), w)
    durable_files.replace(tmp_path / "file", parts)
    with safe_open(tmp_path / "file", framework="numpy") as file:
        assert file.get_tensor("w").tolist() == w.tolist()


def test_safetensors_parts_refuse_unknown_types() -> None:
    with pytest.raises(KeyError):
        safetensors_parts({"w": np.zeros(2, np.complex64)}, {})
