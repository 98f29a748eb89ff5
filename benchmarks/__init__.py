"""Measurements, run from the root of the repository: `python -m benchmarks.gpu --help`."""

import sys
from pathlib import Path

# The limits and batches of the tests are those of the benchmarks.
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
