"""Measurements. `gspo bench` runs anywhere, the rest from a clone: `python -m gspo_kernels.benchmarks --help`."""
