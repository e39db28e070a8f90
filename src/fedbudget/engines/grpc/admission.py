"""Who is let in: names, tokens, certificates, how often one may come; all of it before the first message is read."""

import time
from collections import deque
from typing import Any

import grpc

from fedbudget.engines.grpc.credentials import peer_names
from fedbudget.engines.grpc.stream import NAME, TOKEN
from fedbudget.engines.grpc.tokens import Tokens, valid_name
from fedbudget.engines.remote.members import OWN

_CONNECTIONS, _WITHIN = 20, 10.0  # how often a node may connect, and within how many seconds
_NAMES = 10_000  # that are remembered for that, before old ones are forgotten


class Refusal(Exception):
    """A peer is turned away; unlike a `PeerError`, with a code that tells it what to do about it."""

    def __init__(self, code: Any, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class AdmissionControl:
    """Looks at everyone who comes, and lets in who has one of the tokens."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._lately: dict[str, deque[float]] = {}  # when nodes have connected

    def admit(self, context: Any) -> str:
        """Who a peer is, from what it said before its first message."""
        metadata = dict(context.invocation_metadata() or ())
        name, token = str(metadata.get(NAME, "")), str(metadata.get(TOKEN, ""))
        if not valid_name(name) or name == OWN:
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "its name is not one that a node may have")
        if self._tokens.required and not self._tokens.allows(name, token):
            raise Refusal(grpc.StatusCode.UNAUTHENTICATED, f"{name} has not given the right token")
        proven = peer_names(context.auth_context() or {})
        if proven and name not in proven:
            raise Refusal(grpc.StatusCode.PERMISSION_DENIED, f"{name} is not a name that its certificate is for")
        now = time.monotonic()
        if len(self._lately) > _NAMES:
            self._lately = {each: times for each, times in self._lately.items() if now - times[-1] < _WITHIN}
        lately = self._lately.setdefault(name, deque(maxlen=_CONNECTIONS))
        if len(lately) == _CONNECTIONS and now - lately[0] < _WITHIN:
            raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{name} connects too often")
        lately.append(now)
        return name
