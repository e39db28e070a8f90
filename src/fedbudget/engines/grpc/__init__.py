"""Aggregator and nodes on different machines, connected by gRPC."""
