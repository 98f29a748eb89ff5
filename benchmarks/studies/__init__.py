"""Experiments: rounding and clip decisions, a trained policy, training with gradient budgets, and `gspo compare`."""
