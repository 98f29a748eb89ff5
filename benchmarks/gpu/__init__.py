"""Time the kernels on the GPU at hand, and rank block shapes. `python -m pytest -m gpu` checks the kernels' results."""
