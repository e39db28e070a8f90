"""Benchmarks of fedbudget. `make bench` runs the main ones."""
