"""A line to a port of this machine that can be cut: every connection over it is reset, and
new ones can be made.

with cut_line(server.port) as line:
    node = net.join(0, address=line.address)
    line.cut()
"""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_RESET = struct.pack(
    "ii", 1, 0
)  # what is not read is thrown away, and the other end is told of it at once


class Line:
    """Carries bytes from a port of its own to another, both ways.

    Args:
      port: where connections go to.
    """

    def __init__(self, port: int) -> None:
        self.made = 0  # connections
        self._port = port
        self._ends: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Ends all connections that there are."""
        with self._lock:
            ends, self._ends = self._ends, []
        for end in ends:
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
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
                threading.Thread(target=_carry, args=(one, other), daemon=True).start()


def _carry(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(2**16):
            other.sendall(data)
    with suppress(OSError):
        other.shutdown(socket.SHUT_WR)


@contextmanager
def cut_line(port: int) -> Iterator[Line]:
    line = Line(port)
    try:
        yield line
    finally:
        line.close()
