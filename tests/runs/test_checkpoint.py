"""Checkpoints: a run goes on from any of them to the same bits, and nothing that is not one is taken for one."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save, save_file

from fedbudget.control import Decision, Estimates, Reason
from fedbudget.errors import UserError
from fedbudget.protocol.drift import Divergence
from fedbudget.protocol.memory import Memory
from fedbudget.protocol.messages import Drift
from fedbudget.runs.checkpoint import CHECKPOINT, Checkpoint, _checksum
from fedbudget.runs.record import RoundRecord
from fedbudget.step_size import StepSizeState
from support.methods import METHODS, Happened, bits, new_aggregator, nodes, one_round, recall, simulated_time
from support.problems import MODELS, costs
from support.small_disk import fill, small_disk


@pytest.mark.parametrize("batch", [None, 5])
@pytest.mark.parametrize(
    ("name", "method"), [*((name, "frugal") for name in MODELS), *(("svm", how) for how in METHODS)]
)
def test_a_run_goes_on_from_any_checkpoint_to_the_same_bits(
    tmp_path: Path, name: str, method: str, batch: int | None
) -> None:
    aggregator, fleets, time = new_aggregator(name, method), nodes(name, batch), simulated_time()
    aggregator.start()
    happened: list[Happened] = []
    forks = []
    while aggregator.pending is not None:
        folder = tmp_path / str(len(happened))
        folder.mkdir()
        Checkpoint(aggregator.memory(), lines(happened), {"time": time.state()}).save(folder)
        forks.append([fleet.fork() for fleet in fleets])
        happened.append(one_round(aggregator, fleets, time))
    assert len(happened) > 5
    for number, own in enumerate(forks):
        checkpoint = Checkpoint.load(tmp_path / str(number))
        again, time = recall(checkpoint.memory, method), simulated_time()
        time.restore(checkpoint.engine["time"])
        for expected in happened[number:]:
            assert bits(one_round(again, own, time)) == bits(expected)
        assert again.pending is None
        assert checkpoint.records == lines(happened[:number])


def lines(happened: list[Happened]) -> tuple[str, ...]:
    """The last two records, as rounds.jsonl has them."""
    records = [each.record for each in happened[-2:] if each.record is not None]
    return tuple(RoundRecord.of(record, accuracy=None, wall=0.5).to_json() for record in records)


def memory(**other: Any) -> Memory:
    known: dict[str, Any] = {
        "state": "round",
        "round": 3,
        "tau": 2,
        "became_best": True,
        "stop": False,
        "w": np.array([1.5, -0.0, 1e-40], np.float32),
        "best": np.array([0.1, 0.2, 0.3], np.float32),
        "mean": np.array([np.nan, np.inf, 3e38], np.float32),
        "loss": math.nan,
        "best_loss": 0.1 + 0.2,
        "first_loss": math.inf,
        "worse": True,
        "t": 12,
        "decision": Decision(2, Reason.SEARCH_LIMIT),
        "pace": StepSizeState(0.1, 0.2, False, 1.3, -5e-324, 0.25),
        "estimates": Estimates(1 / 3, 2 / 3, math.nan),
        "drift": Drift(correct=False, share=0.7),
        "divergence": Divergence(math.inf, 1e-300),
        "uncorrected": 2,
        "nodes": np.array([0, 7, 2**40]),
        "sizes": np.array([1, 2, 3]),
        "costs": costs([0.1, 0.2], [0.3, 0.0]),
        "spent": np.array([1 / 3, 1e300]),
        "stopped_by": None,
    }
    return Memory(**{**known, **other})


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
    memory(), (RECORD,), {"names": {"0": "a “node”"}, "wide": 2**127 + 1, "none": None, "list": [1, 2.5]}
)


class TestWhatIsWrittenIsRead:
    @pytest.mark.parametrize(
        "other",
        [
            {},
            {"mean": None, "drift": None, "divergence": None},
            {"estimates": None, "stopped_by": "time", "pace": StepSizeState(0.1, 0.1)},
            {"state": "final", "tau": 0, "nodes": np.empty(0, np.int64), "sizes": np.empty(0, np.int64)},
        ],
    )
    def test_to_the_last_bit(self, tmp_path: Path, other: dict[str, Any]) -> None:
        checkpoint = replace(EXAMPLE, memory=memory(**other))
        checkpoint.save(tmp_path)
        found = Checkpoint.load(tmp_path)
        assert bits(found.memory) == bits(checkpoint.memory)
        assert (found.records, found.engine) == (checkpoint.records, checkpoint.engine)
        assert type(found.memory.decision.reason) is Reason

    @settings(max_examples=50)
    @given(loss=st.floats(), level=st.none() | st.floats(), spent=st.floats(0, allow_infinity=False))
    def test_any_number(
        self, tmp_path_factory: pytest.TempPathFactory, loss: float, level: float | None, spent: float
    ) -> None:
        folder = tmp_path_factory.mktemp("run")
        pace = StepSizeState(0.1, 0.1, level=level)
        checkpoint = Checkpoint(memory(loss=loss, pace=pace, spent=np.array([spent, 0.0])))
        checkpoint.save(folder)
        found = Checkpoint.load(folder).memory
        assert found.spent.tobytes() == checkpoint.memory.spent.tobytes()
        for one, other in ((found.loss, loss), (found.pace.level, level)):
            assert (one is None) == (other is None)
            assert str(one) == str(other)  # NaN has many bit patterns, and JSON one

    def test_the_newest_takes_the_place_of_the_one_before(self, tmp_path: Path) -> None:
        EXAMPLE.save(tmp_path)
        replace(EXAMPLE, memory=memory(t=13)).save(tmp_path)
        assert Checkpoint.load(tmp_path).memory.t == 13
        assert [each.name for each in tmp_path.iterdir()] == [CHECKPOINT]

    def test_anything_that_reads_safetensors_reads_the_vectors(self, tmp_path: Path) -> None:
        EXAMPLE.save(tmp_path)
        assert load_file(tmp_path / CHECKPOINT)["best"].tolist() == EXAMPLE.memory.best.tolist()


def test_on_a_full_disk_the_old_one_stays(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2**18) as disk:
        EXAMPLE.save(disk)
        fill(disk, but=4096)
        larger = np.zeros(4000, np.float32)
        with pytest.raises(OSError, match="No space left"):
            replace(EXAMPLE, memory=memory(w=larger, best=larger, mean=larger)).save(disk)
        assert Checkpoint.load(disk).to_bytes() == EXAMPLE.to_bytes()
        assert {each.name for each in disk.iterdir()} == {CHECKPOINT, "filler"}


class TestDamage:
    """Whatever is done to the file: it is refused in a line, or it is the same."""

    def check(self, folder: Path, content: bytes) -> bool:
        (folder / CHECKPOINT).write_bytes(content)
        try:
            found = Checkpoint.load(folder)
        except UserError:
            return False
        assert found.to_bytes() == EXAMPLE.to_bytes()
        return True

    @pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
    def test_truncation(self, tmp_path: Path, every: int) -> None:
        whole = EXAMPLE.to_bytes()
        assert self.check(tmp_path, whole)
        assert not any(self.check(tmp_path, whole[:length]) for length in range(0, len(whole), every))

    def test_more_than_there_was(self, tmp_path: Path) -> None:
        self.check(tmp_path, EXAMPLE.to_bytes() + b"x")

    @pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.slow)])
    def test_a_bit(self, tmp_path: Path, every: int) -> None:
        whole = EXAMPLE.to_bytes()
        same = 0
        for place in range(0, 8 * len(whole), every):
            spoilt = bytearray(whole)
            spoilt[place // 8] ^= 1 << place % 8
            same += self.check(tmp_path, bytes(spoilt))
        assert same < 100  # spaces at the end of the header, say

    @settings(deadline=None, max_examples=200)
    @given(data=st.data())
    def test_any_bytes_in_any_place(self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
        whole = EXAMPLE.to_bytes()
        begin = data.draw(st.integers(0, len(whole)))
        end = data.draw(st.integers(begin, len(whole)))
        folder = tmp_path_factory.mktemp("run")
        self.check(folder, whole[:begin] + data.draw(st.binary(max_size=40)) + whole[end:])

    def test_none_at_all(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"has no checkpoint\.safetensors: there is nothing to go on from"):
            Checkpoint.load(tmp_path)

    def test_another_programs_file(self, tmp_path: Path) -> None:
        for metadata in (None, {"format": "pt"}):
            save_file({"w": np.zeros(3, np.float32)}, tmp_path / CHECKPOINT, metadata)
            with pytest.raises(UserError, match="it is not one of fedbudget's"):
                Checkpoint.load(tmp_path)


class TestNothingIsTrusted:
    """Files with a right checksum, made by someone who knows how, with something in them that cannot be."""

    def load(self, folder: Path, tensors: dict[str, Any], text: str) -> None:
        (folder / CHECKPOINT).write_bytes(save(tensors, {"fedbudget-checkpoint": _checksum(tensors, text) + text}))
        with pytest.raises(UserError, match="the checkpoint cannot be read"):
            Checkpoint.load(folder)

    def parts(self, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        EXAMPLE.save(folder)
        content = (folder / CHECKPOINT).read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        return load_file(folder / CHECKPOINT), json.loads(header["__metadata__"]["fedbudget-checkpoint"][8:])

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("w", np.array([1, np.nan, 2], np.float32)),
            ("w", np.zeros(4, np.float32)),
            ("w", np.zeros((3, 1), np.float32)),
            ("w", np.zeros(3)),
            ("mean", None),
            ("best", None),
            ("extra", np.zeros(3)),
            ("nodes", np.array([1, 1, 2])),
            ("nodes", np.array([-1, 1, 2])),
            ("nodes", np.array([1, 2])),
            ("sizes", np.array([1, 0, 2])),
            ("spent", np.array([-1.0, 0.0])),
            ("spent", np.array([np.inf, 0.0])),
            ("spent", np.zeros(1)),
            ("step", np.array([-1.0, 0.0])),
            ("aggregation", np.array([np.nan, 0.0])),
        ],
    )
    def test_arrays(self, tmp_path: Path, name: str, value: object) -> None:
        tensors, found = self.parts(tmp_path)
        tensors = {**tensors, name: value}
        self.load(tmp_path, {name: value for name, value in tensors.items() if value is not None}, json.dumps(found))

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("state", "ready"),
            ("state", "final"),
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
            ("decision", {"tau": 1, "reason": "none that is known"}),
            ("decision", {"tau": 1}),
            ("decision", None),
            ("pace", {}),
            ("drift", None),
            ("drift", {"correct": True, "share": -0.5}),
            ("estimates", [1, 2, 3]),
            ("stopped_by", 3),
            ("extra", 3),
        ],
    )
    def test_numbers(self, tmp_path: Path, name: str, value: object) -> None:
        tensors, found = self.parts(tmp_path)
        self.load(tmp_path, tensors, json.dumps({**found, "memory": {**found["memory"], name: value}}))

    @pytest.mark.parametrize(
        "other",
        [
            {"version": 2},
            {"version": None},
            {"memory": []},
            {"records": 3},
            {"records": ["{}"]},
            {"records": ["no"]},
            {"records": [RECORD, RECORD]},
            {"engine": 1},
        ],
    )
    def test_the_rest(self, tmp_path: Path, other: dict[str, object]) -> None:
        tensors, found = self.parts(tmp_path)
        self.load(tmp_path, tensors, json.dumps({**found, **other}))

    @pytest.mark.parametrize("text", ["", "{}", "[]", "null", "no", "[" * 100_000])
    def test_text_that_is_something_else(self, tmp_path: Path, text: str) -> None:
        self.load(tmp_path, self.parts(tmp_path)[0], text)
