"""TensorBoard shows the data of the run folder, read back with its own reader."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fedbudget
from fedbudget.runs.folder import Run
from fedbudget.trackers.tensorboard import TensorBoard
from fedbudget.trackers.tracker import RunInfo, TimedRecord, parameters
from support.commands import run_command

ROUNDS = 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    fedbudget.train(
        model="svm",
        dataset="digits",
        case=2,
        budget=["time=1000s", "bytes=1GB"],
        rounds=ROUNDS,
        spend_all=True,
        out=folder,
        track="tensorboard",
    )
    return folder


@pytest.fixture(scope="module")
def events(folder: Path) -> Any:
    return read(folder)


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = {"scalars": 0, "tensors": 0, "images": 0}
    return EventAccumulator(str(folder), size_guidance=everything).Reload()


def float32(value: float) -> float:
    values: float = struct.unpack("f", struct.pack("f", value))[0]
    return values


def text(events: Any, tag: str) -> str:
    (event,) = events.Tensors(tag)
    return str(event.tensor_proto.string_val[0].decode())


def test_rounds_are_steps(folder: Path, events: Any) -> None:
    lines = [
        json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()
    ]
    assert len(lines) == ROUNDS + 1
    expected = {
        name: [(line["round"], line[name]) for line in lines if line.get(name) is not None]
        for name in _PLAIN
    }
    expected |= {
        name: [(line["round"], line[name]) for line in lines[:-1]]
        for name in ("tau", "eta")
    }
    for kind in ("spent", "c", "b"):
        for resource in ("time", "bytes"):
            expected[f"{kind}/{resource}"] = [
                (line["round"], line[kind][resource]) for line in lines
            ]
    evaluated = [line for line in lines if "metrics" in line]
    for name in evaluated[0]["metrics"]:
        expected[f"test/{name}"] = [
            (line["round"], line["metrics"][name]) for line in evaluated
        ]
    rounds = {tag for tag in events.Tags()["scalars"] if not tag.startswith("final/")}
    assert rounds == expected.keys()
    for tag, points in expected.items():
        values = [(event.step, event.value) for event in events.Scalars(tag)]
        assert values == [(step, float32(value)) for step, value in points], tag


_PLAIN = (
    "loss",
    "best_loss",
    "validation",
    "validation_best",
    "accuracy",
    "rho",
    "beta",
    "delta",
    "nodes",
)


def test_summary_and_settings(folder: Path, events: Any) -> None:
    run = Run.open(folder)
    assert run.summary is not None
    (loss,) = events.Scalars("final/loss")
    assert (loss.step, loss.value) == (ROUNDS + 1, float32(run.summary["loss"]))
    assert text(events, "model") == str(folder / "model.safetensors")
    assert text(events, "title").startswith("svm on digits, 5 nodes, case:2")
    config = "".join(
        line.removeprefix("    ")
        for line in text(events, "config").splitlines(keepends=True)
    )
    assert config == (folder / "config.toml").read_text()


def test_hyperparameters(folder: Path, events: Any) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = events.PluginTagToContent("hparams")
    start = HParamsPluginData.FromString(
        content["_hparams_/session_start_info"]
    ).session_start_info
    assert start.hparams["partition"].string_value == "case:2"
    assert start.hparams["rounds"].number_value == ROUNDS
    info = RunInfo(folder, "", Run.open(folder).settings, 0.0)
    assert set(start.hparams) == parameters(info.settings).keys()
    end = HParamsPluginData.FromString(
        content["_hparams_/session_end_info"]
    ).session_end_info
    assert end.status == 1  # success


def test_plot_equals_the_file(folder: Path, events: Any) -> None:
    (image,) = events.Images("plot")
    assert image.encoded_image_string == (folder / "plot.png").read_bytes()
    from matplotlib.image import imread

    height, width, _ = imread(folder / "plot.png").shape
    assert (image.width, image.height) == (width, height)


def test_run_has_the_folder_name(folder: Path) -> None:
    from tensorboard.backend.event_processing.plugin_event_multiplexer import (
        EventMultiplexer,
    )

    values = EventMultiplexer().AddRunsFromDirectory(str(folder.parent))
    assert list(values.Reload().Runs()) == ["one"]


def test_resumed_run_has_no_duplicates(tmp_path: Path) -> None:
    result = fedbudget.train(
        budget="time=1000s", rounds=4, out=tmp_path / "run", track="tensorboard"
    )
    run = Run.open(tmp_path / "run")
    again = TensorBoard()
    again.start(RunInfo(run.path, "", run.settings, 0.0))
    again.rounds([TimedRecord(record.wall, record) for record in result.rounds])
    again.finish(run.summary)
    assert [event.step for event in read(tmp_path / "run").Scalars("loss")] == list(
        range(1, 6)
    )


def test_command_line_trackers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    command = f"run --rounds 3 --budget time=1000s --out {out} --json --track".split()
    refused, _, err = run_command(capsys, *command, "sundial")
    assert (refused, (tmp_path / "run").exists()) == (2, False)
    assert (
        err
        == "fedbudget: unknown tracker 'sundial'; known are mlflow, tensorboard, wandb\n"
    )
    done, printed, _ = run_command(capsys, *command, "tensorboard")
    assert done == 0
    assert json.loads(printed)["aggregations"] == 3
    assert [event.step for event in read(tmp_path / "run").Scalars("tau")] == [1, 2, 3]


def test_works_without_pytorch_and_tensorflow(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("seed = 1\n")
    program = (
        "import sys\n"
        # Importing either raises an error.
        "sys.modules.update(torch=None, tensorflow=None)\n"
        "from pathlib import Path\n"
        "from fedbudget.settings.settings import Settings\n"
        "from fedbudget.trackers.tensorboard import TensorBoard\n"
        "from fedbudget.trackers.tracker import RunInfo\n"
        "tracker = TensorBoard()\n"
        "tracker.start(RunInfo(Path(sys.argv[1]), 'a title', Settings(), 0.0))\n"
        "tracker.finish(None)\n"
    )
    subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(tmp_path)], check=True
    )
    assert text(read(tmp_path), "title") == "a title"
