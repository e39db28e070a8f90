"""Kernels compiled by numba, and the row functions of all models that use them.

Imported at the first computation of such a model. Without numba these models use numpy.
"""

from fedbudget.models.compiled import rows

__all__ = ["rows"]
