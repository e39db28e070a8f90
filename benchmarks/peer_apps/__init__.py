"""W1 as apps of other frameworks, as a careful user would write them: each runs in an environment of its own, without
fedbudget.
"""
