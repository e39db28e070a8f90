"""Where a run will end, and what more budget would buy; curve.py has the statistics."""
