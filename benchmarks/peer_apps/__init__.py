"""W1 as carefully written apps of other frameworks.

Each app runs in its own environment, without fedbudget.
"""
