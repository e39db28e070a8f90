"""Forecasts of a run: curve.py has the statistics, forecast.py applies them to records."""
