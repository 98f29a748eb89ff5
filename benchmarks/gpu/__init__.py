"""Time the kernels on this machine's GPU, and rank block shapes. `python -m pytest -m gpu` checks the results."""
