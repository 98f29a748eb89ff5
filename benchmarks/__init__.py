"""Measurements. `gspo bench` needs no clone, all others do: `python -m gspo_kernels.benchmarks --help`."""
