"""Logs of aggregators and nodes on standard error, as text or as lines of JSON.

Texts may come from peers: control characters are removed before they are written. This file
needs no extra, since a node has only `fedbudget[node]`.
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from fedbudget.errors import printable
from fedbudget.settings.network import LogOptions

_CLOCK = "%H:%M:%S"
_FIELDS = ("event", "node", "address")


def log_handler(options: LogOptions) -> logging.Handler:
    """Return the handler that writes to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if options.log_format == "json" else _Text())
    handler.setLevel(options.log_level.upper())
    return handler


def node_log(options: LogOptions) -> Callable[[str, str], None]:
    """Return a function that prints the time, the name of a node and a message.

    Why a node stops is printed elsewhere, at every level.
    """

    def write(name: str, text: str) -> None:
        if options.log_level == "error":
            return
        line = f"{time.strftime(_CLOCK)} {name}: {printable(text)}"
        if options.log_format == "json":
            line = json.dumps(
                {"time": round(time.time(), 3), "node": name, "message": printable(text)}
            )
        print(line, file=sys.stderr, flush=True)

    return write


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{self.formatTime(record, _CLOCK)} {printable(record.getMessage())}"


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        known: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
        }
        more = {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
        return json.dumps({**known, **more, "message": printable(record.getMessage())})
