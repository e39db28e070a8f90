"""Who is let in: names, tokens, certificates, how often one may come; all of it before the first message is read.

Who gives wrong tokens waits for its answer, each time longer. That is by address, and only for wrong ones: a node that
is behind the same address as one that guesses is let in at once.

Who came and went, and why: a line of JSON for each, with time and address, beside the run.

What happens before there is a folder is kept until then. Who has no right to take part may come by the hundred, from
anywhere on the network: of these one a second is written and logged, with how many there were since the last. Who
comes and goes while rounds are made is logged for everyone to see, up to ten at once and one a second after that.
"""

import json
import logging
import os
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from fedbudget.engines.grpc.credentials import peer_names
from fedbudget.engines.grpc.stream import NAME, TOKEN
from fedbudget.engines.grpc.tokens import TokenFile, Tokens, valid_name
from fedbudget.engines.remote.members import OWN
from fedbudget.errors import printable

# how often a node may connect, and within how many seconds
_CONNECTIONS = 20
_WITHIN = 10.0
# seconds after a wrong token; until it is forgotten
_FIRST = 0.02
_LONGEST = 5.0
_FORGOTTEN = 60.0
_WAITING = 50  # answers to one address that are held back at a time
_NAMES = 10_000  # that are remembered for that, before old ones are forgotten


class Refusal(Exception):
    """A peer is turned away; unlike a `PeerError`, with a code that tells it what to do about it.

    Args:
      wait: seconds until it is told.
    """

    def __init__(self, code: Any, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.code = code
        self.wait = wait


class AdmissionControl:
    """Looks at everyone who comes, and lets in who has one of the tokens.

    Args:
      tokens: that are right now.
      allowed: names of nodes that may come; None for all.
    """

    def __init__(
        self, tokens: Tokens | TokenFile, allowed: Collection[str] | None = None
    ) -> None:
        self._tokens = tokens
        self._allowed = allowed
        self._lately: dict[str, deque[float]] = {}  # when nodes have connected
        self._wrong: dict[str, _WrongTokens] = {}  # by address

    @property
    def tokens(self) -> Tokens:
        return self._tokens if isinstance(self._tokens, Tokens) else self._tokens.tokens

    def reload(self) -> bool:
        """Whether there are other tokens than before."""
        return isinstance(self._tokens, TokenFile) and self._tokens.reload()

    def admit(self, context: Any) -> tuple[str, str]:
        """Who a peer is, and the token by which it is, from what it said before its first message."""
        metadata = dict(context.invocation_metadata() or ())
        name = str(metadata.get(NAME, ""))
        token = str(metadata.get(TOKEN, ""))
        if not valid_name(name) or name == OWN:
            raise Refusal(
                grpc.StatusCode.INVALID_ARGUMENT, "its name is not one that a node may have"
            )
        if self.tokens.required and not self.tokens.allows(name, token):
            wait = self._after_wrong_token(address_of(context.peer()))
            raise Refusal(
                grpc.StatusCode.UNAUTHENTICATED,
                f"{name} has not given the right token",
                wait,
            )
        if self._allowed is not None and name not in self._allowed:
            raise Refusal(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{name} is not one of the nodes that are allowed here",
            )
        proven = peer_names(context.auth_context() or {})
        if proven and name not in proven:
            raise Refusal(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{name} is not a name that its certificate is for",
            )
        now = time.monotonic()
        if len(self._lately) > _NAMES:
            self._lately = {
                each: times
                for each, times in self._lately.items()
                if now - times[-1] < _WITHIN
            }
        lately = self._lately.setdefault(name, deque(maxlen=_CONNECTIONS))
        if len(lately) == _CONNECTIONS and now - lately[0] < _WITHIN:
            raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{name} connects too often")
        lately.append(now)
        return name, token

    def answered(self, address: str) -> None:
        """One that gave a wrong token has had its answer."""
        if address in self._wrong:
            self._wrong[address].waiting -= 1

    def _after_wrong_token(self, address: str) -> float:
        """Seconds until the answer: the longer, the more wrong ones came from there; but few wait at a time."""
        now = time.monotonic()
        if len(self._wrong) > _NAMES:
            self._wrong = {
                each: wrong
                for each, wrong in self._wrong.items()
                if now - wrong.last < _FORGOTTEN
            }
        wrong = self._wrong.setdefault(address, _WrongTokens())
        wrong.count = 1 if now - wrong.last > _FORGOTTEN else wrong.count + 1
        wrong.last = now
        wrong.waiting += 1
        return (
            0.0
            if wrong.waiting > _WAITING
            else min(_LONGEST, _FIRST * 2 ** min(wrong.count, 30))
        )


@dataclass
class _WrongTokens:
    """From one address: how many, when the last, and how many wait for their answer."""

    count: int = 0
    last: float = 0.0
    waiting: int = 0


def address_of(peer: str) -> str:
    """Where a peer is, without its port, which is another for every connection.

    >>> address_of("ipv4:192.0.2.1:40312"), address_of("ipv6:%5B::1%5D:40312"), address_of("unix:")
    ('ipv4:192.0.2.1', 'ipv6:%5B::1%5D', 'unix:')
    """
    return peer.rpartition(":")[0] if peer.startswith("ip") else peer


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
        self._last_refusal = -_A_SECOND
        self._unsaid = 0
        self.under_way = False
        self._room = float(_AT_ONCE)
        self._last_change = 0.0

    def open(self, folder: Path) -> None:
        """There is a folder now."""
        self._path = folder / AUDIT

    def record(
        self,
        event: str,
        name: str,
        address: str,
        reason: str = "",
        *,
        by_anyone: bool = False,
    ) -> None:
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
            self._last_refusal = now
            self._unsaid = 0
        self._tell(event, name, address, reason, more)
        known = {
            "time": round(time.time(), 3),
            "event": event,
            "node": printable(name),
            "address": address,
        }
        self._lines.append(
            json.dumps(
                {**known, **({"reason": printable(reason)} if reason else {}), **more}
            )
        )
        del self._lines[:-_MOST_KEPT]
        self._flush()

    def _tell(
        self, event: str, name: str, address: str, reason: str, more: dict[str, object]
    ) -> None:
        fields = {"event": event, "node": name, "address": address}
        why = f": {printable(reason)}" if reason else ""
        if event in ("joined", "left"):
            self._log.log(
                self._level_of_change(), "%s has %s%s", name, event, why, extra=fields
            )
            return
        others = f" (and {more['others']} others since the last line)" if more else ""
        self._log.warning(
            "%s at %s is %s%s%s", printable(name), address, event, why, others, extra=fields
        )

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
