"""Secure aggregation: nodes mask their reports, and the masks cancel in the sum over nodes.

The aggregator opens the sum and no single report. Nothing here does I/O; engines/grpc sends
the messages.

The masks protect reports only from an aggregator that follows the protocol. An aggregator
that deviates from it, for example by inventing nodes of its own, may learn more. See
docs/guide/secure-aggregation.md for the threats that are covered and those that are not.
"""
