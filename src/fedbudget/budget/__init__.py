"""Decisions under a budget: what a run spends, and what it does next.

    budget.py      limits, costs of a round, and the ledger of what was spent
    spending.py    which round still fits, and how much must stay in reserve
    control.py     local updates of the next round (τ)
    step_size.py   step size of the next round (η)
    theory.py      the paper's equations, which the controller evaluates

Everything here is a value or a pure function. Nothing reads a clock or a file: the caller
passes measured costs and estimates, and receives the next decision.
"""
