"""Where commands print their tables: on a terminal as wide as that is, elsewhere with nothing cut or wrapped."""

import sys

from rich.console import Console

_WIDE = 1000  # columns; no table of ours is as wide


def console() -> Console:
    """A console on standard output."""
    return Console(width=None if sys.stdout.isatty() else _WIDE)
