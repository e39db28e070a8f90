"""Kernels that numba compiles, with the row functions of all models that have some.

Imported when the first of these models computes something; where numba is not installed, they are computed in numpy.
"""

from fedbudget.models.compiled import rows

__all__ = ["rows"]
