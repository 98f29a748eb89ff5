"""Times of the kernels on the GPU at hand, and the fastest block shapes.

`python -m gspo_kernels.benchmarks gpu --help`. Whether kernels are right there: `python -m pytest -m gpu`.
"""
