"""Of which machine a meter's joules are: nodes that share a machine read the same ones, which count once.

An estimate says so in front of the machine, because nodes tell no more of their meter than this.
"""

import hashlib
import socket
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_ESTIMATE = "estimate:"


def this_host() -> str:
    """This machine, without its name: the same for all of its processes until it starts again, in containers too.

    >>> this_host() == this_host(), len(this_host())
    (True, 16)
    """
    try:
        name = _BOOT.read_text().strip()
    except OSError:
        name = socket.gethostname()
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def estimated(host: str) -> str:
    """The machine, of joules that are an estimate."""
    return _ESTIMATE + host


def is_estimate(host: str) -> bool:
    return host.startswith(_ESTIMATE)


def machine(host: str) -> str:
    """Of which machine, estimated or not.

    >>> machine(estimated("a")), machine("a")
    ('a', 'a')
    """
    return host.removeprefix(_ESTIMATE)
