"""Whether the kernels are right and fast on the GPU at hand: `python -m gspo_kernels.benchmarks gpu --help`."""

import sys
from pathlib import Path

# The limits and batches of the tests are those of the checks here.
sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tests"))
