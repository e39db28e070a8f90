"""How what happens on a network is logged: for people, or as lines of JSON for other programs.

Texts may come from peers: none has a control character when it is written.
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from fedbudget.errors import printable
from fedbudget.launch.options import LogOptions

_FIELDS = ("event", "node", "address")


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{self.formatTime(record, '%H:%M:%S')} {printable(record.getMessage())}"


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        known: dict[str, Any] = {"time": round(record.created, 3), "level": record.levelname.lower()}
        more = {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
        return json.dumps({**known, **more, "message": printable(record.getMessage())})


def log_handler(options: LogOptions) -> logging.Handler:
    """Writes to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if options.log_format == "json" else _Text())
    handler.setLevel(options.log_level.upper())
    return handler


def teller(options: LogOptions) -> Callable[[str, str], None]:
    """Says what happens at a node, by its name; what ends it is told in any case."""

    def tell(name: str, text: str) -> None:
        if options.log_level == "error":
            return
        line = f"{name}: {printable(text)}"
        if options.log_format == "json":
            line = json.dumps({"time": round(time.time(), 3), "node": name, "message": printable(text)})
        print(line, file=sys.stderr, flush=True)

    return tell
