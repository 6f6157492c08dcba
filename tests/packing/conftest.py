"""Lets the tests of this room import their `packing_samples`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
