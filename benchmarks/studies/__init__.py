"""Experiments: rounding errors and clip decisions, a trained policy, and training with gradient budgets."""
