"""Who came and went, and why: a line of JSON for each, with time and address, beside the run.

What happens before there is a folder is kept until then. Who has no right to take part may come by the hundred, from
anywhere on the network: of these one a second is written and logged, with how many there were since the last. Who
comes and goes while rounds are made is logged for everyone to see, up to ten at once and one a second after that.
"""

import json
import logging
import os
import time
from pathlib import Path

from fedbudget.errors import printable

AUDIT = "audit.jsonl"

_MOST_KEPT = 10_000  # lines, until there is a folder
_A_SECOND = 1.0
_AT_ONCE = 10  # that come or go, and are told of


class AuditLog:
    """In the event loop's thread, but for `open`, before which nothing is written.

    Args:
      log: where all of it is told to people, too.

    `under_way` is to be set while rounds are made: who comes or goes then is out of the ordinary.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lines: list[str] = []
        self._path: Path | None = None
        self._last_refusal, self._unsaid = -_A_SECOND, 0
        self.under_way = False
        self._room, self._last_change = float(_AT_ONCE), 0.0

    def open(self, folder: Path) -> None:
        """There is a folder now."""
        self._path = folder / AUDIT

    def record(self, event: str, name: str, address: str, reason: str = "", *, by_anyone: bool = False) -> None:
        """Someone has `joined`, `left`, or was `refused`, `dropped` or `revoked`.

        Args:
          by_anyone: it takes no credentials to make it happen.
        """
        more: dict[str, object] = {}
        if by_anyone:
            now = time.monotonic()
            if now - self._last_refusal < _A_SECOND:
                self._unsaid += 1
                return
            if self._unsaid:
                more["others"] = self._unsaid
            self._last_refusal, self._unsaid = now, 0
        self._tell(event, name, address, reason, more)
        known = {"time": round(time.time(), 3), "event": event, "node": printable(name), "address": address}
        self._lines.append(json.dumps({**known, **({"reason": printable(reason)} if reason else {}), **more}))
        del self._lines[:-_MOST_KEPT]
        self._flush()

    def _tell(self, event: str, name: str, address: str, reason: str, more: dict[str, object]) -> None:
        fields = {"event": event, "node": name, "address": address}
        why = f": {printable(reason)}" if reason else ""
        if event in ("joined", "left"):
            self._log.log(self._level_of_change(), "%s has %s%s", name, event, why, extra=fields)
            return
        others = f" (and {more['others']} others since the last line)" if more else ""
        self._log.warning("%s at %s is %s%s%s", printable(name), address, event, why, others, extra=fields)

    def _level_of_change(self) -> int:
        """Of who came or went: what not only those should see who ask for everything."""
        if not self.under_way:
            return logging.INFO
        now = time.monotonic()
        self._room = min(_AT_ONCE, self._room + (now - self._last_change) / _A_SECOND)
        self._last_change = now
        if self._room < 1:
            return logging.INFO
        self._room -= 1
        return logging.WARNING

    def _flush(self) -> None:
        if self._path is None or not self._lines:
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        try:
            handle = os.open(self._path, flags, 0o600)
        except OSError:
            return  # with the next line, when there is room again
        try:
            os.write(handle, "".join(f"{line}\n" for line in self._lines).encode())
            self._lines = []
        except OSError:
            pass
        finally:
            os.close(handle)
