"""A TCP proxy to a local port that can reset all its connections.

New connections are accepted after a cut.

with breakable_line(server.port) as line:
    node = net.join(0, address=line.address)
    line.cut()
"""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# SO_LINGER with 0 seconds: closing discards unread data and sends a reset at once.
_RESET = struct.pack("ii", 1, 0)


class Line:
    """Forwards bytes between its own port and another one, both ways.

    Args:
      port: the target port.
    """

    def __init__(self, port: int) -> None:
        self.made = 0  # number of connections so far
        self._port = port
        self._ends: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Reset all open connections."""
        with self._lock:
            ends, self._ends = self._ends, []
        for end in ends:
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.shutdown(socket.SHUT_RDWR)  # wakes the reading thread
            end.close()

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            with self._lock:
                self._ends += [near, far]
                self.made += 1
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=_forward, args=(one, other), daemon=True).start()


def _forward(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(2**16):
            other.sendall(data)
    with suppress(OSError):
        other.shutdown(socket.SHUT_WR)


@contextmanager
def breakable_line(port: int) -> Iterator[Line]:
    line = Line(port)
    try:
        yield line
    finally:
        line.close()
