"""Errors for people.

`UserError` is a mistake in what was asked (a wrong option, a bad file): one clear line, exit code 2.
Everything else that goes wrong is a failure of the work itself: exit code 1, and one clear line where it is foreseen
(`WorkError`). Of the two sides of a conversation, `LocalError` is ours and `PeerError` the other's (protocol/).
"""


class FedbudgetError(Exception):
    """All errors of fedbudget's own."""


class UserError(FedbudgetError, ValueError):
    """What was asked cannot be done; the message says what is wrong, where, and what would be right."""


class WorkError(FedbudgetError, RuntimeError):
    """The work failed for a reason that is not in what was asked; the message is all that a person needs of it."""
