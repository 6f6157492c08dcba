"""Lets the tests of this room import their `packing_samples`, and the benchmarks' mixture."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
