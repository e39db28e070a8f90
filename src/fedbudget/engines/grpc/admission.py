"""Admission of peers, and the audit log.

`AdmissionControl` checks names, tokens, certificates and connection rates before the first
message is read. Answers to wrong tokens are delayed, longer each time. Delays apply to an
address, and only to wrong tokens: a node behind the same address with a valid token is
admitted at once, unless so many answers are delayed that the address is not
listened to. A node that was dropped or did not fit twice has to wait before it returns,
twice as long each time.

`AuditLog` writes a line of JSON for each peer that came or went, with time, address and
reason, into the run's folder. Events before the folder exists are kept in memory. Peers
without credentials can cause any number of refusals; one refusal a second is written and
logged, with the number of others since. Peers that come or go during rounds are logged as
warnings, up to ten at once and then one a second.

Threads: everything runs in the event loop's thread.
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

from fedbudget.engines.grpc.credentials import peer_name
from fedbudget.engines.grpc.stream import NAME, TOKEN
from fedbudget.engines.grpc.tokens import TokenFile, Tokens, valid_name
from fedbudget.engines.remote.members import OWN
from fedbudget.errors import printable

AUDIT = "audit.jsonl"

# connections that one node may open, and within how many seconds
_CONNECTIONS = 20
_WITHIN = 10.0
# seconds: first and longest delay after a wrong token, and until it is forgotten
_FIRST = 0.02
_LONGEST = 5.0
_FORGOTTEN = 60.0
_WAITING = 50  # delayed answers to one address at a time
# faults without a wait, longest wait in seconds, and seconds until they are forgotten
_FREE_FAULTS = 2
_LONGEST_BAN = 300.0
_FAULTS_FORGOTTEN = 900.0
_NAMES = 10_000  # remembered names and addresses, before old ones are forgotten

_MOST_KEPT = 10_000  # audit lines in memory
_INTERVAL = 1.0  # seconds between two refusals, or two warnings, in the log
_BURST = 10  # warnings about peers that come or go, at once


class Refusal(Exception):
    """A peer is not admitted. Unlike `PeerError`, it has a code on which the peer can act.

    Args:
      code: of gRPC.
      wait: seconds before the answer is sent.
    """

    def __init__(self, code: Any, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.code = code
        self.wait = wait


class AdmissionControl:
    """Admits peers with a valid name and token.

    Args:
      tokens: the valid ones.
      allowed: names of nodes that may join; None for all.
    """

    def __init__(
        self, tokens: Tokens | TokenFile, allowed: Collection[str] | None = None
    ) -> None:
        self._tokens = tokens
        self._allowed = allowed
        self._connections: dict[str, deque[float]] = {}  # recent times by name
        self._wrong: dict[str, _WrongTokens] = {}  # by address
        self._faults: dict[tuple[str, str], _Faults] = {}  # by name and address

    @property
    def tokens(self) -> Tokens:
        return self._tokens if isinstance(self._tokens, Tokens) else self._tokens.tokens

    def reload(self) -> bool:
        """Read the token file again; returns whether its tokens have changed."""
        return isinstance(self._tokens, TokenFile) and self._tokens.reload()

    def admit(self, context: Any) -> tuple[str, str]:
        """Return a peer's name and token from the stream's metadata.

        Raises:
          Refusal: the peer may not join.
        """
        metadata = dict(context.invocation_metadata() or ())
        name = str(metadata.get(NAME, ""))
        token = str(metadata.get(TOKEN, ""))
        if not valid_name(name) or name == OWN:
            raise Refusal(
                grpc.StatusCode.INVALID_ARGUMENT, "its name is not valid for a node"
            )
        address = address_of(context.peer())
        wrong = self._wrong.get(address)
        if self.tokens.required and wrong is not None and wrong.waiting >= _WAITING:
            raise Refusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "too many wrong tokens from its address"
            )
        if self.tokens.required and not self.tokens.allows(name, token):
            wait = self._after_wrong_token(address)
            raise Refusal(
                grpc.StatusCode.UNAUTHENTICATED, f"{name} has a wrong token or none", wait
            )
        if self._allowed is not None and name not in self._allowed:
            raise Refusal(
                grpc.StatusCode.PERMISSION_DENIED, f"{name} is not an allowed node"
            )
        certified = peer_name(context.auth_context() or {})
        if certified is not None and name != certified:
            raise Refusal(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{name} is not the name in its certificate: {printable(certified)!r}",
            )
        self._limit_rate(name)
        left = self._faults.get((name, address), _Faults()).until - time.monotonic()
        if left > 0:
            raise Refusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{name} was dropped or refused before; it may return in {left:.0f} s",
            )
        return name, token

    def count_fault(self, name: str, context: Any) -> None:
        """Count that a node was dropped, or did not fit; it may have to wait."""
        now = time.monotonic()
        if len(self._faults) > _NAMES:
            self._faults = {
                key: each
                for key, each in self._faults.items()
                if now - each.last < _FAULTS_FORGOTTEN
            }
        faults = self._faults.setdefault((name, address_of(context.peer())), _Faults())
        forgotten = now - faults.last > _FAULTS_FORGOTTEN
        faults.count = 1 if forgotten else faults.count + 1
        faults.last = now
        if faults.count > _FREE_FAULTS:
            ban = 2.0 ** min(30, faults.count - _FREE_FAULTS)
            faults.until = now + min(_LONGEST_BAN, ban)

    def answered(self, address: str) -> None:
        """Count a delayed answer as sent."""
        if address in self._wrong:
            self._wrong[address].waiting -= 1

    def _limit_rate(self, name: str) -> None:
        now = time.monotonic()
        if len(self._connections) > _NAMES:
            self._connections = {
                name: times
                for name, times in self._connections.items()
                if now - times[-1] < _WITHIN
            }
        recent = self._connections.setdefault(name, deque(maxlen=_CONNECTIONS))
        if len(recent) == _CONNECTIONS and now - recent[0] < _WITHIN:
            raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{name} connects too often")
        recent.append(now)

    def _after_wrong_token(self, address: str) -> float:
        """Seconds until the answer. The delay doubles."""
        now = time.monotonic()
        if len(self._wrong) > _NAMES:
            self._wrong = {
                address: wrong
                for address, wrong in self._wrong.items()
                if now - wrong.last < _FORGOTTEN
            }
        wrong = self._wrong.setdefault(address, _WrongTokens())
        wrong.count = 1 if now - wrong.last > _FORGOTTEN else wrong.count + 1
        wrong.last = now
        wrong.waiting += 1
        return min(_LONGEST, _FIRST * 2.0 ** min(wrong.count, 30))


@dataclass
class _WrongTokens:
    """From one address: how many, time of the last, and answers that are delayed."""

    count: int = 0
    last: float = 0.0
    waiting: int = 0


@dataclass
class _Faults:
    """Of one node: how many, time of the last, and when the node may return."""

    count: int = 0
    last: float = 0.0
    until: float = 0.0


def address_of(peer: str) -> str:
    """A peer's address without the port, which differs between connections.

    >>> [address_of(peer) for peer in ("ipv4:192.0.2.1:40312", "ipv6:%5B::1%5D:1", "unix:")]
    ['ipv4:192.0.2.1', 'ipv6:%5B::1%5D', 'unix:']
    """
    return peer.rpartition(":")[0] if peer.startswith("ip") else peer


class AuditLog:
    """Writes the audit file, and logs the same events.

    Args:
      log: receives all events too.

    Set `under_way` during rounds: peers that come or go then are unusual.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lines: list[str] = []
        self._path: Path | None = None
        self._last_refusal = -_INTERVAL
        self._unlogged = 0
        self.under_way = False
        self._allowance = float(_BURST)
        self._last_change = 0.0

    def open(self, folder: Path) -> None:
        """Write to this folder from now on."""
        self._path = folder / AUDIT
        self._flush()

    def record(
        self,
        event: str,
        name: str,
        address: str,
        reason: str = "",
        *,
        by_anyone: bool = False,
    ) -> None:
        """Record an event.

        Args:
          event: `joined`, `left`, `refused`, `dropped` or `revoked`.
          by_anyone: a peer without credentials can cause it.
        """
        others = 0
        if by_anyone:
            now = time.monotonic()
            if now - self._last_refusal < _INTERVAL:
                self._unlogged += 1
                return
            others = self._unlogged
            self._last_refusal = now
            self._unlogged = 0
        self._log_event(event, name, address, reason, others)
        line: dict[str, object] = {
            "time": round(time.time(), 3),
            "event": event,
            "node": printable(name),
            "address": address,
        }
        if reason:
            line["reason"] = printable(reason)
        if others:
            line["others"] = others
        self._lines.append(json.dumps(line))
        del self._lines[:-_MOST_KEPT]
        self._flush()

    def _log_event(
        self, event: str, name: str, address: str, reason: str, others: int
    ) -> None:
        fields = {"event": event, "node": name, "address": address}
        why = f": {printable(reason)}" if reason else ""
        if event in ("joined", "left"):
            level = self._change_level()
            self._log.log(level, "%s has %s%s", name, event, why, extra=fields)
            return
        more = f" (and {others} others since the last line)" if others else ""
        self._log.warning(
            "%s at %s is %s%s%s", printable(name), address, event, why, more, extra=fields
        )

    def _change_level(self) -> int:
        """Log level for a peer that came or went."""
        if not self.under_way:
            return logging.INFO
        now = time.monotonic()
        gained = (now - self._last_change) / _INTERVAL
        self._allowance = min(_BURST, self._allowance + gained)
        self._last_change = now
        if self._allowance < 1:
            return logging.INFO
        self._allowance -= 1
        return logging.WARNING

    def _flush(self) -> None:
        if self._path is None or not self._lines:
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        try:
            handle = os.open(self._path, flags, 0o600)
        except OSError:
            return  # the lines are written with the next one, once the disk has space
        try:
            os.write(handle, "".join(f"{line}\n" for line in self._lines).encode())
            self._lines = []
        except OSError:
            pass
        finally:
            os.close(handle)
