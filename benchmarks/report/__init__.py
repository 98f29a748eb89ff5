"""Plots and pages of the documentation, made from the committed JSON: `python -m gspo_kernels.benchmarks report`."""
