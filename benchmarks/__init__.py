"""Measurements. `gspo bench` runs anywhere, the rest from the root of a clone: `python -m benchmarks.step --help`."""
