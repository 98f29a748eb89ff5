"""Measurements. `gspo bench` runs from anywhere, the rest from the root of a clone: `python -m benchmarks.step --help`."""
