"""Rounds as steps of TensorBoard's charts: `tensorboard --logdir runs` shows all runs that were made with it.

The file of events is in the run's folder itself, so that TensorBoard calls the run by its name. It is written by
TensorBoard's own EventFileWriter, on which PyTorch's SummaryWriter is built too, without PyTorch or TensorFlow. Not by
tensorboardX: it takes ten times as long for a round, and on a full disk it prints a traceback and blocks for ever.
A run that goes on is written anew, from its first round, or rounds that were made again would be in it twice.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbudget.runs.folder import CONFIG, MODEL, PLOT, SUMMARY
from fedbudget.trackers.tracker import RunInfo, TimedRecord, final_metrics, round_metrics


class TensorBoard:
    """See `tracker.Tracker`."""

    name = "tensorboard"

    def __init__(self) -> None:
        self._last = 0  # round
        self._run_info: RunInfo
        self._writer: Any

    def start(self, run: RunInfo) -> None:
        from tensorboard.summary.writer.event_file_writer import (
            EventFileWriter,
        )  # slow to import

        for old in run.folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._run_info, self._writer = run, EventFileWriter(str(run.folder))
        self._write(
            0,
            _hyperparameters(run),
            _text("title", run.title),
            _text("config", _code(run.folder / CONFIG)),
        )

    def rounds(self, records: Sequence[TimedRecord]) -> None:
        for when, record in records:
            self._last = record.round
            self._write(record.round, *_scalars(round_metrics(record)), when=when)
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            folder = self._run_info.folder
            texts = [
                _text("summary", _code(folder / SUMMARY)),
                _text("model", str((folder / MODEL).resolve())),
            ]
            plot = [_image("plot", folder / PLOT)] if (folder / PLOT).exists() else []
            self._write(self._last, *_scalars(final_metrics(summary)), *texts, *plot)
        self._write(self._last, _end(failed=summary is None))
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
    """A file's text, to be shown as it is."""
    return "".join(
        f"    {line}\n" for line in path.read_text(encoding="utf-8").splitlines()
    )


def _image(name: str, path: Path) -> Any:
    from PIL import Image
    from tensorboard.compat.proto.summary_pb2 import Summary

    with Image.open(path) as image:
        (width, height), channels = image.size, len(image.getbands())
    encoded = Summary.Image(
        width=width,
        height=height,
        colorspace=channels,
        encoded_image_string=path.read_bytes(),
    )
    return Summary.Value(tag=name, image=encoded)


def _hyperparameters(run: RunInfo) -> Any:
    """The settings, for the table in which TensorBoard compares runs."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import (
        HParamsPluginData,
        SessionStartInfo,
    )

    start = SessionStartInfo(group_name=run.name, start_time_secs=run.began)
    for name, value in run.parameters().items():
        kind = {bool: "bool_value", str: "string_value"}.get(type(value), "number_value")
        setattr(start.hparams[name], kind, value)
    return _session_value(
        "_hparams_/session_start_info", HParamsPluginData(session_start_info=start)
    )


def _end(*, failed: bool) -> Any:
    from tensorboard.plugins.hparams.api_pb2 import Status
    from tensorboard.plugins.hparams.plugin_data_pb2 import (
        HParamsPluginData,
        SessionEndInfo,
    )

    status = Status.STATUS_FAILURE if failed else Status.STATUS_SUCCESS
    end = SessionEndInfo(status=status, end_time_secs=time.time())
    return _session_value(
        "_hparams_/session_end_info", HParamsPluginData(session_end_info=end)
    )


def _session_value(tag: str, content: Any) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata

    return Summary.Value(
        tag=tag,
        metadata=metadata.create_summary_metadata(content),
        tensor=metadata.NULL_TENSOR,
    )
