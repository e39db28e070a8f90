"""Sums that nobody can open: what is sent is masked, and masks cancel in the sum over nodes.

Without any I/O; engines/grpc carries it. docs/guide/secure-aggregation.md says what it protects from, and what not.
"""
