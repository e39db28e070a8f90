"""Rounds as steps of TensorBoard's charts: `tensorboard --logdir runs` shows all runs.

The event file is in the run's folder, so that TensorBoard shows the run's name. It is
written by TensorBoard's own EventFileWriter, the base of PyTorch's SummaryWriter, without
PyTorch or TensorFlow. tensorboardX takes ten times as long per round, and on a full disk
it prints a traceback and blocks forever. A resumed run is written again from its first
round; otherwise repeated rounds would appear twice.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbudget.runs.folder import CONFIG, MODEL, PLOT
from fedbudget.runs.summary import SUMMARY
from fedbudget.trackers.tracker import (
    RunInfo,
    TimedRecord,
    final_metrics,
    parameters,
    round_metrics,
)


class TensorBoard:
    """A `tracker.Tracker` that writes TensorBoard events."""

    name = "tensorboard"

    def __init__(self) -> None:
        self._last_round = 0
        self._folder: Path
        self._writer: Any

    def start(self, run: RunInfo) -> None:
        from tensorboard.summary.writer import event_file_writer  # slow to import

        for old in run.folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._folder = run.folder
        self._writer = event_file_writer.EventFileWriter(str(run.folder))
        texts = (_text("title", run.title), _text("config", _code(run.folder / CONFIG)))
        self._write(0, _hyperparameters(run), *texts)

    def rounds(self, records: Sequence[TimedRecord]) -> None:
        for when, record in records:
            self._last_round = record.round
            self._write(record.round, *_scalars(round_metrics(record)), when=when)
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            values = [
                *_scalars(final_metrics(summary)),
                _text("summary", _code(self._folder / SUMMARY)),
                _text("model", str((self._folder / MODEL).resolve())),
            ]
            if (self._folder / PLOT).exists():
                values.append(_image("plot", self._folder / PLOT))
            self._write(self._last_round, *values)
        self._write(self._last_round, _end(failed=summary is None))
        self._writer.close()

    def _write(self, step: int, *values: Any, when: float | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        when = time.time() if when is None else when
        self._writer.add_event(
            Event(wall_time=when, step=step, summary=Summary(value=values))
        )


# Values of a summary.


def _scalars(metrics: Mapping[str, float]) -> list[Any]:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]


def _text(name: str, markdown: str) -> Any:
    from tensorboard.plugins.text.summary_v2 import text_pb

    (value,) = text_pb(name, markdown).value
    return value


def _code(path: Path) -> str:
    """Return a file's text as a code block of Markdown."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return "".join(f"    {line}\n" for line in lines)


def _image(name: str, path: Path) -> Any:
    from PIL import Image
    from tensorboard.compat.proto.summary_pb2 import Summary

    with Image.open(path) as image:
        encoded = Summary.Image(
            width=image.width,
            height=image.height,
            colorspace=len(image.getbands()),
            encoded_image_string=path.read_bytes(),
        )
    return Summary.Value(tag=name, image=encoded)


def _hyperparameters(run: RunInfo) -> Any:
    """Return the settings, for TensorBoard's table that compares runs."""
    from tensorboard.plugins.hparams import plugin_data_pb2 as plugin

    start = plugin.SessionStartInfo(group_name=run.name, start_time_secs=run.began)
    for name, value in parameters(run.settings).items():
        kind = {bool: "bool_value", str: "string_value"}.get(type(value), "number_value")
        setattr(start.hparams[name], kind, value)
    content = plugin.HParamsPluginData(session_start_info=start)
    return _session_value("_hparams_/session_start_info", content)


def _end(*, failed: bool) -> Any:
    from tensorboard.plugins.hparams import plugin_data_pb2 as plugin
    from tensorboard.plugins.hparams.api_pb2 import Status

    status = Status.STATUS_FAILURE if failed else Status.STATUS_SUCCESS
    end = plugin.SessionEndInfo(status=status, end_time_secs=time.time())
    content = plugin.HParamsPluginData(session_end_info=end)
    return _session_value("_hparams_/session_end_info", content)


def _session_value(tag: str, content: Any) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata

    return Summary.Value(
        tag=tag,
        metadata=metadata.create_summary_metadata(content),
        tensor=metadata.NULL_TENSOR,
    )
