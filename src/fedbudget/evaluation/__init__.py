"""Evaluation: metrics, when to evaluate, targets, overfitting, and the kept model."""
