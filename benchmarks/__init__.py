"""Measurements: `gspo bench`, and `python -m gspo_kernels.benchmarks` (its studies and report need a clone)."""
