"""Aggregator and nodes on different machines, over gRPC."""
