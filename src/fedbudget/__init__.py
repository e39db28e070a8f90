"""fedbudget: the best model that a fixed budget can buy, from data that stays on its nodes."""

__version__ = "0.1.0"
